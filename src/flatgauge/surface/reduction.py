"""What a mean loss is a mean over, found by watching it on single samples.

For a mean over d(n) things in sample n, sums add up: d(all) g(all) = Σ d(n) g(n), where g is the
loss together with its gradient. The candidate d for which that holds is the denominator; if
g(all) = Σ g(n), the loss is a sum; if nothing fits, the samples of a batch influence each other
and there is no loss per sample. Single samples are looked at first, chosen to differ; then every
chunk of the data that may hold anything new, together with samples already known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatgauge.estimators.linalg import to_float64
from flatgauge.surface.data import IGNORED, Batch, join, signature, why_whole

if TYPE_CHECKING:
    from flatgauge.surface.data import DataSource
    from flatgauge.surface.losses import Loss

#: Samples that are looked at where labels show nothing.
_FEW = 8

#: Samples chosen for a label that no other has shown.
_MOST = 16


def labels_of(batch: Batch) -> Tensor | None:
    """The integer labels of every sample (N, labels per sample), if the target is that."""
    target = batch.target
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        return None
    if target.dim() == 0 or len(target) != batch.samples:
        return None
    return target.detach().cpu().reshape(batch.samples, -1)


def distinct_values(labels: Tensor) -> set[int]:
    """The values that occur, in little memory: masks of images have many labels."""
    found: set[int] = set()
    for block in torch.split(labels.reshape(-1), 2**20):
        values = block.long()
        low = int(values.min())
        if int(values.max()) - low < 2**16:  # Faster than sorting, which `unique` does.
            found |= {low + i for i in torch.bincount(values - low).nonzero().flatten().tolist()}
        else:
            found |= set(values.tolist())
    return found


def count_labels(labels: Tensor) -> Tensor:
    """How many labels of each sample are not ignored."""
    if labels.dtype is torch.uint8:  # Compared with -100, torch takes 156 for it.
        labels = labels.short()
    return (labels != IGNORED).reshape(len(labels), -1).sum(1).double()


def kind_of(batch: Batch) -> Hashable:
    """What batches have in common that can be joined."""
    kind: Hashable = signature((batch.inputs, batch.target))
    return kind


class ProbeSamples:
    """Samples of one kind, chosen while the data pass by; `seen` holds the labels they show."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self._rows: list[Batch] = []
        self._extremes: dict[str, tuple[float, Batch]] = {}

    def look(self, batch: Batch) -> None:
        """Take from a batch what has not been seen before."""
        labels, taken = labels_of(batch), set[int]()
        if labels is not None and labels.numel():
            taken = self._take_labels(batch, labels)
            counts = count_labels(labels)
            self._take_extreme("fewest", batch, -counts)
            self._take_extreme("most", batch, counts)
        missing = min(_FEW - len(self._rows), batch.samples)
        if missing > 0:
            step = (batch.samples - 1) / max(missing - 1, 1)
            spread = {round(i * step) for i in range(missing)} - taken
            self._rows += [batch.rows([i]).copy() for i in sorted(spread)]

    def variety(self) -> tuple[float, int, int]:
        """How much the samples differ in what a mean could be taken over."""
        sizes = {name: size for name, (size, _) in self._extremes.items()}
        most = sizes.get("most", 1.0)
        spread = (most + sizes.get("fewest", -most)) / most if most else -1.0
        return spread, len(self.seen), len(self._rows)

    def samples(self) -> Batch:
        """The chosen samples."""
        differ = sum(size for size, _ in self._extremes.values()) != 0
        return join(self._rows + [row for _, row in self._extremes.values() if differ])

    def _take_labels(self, batch: Batch, labels: Tensor) -> set[int]:
        taken = set()
        for label in sorted(distinct_values(labels)):
            if label in self.seen or len(self._rows) >= _MOST:
                continue
            index = int((labels == label).any(1).nonzero()[0])
            self._rows.append(batch.rows([index]).copy())
            self.seen |= distinct_values(labels[index])
            taken.add(index)
        return taken

    def _take_extreme(self, name: str, batch: Batch, sizes: Tensor) -> None:
        index = int(sizes.argmax())
        before = self._extremes.get(name)
        if before is None or float(sizes[index]) > before[0]:
            self._extremes[name] = float(sizes[index]), batch.rows([index]).copy()


