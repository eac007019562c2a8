"""Surrogate losses: a surface under another loss than its own, and the samples that have none.

What enters: a surface and the name of a surrogate. What leaves: the same model and data under that
loss; notes on what differs; the number of samples whose outputs have no such loss.
"""

from __future__ import annotations

import torch

from flatgauge.runtime.isolation import isolate
from flatgauge.surface.losses import NormalizedCrossEntropy, prediction
from flatgauge.surface.surface import LossSurface
from flatgauge.surface.targets import IGNORED

#: The losses that measures may take in place of the surface's own.
SURROGATES = {"normalized_cross_entropy": NormalizedCrossEntropy}

NO_LOSS = "the logits of every sample are constant: none has a normalized loss."


def with_surrogate(surface: LossSurface, surrogate: str | None) -> LossSurface:
    """The same model and data under a surrogate loss; None for the surface's own loss."""
    if surrogate is None:
        return surface
    if surrogate not in SURROGATES:
        known = ", ".join(map(repr, SURROGATES))
        raise ValueError(
            f"`surrogate={surrogate!r}` is unknown; use {known}, or None for the surface's own "
            "loss."
        )
    ignored = surface.risk.loss.ignored
    return surface.with_loss(SURROGATES[surrogate](IGNORED if ignored is None else ignored))


def surrogate_notes(surface: LossSurface, surrogate: str | None) -> list[str]:
    """Notes on what the surface's own loss has and its surrogate does not."""
    if surrogate is None:
        return []
    notes = []
    if surface.weight_decay:
        notes.append("the weight decay of the surface is not part of the surrogate loss")
    if with_surrogate(surface, surrogate).risk.count != surface.risk.count:
        notes.append("every label counts once in the surrogate loss, whatever weights it has else")
    return notes


def samples_without_loss(surface: LossSurface) -> int:
    """How many samples would count but have no loss; a `ValueError` if that is all of them."""
    found: int = surface.cache.get(("samples without loss",), lambda: _count_on_all_ranks(surface))
    if found >= surface.risk.count:
        raise ValueError(NO_LOSS)
    return found


def _count_on_all_ranks(surface: LossSurface) -> int:
    """Their number on all ranks."""
    chunk, processes = surface.chunk, surface.processes
    return int(processes.gather_sum("outputs", lambda: _count_without_loss(surface, chunk)))


def _count_without_loss(surface: LossSurface, chunk: int) -> int:
    """One pass over the data, where outputs may have no loss."""
    objective, subject = surface.risk, surface.functional_model
    if not objective.loss.may_be_undefined:
        return 0
    found = 0
    with isolate(surface.model, surface.device), torch.no_grad():
        for batch in objective.chunks(chunk):
            outputs = prediction(subject(subject.leaves, batch, with_labels=False))
            without = (~objective.loss.is_defined(outputs)).nonzero()[:, 0].tolist()
            found += sum(objective.denominator(batch.rows([place])) > 0 for place in without)
    return found
