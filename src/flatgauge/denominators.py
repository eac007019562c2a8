"""What a mean loss is a mean over, found by watching it on single samples.

For a mean over d(n) things in sample n, sums add up: d(all) g(all) = Σ d(n) g(n), where g is the
loss together with its gradient. The candidate d for which that holds is the denominator; if
g(all) = Σ g(n), the loss is a sum; if nothing fits, the samples of a batch influence each other
and there is no loss per sample. Single samples are looked at first, chosen to differ; then every
chunk of the data that may hold anything new, beside samples already known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flatgauge.batch import Batch, join, obstacle
from flatgauge.batches import Batches
from flatgauge.loss import Loss
from flatgauge.precision import wide
from flatgauge.telling import Choice, all_shown, kept, kind_of, labels_of, telling_samples, twice

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

_CANNOT_SPLIT = (
    "what the loss {!r} is a mean over cannot be found, as batches cannot be cut into samples: {}. "
    "Pass `denominator=` a function of a batch's targets (`len` for a mean over samples), or give "
    "batches made of tensors with the samples along the first dimension."
)

#: Samples at a time when the whole data are looked through, and of those beside them.
_CHUNK, _BESIDE = 32, 8


def _samples(batch: Batch) -> Tensor:
    return torch.ones(batch.samples, dtype=torch.float64)


def _labels(batch: Batch) -> Tensor | None:
    labels = labels_of(batch)
    return None if labels is None else kept(labels)


def _next_tokens(batch: Batch) -> Tensor | None:
    labels = labels_of(batch)
    if labels is None or batch.target.dim() < 2:
        return None
    return kept(batch.target[:, 1:].cpu())


def _numbers(batch: Batch) -> Tensor | None:
    target = batch.target
    if not isinstance(target, Tensor) or not target.is_floating_point() or target.dim() == 0:
        return None
    return torch.full((batch.samples,), target.numel() / batch.samples, dtype=torch.float64)


#: What a mean may be taken over, per sample, in order of preference.
CANDIDATES: dict[str, Callable[[Batch], Tensor | None]] = {
    "samples": _samples,
    "labels other than -100": _labels,
    "next-token labels other than -100": _next_tokens,
    "numbers in the target": _numbers,
}


def find_count(
    loss: Loss,
    batches: Batches,
    evaluate: Callable[..., Tensor],
    denominator: Callable[[Any], float] | None,
    *,
    whole: bool = True,
) -> tuple[Count, list[str]]:
    """Find what the loss of a batch must be multiplied by to give a sum over its samples.

    Args:
        loss: The loss; its own count is trusted but still checked for samples that interact.
        batches: The data.
        evaluate: The loss of a batch (as the user's function returns it, or a total) and its
            gradient, as one vector; without the latter if called with `gradient=False`.
        denominator: The user's own answer, from the targets (from the inputs if there are none).
        whole: Whether to look at all data; else at single samples alone.

    Returns:
        The count of a batch, and notes on what was assumed.

    Raises:
        ValueError: If the loss is a sum, is random, or is no mean over samples.
    """
    chosen: dict[str, Count] = {}
    if denominator is not None:
        chosen["`denominator=`"] = lambda batch: float(
            denominator(batch.inputs if batch.target is None else batch.target)
        )
    elif loss.count is not None:
        known = loss.count
        chosen[loss.name] = lambda batch: known(batch.target)
    choice = telling_samples(batches)
    if choice is None:
        return _of_whole_batches(loss, chosen, batches, evaluate)
    together = choice.samples()
    fitting = _fitting(loss, chosen or _candidates(), twice(together), evaluate)
    if loss.count is None:
        fitting = _confirmed(loss, fitting, batches, choice, evaluate if whole else None)
    alone = together.samples == 1
    notes = ["too few samples to check that the loss is a mean over them"] if alone else []
    return next(iter(fitting.values())), notes


def _candidates() -> dict[str, Count]:
    """Every candidate, as the total over a batch (its samples where it does not apply)."""

    def counter(name: str) -> Count:
        def count(batch: Batch) -> float:
            per_sample = CANDIDATES[name](batch)
            return float(batch.samples if per_sample is None else per_sample.sum())

        return count

    return {name: counter(name) for name in CANDIDATES}


def _of_whole_batches(
    loss: Loss, chosen: dict[str, Count], batches: Batches, evaluate: Callable[..., Tensor]
) -> tuple[Count, list[str]]:
    """The count of batches that cannot be split: it must be known, as it cannot be found."""
    processes = batches.processes
    first = processes.first(processes.attempt("the first batch", lambda: next(iter(batches), None)))
    assert first is not None
    if not chosen:
        raise ValueError(_CANNOT_SPLIT.format(loss.name, obstacle(first)))
    _evaluated_twice(first, evaluate)
    note = f"batches are taken whole, as {obstacle(first)}; that the loss is a mean is not checked"
    return next(iter(chosen.values())), [note]


def _evaluated_twice(batch: Batch, evaluate: Callable[..., Tensor]) -> Tensor:
    """Loss and gradient of a batch, refused if not finite or not the same every time."""
    whole = evaluate(batch)
    if not torch.isfinite(whole).all():
        raise ValueError(
            f"the loss of the first samples looked at is {whole[0].item()}, or its gradient is not "
            "finite; the training diverged, or the loss overflows on this data."
        )
    again = evaluate(batch)
    if (again - whole).norm() > _TOLERANCE * whole.norm():
        raise ValueError(
            "the model gives other outputs for the same inputs: it is random in eval mode. Make "
            "its randomness follow `self.training` (as `nn.Dropout` does, `F.dropout` does not "
            "by itself), or remove it."
        )
    return wide(whole)


def _fitting(
    loss: Loss, counts: dict[str, Count], together: Batch, evaluate: Callable[..., Tensor]
) -> dict[str, Count]:
    """The candidates under which single samples add up to all of them together."""
    whole = _evaluated_twice(together, evaluate)
    single = [together.rows([i]) for i in range(together.samples)]
    try:
        parts = [wide(evaluate(sample)) for sample in single]
    except Exception as error:  # Batch statistics of one sample, a loss that compares samples.
        raise ValueError(_NO_MEAN.format(loss.name)) from error
    is_sum = _adds_up(whole, [1.0] * len(parts), parts)
    if loss.count is not None and is_sum:  # A known total adds up as it is.
        return counts
    fitting = {
        name: count
        for name, count in counts.items()
        if loss.count is None
        and _adds_up(count(together) * whole, [count(sample) for sample in single], parts)
    }
    if not fitting and loss.count is None and is_sum:
        raise ValueError(
            f"the loss {loss.name!r} is a sum over the batch, but a loss surface is a mean; "
            "return the mean (`reduction='mean'`)."
        )
    if not fitting:
        raise ValueError(_NO_MEAN.format(loss.name))
    return fitting


def _confirmed(
    loss: Loss,
    counts: dict[str, Count],
    batches: Batches,
    choice: Choice,
    evaluate: Callable[..., Tensor] | None,
) -> dict[str, Count]:
    """The candidates that hold for all data: chunk by chunk, beside samples of the same kind."""
    processes = batches.processes
    found = processes.collected(
        "what the mean is over", lambda: _seen(loss, counts, batches, choice, evaluate)
    )
    counts = {name: count for name, count in counts.items() if all(name in one for one in found)}
    if not counts:
        raise ValueError(_NO_MEAN.format(loss.name))
    _check_unambiguous(loss, {n: [x for one in found for x in one[n]] for n in counts})
    return counts


def _seen(
    loss: Loss,
    counts: dict[str, Count],
    batches: Batches,
    choice: Choice,
    evaluate: Callable[..., Tensor] | None,
) -> dict[str, list[float]]:
    """The candidates that hold for the data of this process, with what each counts by chunk."""
    beside: dict[Hashable, tuple[Batch, Tensor]] = {}
    together = choice.samples()
    tallies: dict[str, list[float]] = {name: [] for name in counts}
    for chunk in batches.chunks(_CHUNK):
        if not chunk.splittable:
            if "`denominator=`" not in counts:
                raise ValueError(_CANNOT_SPLIT.format(loss.name, obstacle(chunk)))
            continue
        for name, count in counts.items():
            tallies[name].append(count(chunk))
        kind = kind_of(chunk)
        if evaluate is None or (kind == kind_of(together) and all_shown(chunk, choice)):
            continue
        if kind not in beside:
            few = together if kind == kind_of(together) else chunk.rows(slice(_BESIDE)).copy()
            beside[kind] = few, wide(evaluate(few, gradient=False))
        few, of_few = beside[kind]
        of_chunk = wide(evaluate(chunk, gradient=False))
        whole = wide(evaluate(join([few, chunk]), gradient=False))
        counts = {
            name: count
            for name, count in counts.items()
            if _holds(whole, [count(few), count(chunk)], [of_few, of_chunk])
        }
        if not counts:
            raise ValueError(_NO_MEAN.format(loss.name))
    return {name: tallies[name] for name in counts}


def _holds(whole: Tensor, weights: list[float], parts: list[Tensor]) -> bool:
    """Whether two parts make the whole, or there is nothing to be seen."""
    if not any(weights) or not all(
        torch.isfinite(part).all() for part, weight in zip(parts, weights, strict=True) if weight
    ):
        return True  # Nothing counts; or the loss is not finite, which is said when measured.
    return _adds_up(sum(weights) * whole, weights, parts)


def _check_unambiguous(loss: Loss, tallies: dict[str, list[float]]) -> None:
    """Refuse a mean over either of two things, where batches weigh differently by them."""
    (first, one), *others = tallies.items()
    for name, other in others:
        if any(
            abs(a * sum(other) - b * sum(one)) > 1e-9 * sum(one) * sum(other)
            for a, b in zip(one, other, strict=True)
        ):
            raise ValueError(
                f"the loss {loss.name!r} may be a mean over {first} as well as over {name}: both "
                "fit every batch, but they weigh batches of different kinds differently. Say which "
                "with `denominator=len` (samples), `denominator=lambda t: (t != -100).sum()` "
                "(labels; `t[:, 1:]` for next tokens) or `denominator=torch.numel` (numbers)."
            )


def _adds_up(whole: Tensor, weights: list[float], parts: list[Tensor]) -> bool:
    """Whether the weighted parts make the whole; what has weight zero is left out, be it nan."""
    terms = [weight * part for weight, part in zip(weights, parts, strict=True) if weight != 0]
    if not terms:
        return False
    size = sum(term.norm() for term in terms)
    return bool((whole - torch.stack(terms).sum(0)).norm() <= _TOLERANCE * size)