def select_probe_samples(batches: DataSource) -> ProbeSamples | None:
    """Choose the samples of one kind that differ most; None if no batch can be split."""
    processes = batches.processes
    own = processes.run("probe samples", lambda: _choose(batches.chunks(256)))
    if processes.size == 1:
        return own
    found = processes.all_gather(None if own is None else own.samples())
    return _choose(batch for batch in found if batch is not None)


def _choose(batches: Iterable[Batch]) -> ProbeSamples | None:
    """Look at batches, kind by kind."""
    choices: dict[Hashable, ProbeSamples] = {}
    for batch in batches:
        if batch.splittable:
            choices.setdefault(kind_of(batch), ProbeSamples()).look(batch)
    return max(choices.values(), key=ProbeSamples.variety, default=None)


def shows_all(batch: Batch, choice: ProbeSamples) -> bool:
    """Whether a batch has only labels that the chosen samples show."""
    labels = labels_of(batch)
    return labels is not None and distinct_values(labels) <= choice.seen


def repeat_single(batch: Batch) -> Batch:
    """A single sample repeated, so that a sum differs from a mean."""
    return batch if batch.samples > 1 else batch.rows([0, 0])


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

#: Samples at a time when the whole data are looked through, and of those joined to them.
_CHUNK, _JOINED = 32, 8


def _samples(batch: Batch) -> Tensor:
    return torch.ones(batch.samples, dtype=torch.float64)


def _labels(batch: Batch) -> Tensor | None:
    labels = labels_of(batch)
    return None if labels is None else count_labels(labels)


def _next_tokens(batch: Batch) -> Tensor | None:
    labels = labels_of(batch)
    if labels is None or batch.target.dim() < 2:
        return None
    return count_labels(batch.target[:, 1:].cpu())


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


def find_reduction(
    loss: Loss,
    batches: DataSource,
    evaluate: Callable[..., Tensor],
    denominator: Callable[[Any], float] | None,
    *,
    whole: bool = True,
) -> tuple[Count, list[str]]:
    """Find what the loss of a batch must be multiplied by to give a sum over its samples."""
    chosen: dict[str, Count] = {}
    if denominator is not None:
        chosen["`denominator=`"] = lambda batch: float(
            denominator(batch.inputs if batch.target is None else batch.target)
        )
    elif loss.knows_count:
        chosen[loss.name] = lambda batch: loss.count(batch.target)
    choice = select_probe_samples(batches)
    if choice is None:
        return _of_whole_batches(loss, chosen, batches, evaluate)
    together = choice.samples()
    fitting = _keep_fitting(loss, chosen or _candidates(), repeat_single(together), evaluate)
    if not loss.knows_count:
        fitting = _keep_confirmed(loss, fitting, batches, choice, evaluate if whole else None)
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
    loss: Loss, chosen: dict[str, Count], batches: DataSource, evaluate: Callable[..., Tensor]
) -> tuple[Count, list[str]]:
    """The count of batches that cannot be split: it must be known, as it cannot be found."""
    processes = batches.processes
    first = processes.first_available(
        processes.run("the first batch", lambda: next(iter(batches), None))
    )
    assert first is not None
    if not chosen:
        raise ValueError(_CANNOT_SPLIT.format(loss.name, why_whole(first)))
    _evaluate_twice(first, evaluate)
    note = f"batches are taken whole, as {why_whole(first)}; that the loss is a mean is not checked"
    return next(iter(chosen.values())), [note]


def _evaluate_twice(batch: Batch, evaluate: Callable[..., Tensor]) -> Tensor:
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
    return to_float64(whole)


