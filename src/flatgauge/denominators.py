"""What a mean loss is a mean over, found by watching it on single samples.

For a mean over d(n) things in sample n, sums add up: d(all) g(all) = Σ d(n) g(n), where g is the
loss together with its gradient. The candidate d for which that holds is the denominator; if
g(all) = Σ g(n), the loss is a sum; if nothing fits, the samples of a batch influence each other
and there is no loss per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatgauge.batch import Batch
from flatgauge.batches import Batches
from flatgauge.losses import IGNORED, Loss
from flatgauge.precision import wide

Count = Callable[[Batch], float]

#: How well sums must add up, relative to the size of their terms. A wrong denominator
#: misses by far more.
_TOLERANCE = 1e-4

_NO_MEAN = (
    "the loss {!r} of a batch is no mean over its samples: taken together they do not give the "
    "mean of each alone. Either samples influence each other (batch-norm without running "
    "statistics, a contrastive loss): then there is no loss per sample, use one that has; or the "
    "mean has a denominator of its own (class weights, a mask): pass `denominator=` a function of "
    "the targets."
)

#: Samples that are looked at one by one and together.
_SAMPLES = 8


def _samples(batch: Batch) -> Tensor:
    return torch.ones(batch.samples, dtype=torch.float64)


def _kept(target: Tensor) -> Tensor:
    return (target != IGNORED).cpu().reshape(len(target), -1).sum(1).double()


def _labels(batch: Batch) -> Tensor | None:
    target = batch.target
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dim() == 0:
        return None
    return _kept(target) if len(target) == batch.samples else None


def _next_tokens(batch: Batch) -> Tensor | None:
    if _labels(batch) is None or batch.target.dim() < 2:
        return None
    return _kept(batch.target[:, 1:])


#: What a mean may be taken over, per sample, in order of preference.
CANDIDATES: dict[str, Callable[[Batch], Tensor | None]] = {
    "samples": _samples,
    "labels other than -100": _labels,
    "next-token labels other than -100": _next_tokens,
}


def find_count(
    loss: Loss,
    batches: Batches,
    gradient: Callable[[Batch], Tensor],
    denominator: Callable[[Any], float] | None,
) -> tuple[Count, list[str]]:
    """Find what the loss of a batch must be multiplied by to give a sum over its samples.

    Args:
        loss: The loss; its own count is trusted but still checked for samples that interact.
        batches: The data.
        gradient: The loss of a batch (as the user's function returns it, or a total) and its
            gradient, as one vector.
        denominator: The user's own answer, from the targets.

    Returns:
        The count of a batch, and notes on what was assumed.

    Raises:
        ValueError: If the loss is a sum, is random, or is no mean over samples.
    """
    chosen: dict[str, Count] = {}
    if denominator is not None:
        chosen["`denominator=`"] = lambda batch: float(denominator(batch.target))
    elif loss.count is not None:
        known = loss.count
        chosen[loss.name] = lambda batch: known(batch.target)
    together = _telling_samples(batches)
    if together is None:
        fallback = next(iter(chosen.values()), lambda batch: float(batch.samples))
        return fallback, ["too few samples to check that the loss is a mean over them"]
    counts = chosen or {name: _counter(name) for name in CANDIDATES}
    return _settle(loss, counts, together, gradient), []


def _counter(name: str) -> Count:
    """The total of one candidate over a batch (the batch's samples where it does not apply)."""

    def count(batch: Batch) -> float:
        per_sample = CANDIDATES[name](batch)
        return float(batch.samples if per_sample is None else per_sample.sum())

    return count


def _settle(
    loss: Loss,
    counts: dict[str, Count],
    together: Batch,
    gradient: Callable[[Batch], Tensor],
) -> Count:
    """Take the first candidate under which sums add up."""
    whole = gradient(together)
    if not torch.isfinite(whole).all():
        raise ValueError(
            f"the loss of the first samples looked at is {whole[0].item()}, or its gradient is not "
            "finite; the training diverged, or the loss overflows on this data."
        )
    again = gradient(together)
    if (again - whole).norm() > _TOLERANCE * whole.norm():
        raise ValueError(
            "the model gives other outputs for the same inputs: it is random in eval mode. Make "
            "its randomness follow `self.training` (as `nn.Dropout` does, `F.dropout` does not "
            "by itself), or remove it."
        )
    single = [together.rows([i]) for i in range(together.samples)]
    try:
        parts = [wide(gradient(sample)) for sample in single]
    except Exception as error:  # Batch statistics of one sample, a loss that compares samples.
        raise ValueError(_NO_MEAN.format(loss.name)) from error
    whole = wide(whole)
    is_sum = _adds_up(whole, [1.0] * len(parts), parts)
    if loss.count is not None and is_sum:  # A known total adds up as it is.
        return next(iter(counts.values()))
    for count in counts.values() if loss.count is None else ():
        weights = [count(sample) for sample in single]
        if _adds_up(count(together) * whole, weights, parts):
            return count
    if loss.count is None and is_sum:
        raise ValueError(
            f"the loss {loss.name!r} is a sum over the batch, but a loss surface is a mean; "
            "return the mean (`reduction='mean'`)."
        )
    raise ValueError(_NO_MEAN.format(loss.name))


def _adds_up(whole: Tensor, weights: list[float], parts: list[Tensor]) -> bool:
    """Whether the weighted parts make the whole; what has weight zero is left out, be it nan."""
    terms = [weight * part for weight, part in zip(weights, parts, strict=True) if weight != 0]
    if not terms:
        return False
    size = sum(term.norm() for term in terms)
    return bool((whole - torch.stack(terms).sum(0)).norm() <= _TOLERANCE * size)


def _telling_samples(batches: Batches) -> Batch | None:
    """A few samples of one batch that differ most in what a mean could be taken over."""
    best: tuple[tuple[float, int], Batch, list[int]] | None = None
    for batch in batches.chunks(256):
        if batch.splittable and batch.samples > 1:
            key, order = _variety(batch)
            if best is None or key > best[0]:
                best = (key, batch, order)
    if best is None:
        return None
    _, batch, order = best
    step = max(len(order) - 1, 1) / (_SAMPLES - 1)
    return batch.rows(sorted({order[round(i * step)] for i in range(_SAMPLES)}))


def _variety(batch: Batch) -> tuple[tuple[float, int], list[int]]:
    """How much counts and labels vary within a batch, and its samples in that order."""
    labels = _labels(batch)
    if labels is None:
        return (0.0, 0), list(range(batch.samples))
    first = batch.target.cpu().reshape(batch.samples, -1)[:, 0]
    keys = list(zip(labels.tolist(), first.tolist(), strict=True))
    order = sorted(range(batch.samples), key=keys.__getitem__)
    if not labels.any():
        return (-1.0, 0), order
    return (float(labels.max() - labels.min()) / float(labels.max()), len(first.unique())), order
