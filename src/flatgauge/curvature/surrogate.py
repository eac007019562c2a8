"""A surface under another loss than its own, and the samples that have none."""

from __future__ import annotations

import torch

from flatgauge.isolation import isolated
from flatgauge.label_losses import IGNORED, normalized_cross_entropy
from flatgauge.loss import prediction
from flatgauge.surface import LossSurface

#: The losses that measures may take in place of the surface's own.
SURROGATES = {"normalized_cross_entropy": normalized_cross_entropy}

NO_LOSS = "the logits of every sample are constant: none has a normalized loss."


def under_surrogate(surface: LossSurface, surrogate: str | None) -> LossSurface:
    """The same model and data under a surrogate loss.

    Args:
        surface: The surface.
        surrogate: Its name, None for the surface's own loss.

    Returns:
        The surface to measure.

    Raises:
        ValueError: If there is no such surrogate, or it does not fit the outputs and targets.
    """
    if surrogate is None:
        return surface
    if surrogate not in SURROGATES:
        known = ", ".join(map(repr, SURROGATES))
        raise ValueError(
            f"`surrogate={surrogate!r}` is unknown; use {known}, or None for the surface's own "
            "loss."
        )
    ignored = surface.objective.loss.ignored
    return surface.under(SURROGATES[surrogate](IGNORED if ignored is None else ignored))


def caveats(surface: LossSurface, surrogate: str | None) -> list[str]:
    """What the surface's own loss has and its surrogate has not.

    Args:
        surface: The surface.
        surrogate: The surrogate's name, None for the surface's own loss.

    Returns:
        Notes for the reader.
    """
    if surrogate is None:
        return []
    notes = []
    if surface.weight_decay:
        notes.append("the weight decay of the surface is no part of the surrogate loss")
    if under_surrogate(surface, surrogate).objective.count != surface.objective.count:
        notes.append("every label counts once in the surrogate loss, whatever weights it has else")
    return notes


def samples_without_loss(surface: LossSurface) -> int:
    """How many samples would count, but have outputs without a loss.

    Args:
        surface: The surface.

    Returns:
        Their number; zero for a loss that all outputs have.

    Raises:
        ValueError: If none of the samples has a loss.
    """
    found: int = surface.recall("samples without loss", lambda: _counted_by_all(surface))
    if found >= surface.objective.count:
        raise ValueError(NO_LOSS)
    return found


def _counted_by_all(surface: LossSurface) -> int:
    """How many there are on all ranks."""
    chunk, processes = surface.chunk, surface.processes
    return int(processes.sum("outputs", lambda: _counted(surface, chunk)))


def _counted(surface: LossSurface, chunk: int) -> int:
    """One pass over the data, where outputs may have no loss."""
    objective, subject = surface.objective, surface.subject
    defined = objective.loss.defined
    if defined is None:
        return 0
    found = 0
    with isolated(surface.model, surface.device), torch.no_grad():
        for batch in objective.chunks(chunk):
            outputs = prediction(subject(subject.leaves, batch, with_labels=False))
            without = (~defined(outputs)).nonzero()[:, 0].tolist()
            found += sum(objective.denominator(batch.rows([place])) > 0 for place in without)
    return found