def _keep_fitting(
    loss: Loss, counts: dict[str, Count], together: Batch, evaluate: Callable[..., Tensor]
) -> dict[str, Count]:
    """The candidates under which single samples add up to all of them together."""
    whole = _evaluate_twice(together, evaluate)
    single = [together.rows([i]) for i in range(together.samples)]
    try:
        parts = [to_float64(evaluate(sample)) for sample in single]
    except Exception as error:  # Batch statistics of one sample, a loss that compares samples.
        raise ValueError(_NO_MEAN.format(loss.name)) from error
    is_sum = is_additive(whole, [1.0] * len(parts), parts)
    if loss.knows_count and is_sum:  # A known total adds up as it is.
        return counts
    fitting = {
        name: count
        for name, count in counts.items()
        if not loss.knows_count
        and is_additive(count(together) * whole, [count(sample) for sample in single], parts)
    }
    if not fitting and not loss.knows_count and is_sum:
        raise ValueError(
            f"the loss {loss.name!r} is a sum over the batch, but a loss surface is a mean; "
            "return the mean (`reduction='mean'`)."
        )
    if not fitting:
        raise ValueError(_NO_MEAN.format(loss.name))
    return fitting


def _keep_confirmed(
    loss: Loss,
    counts: dict[str, Count],
    batches: DataSource,
    choice: ProbeSamples,
    evaluate: Callable[..., Tensor] | None,
) -> dict[str, Count]:
    """The candidates that hold for all data: chunk by chunk, joined to samples of the same kind."""
    processes = batches.processes
    found = processes.gather(
        "what the mean is over", lambda: _check_chunks(loss, counts, batches, choice, evaluate)
    )
    counts = {name: count for name, count in counts.items() if all(name in one for one in found)}
    if not counts:
        raise ValueError(_NO_MEAN.format(loss.name))
    _check_unambiguous(loss, {n: [x for one in found for x in one[n]] for n in counts})
    return counts


def _check_chunks(
    loss: Loss,
    counts: dict[str, Count],
    batches: DataSource,
    choice: ProbeSamples,
    evaluate: Callable[..., Tensor] | None,
) -> dict[str, list[float]]:
    """The candidates that hold for the data of this process, with what each counts by chunk."""
    known: dict[Hashable, tuple[Batch, Tensor]] = {}
    together = choice.samples()
    tallies: dict[str, list[float]] = {name: [] for name in counts}
    for chunk in batches.chunks(_CHUNK):
        if not chunk.splittable:
            if "`denominator=`" not in counts:
                raise ValueError(_CANNOT_SPLIT.format(loss.name, why_whole(chunk)))
            continue
        for name, count in counts.items():
            tallies[name].append(count(chunk))
        kind = kind_of(chunk)
        if evaluate is None or (kind == kind_of(together) and shows_all(chunk, choice)):
            continue
        if kind not in known:
            few = together if kind == kind_of(together) else chunk.rows(slice(_JOINED)).copy()
            known[kind] = few, to_float64(evaluate(few, gradient=False))
        few, of_few = known[kind]
        of_chunk = to_float64(evaluate(chunk, gradient=False))
        whole = to_float64(evaluate(join([few, chunk]), gradient=False))
        counts = {
            name: count
            for name, count in counts.items()
            if _is_consistent(whole, [count(few), count(chunk)], [of_few, of_chunk])
        }
        if not counts:
            raise ValueError(_NO_MEAN.format(loss.name))
    return {name: tallies[name] for name in counts}


def _is_consistent(whole: Tensor, weights: list[float], parts: list[Tensor]) -> bool:
    """Whether two parts make the whole, or there is nothing to be seen."""
    if not any(weights) or not all(
        torch.isfinite(part).all() for part, weight in zip(parts, weights, strict=True) if weight
    ):
        return True  # Nothing counts; or the loss is not finite, which is said when measured.
    return is_additive(sum(weights) * whole, weights, parts)


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


def is_additive(whole: Tensor, weights: list[float], parts: list[Tensor]) -> bool:
    """Whether the weighted parts make the whole; those of weight zero are left out."""
    terms = [weight * part for weight, part in zip(weights, parts, strict=True) if weight != 0]
    if not terms:
        return False
    size = sum(term.norm() for term in terms)
    return bool((whole - torch.stack(terms).sum(0)).norm() <= _TOLERANCE * size)
