"""The loss that a user gave: what it is, which targets it takes, and what it is a mean over.

What enters: a name, a torch module, a callable, or None for the model's own. What leaves: a `Loss`
(`resolve_loss`), and for every batch what its mean must be multiplied by to give a sum over samples
(`find_reduction`). A loss is watched for that on single samples: for a mean over d(n) things in
sample n, d(all) g(all) = Σ d(n) g(n), where g is the loss together with its gradient. The candidate
d for which that holds is the denominator; if g(all) = Σ g(n), the loss is a sum; if nothing fits,
the samples of a batch influence each other and there is no loss per sample. Single samples are
looked at first, chosen to differ; then every chunk of the data that may hold anything new, together
with samples already known.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatgauge.estimators.linalg import to_float64
from flatgauge.runtime.isolation import locate_errors
from flatgauge.surface.data import IGNORED, Batch, join, why_whole
from flatgauge.surface.losses import (
    NAMED,
    NLL,
    Check,
    CrossEntropy,
    Loss,
    binary_cross_entropy,
    check_labels,
    check_range,
    check_unit_interval,
    prediction,
)

if TYPE_CHECKING:
    from flatgauge.surface.data import DataSource

#: What a batch adds to what a mean is divided by.
Count = Callable[[Batch], float]


class CustomLoss(Loss):
    """A user's mean loss; `find_reduction` finds what its mean is taken over."""

    knows_count = False

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.name = str(getattr(function, "__name__", type(function).__name__))
        _check_signature(function, self.name)
        self._function, self._check_values = function, _target_check(function)

    def total(self, output: Any, target: Any) -> Tensor:
        """The mean over the chunk."""
        with locate_errors(f"the loss {self.name!r}"):
            value = self._function(output, target)
        return _as_scalar(value, self.name)

    def check(self, output: Any, target: Any) -> None:
        """Refuse what torch's losses misread."""
        if self._check_values is not None:
            self._check_values(self.name, prediction(output), target)


class ModelLoss(Loss):
    """The loss that a Hugging Face model returns with its output."""

    name = "output.loss"
    own = True
    knows_count = False

    def total(self, output: Any, target: Any) -> Tensor:
        """The mean over the chunk."""
        value = getattr(output, "loss", None)
        if value is None and isinstance(output, Mapping):
            value = output.get("loss")
        if value is None:
            raise ValueError(
                f"`loss=None` means the model's own loss, but the {type(output).__name__} it "
                "returned has no `loss`; put labels in the batches, or pass `loss=`."
            )
        return _as_scalar(value, self.name)


def resolve_loss(loss: Any, denominator: Any = None) -> Loss:
    """Read what the user gave as `loss`, and refuse a denominator for one whose own is known."""
    if denominator is not None and not callable(denominator):
        raise TypeError(
            f"`denominator` is a {type(denominator).__name__}; it must be a function of a batch's "
            "targets, such as `len`."
        )
    resolved = _resolve(loss)
    if denominator is not None and resolved.knows_count:
        raise ValueError(
            f"`denominator=` is given, but the loss {resolved.name!r} has its own, which is known; "
            "leave it out, or pass the loss as a callable (output, target) -> mean loss."
        )
    return resolved


def _resolve(loss: Any) -> Loss:
    """Read a name, a module, a callable or None."""
    if loss is None:
        return ModelLoss()
    if loss == "auto":
        found = CrossEntropy()
        found.own_differs = "take"
        return found
    if isinstance(loss, str):
        if loss not in NAMED:
            raise ValueError(
                f"`loss={loss!r}` is not a name flatgauge knows; use one of "
                f"auto, {', '.join(sorted(NAMED))}, or a callable (output, target) -> mean loss."
            )
        return NAMED[loss]()
    if not callable(loss):
        raise TypeError(
            f"`loss` is a {type(loss).__name__}; it must be a name, a callable (output, target) "
            "-> mean loss, or None for the model's own loss. The order is model, loss, data."
        )
    if isinstance(loss, type):
        raise TypeError(
            f"`loss` is the class {loss.__name__}; pass an instance of it: `{loss.__name__}()`."
        )
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "sum" and isinstance(loss, nn.Module):
        name = type(loss).__name__
        mean = copy.copy(loss)
        mean.reduction = "mean"  # type: ignore[assignment]
        resolved = _resolve(mean)
        resolved.notes = (
            f"the loss {name}(reduction='sum') is taken as its mean, {name}(reduction='mean')",
        )
        return resolved
    if reduction not in ("mean", "batchmean"):
        raise ValueError(
            f"the loss {type(loss).__name__} has reduction={reduction!r}, but a loss surface is a "
            f"mean over samples; use {type(loss).__name__}(reduction='mean')."
        )
    return _resolve_torch(loss) or CustomLoss(loss)


def _resolve_torch(loss: Any) -> Loss | None:
    """Read torch's own losses, functions or modules, whose denominators are known."""
    kind = type(loss)
    if loss is F.mse_loss or kind is nn.MSELoss:
        return NAMED["mse"]()
    if loss is F.l1_loss or kind is nn.L1Loss:
        return NAMED["l1"]()
    if loss is F.binary_cross_entropy_with_logits:
        return binary_cross_entropy()
    if kind is nn.BCEWithLogitsLoss and loss.weight is None:
        return binary_cross_entropy(loss.pos_weight)
    # Classes are the second dimension of the outputs here.
    if loss is F.cross_entropy or loss is F.nll_loss:
        return (CrossEntropy if loss is F.cross_entropy else NLL)(second=True)
    if kind is nn.NLLLoss:
        return NLL(weight=loss.weight, ignored=loss.ignore_index, second=True)
    if kind is nn.CrossEntropyLoss:
        options = {"weight": loss.weight, "ignored": loss.ignore_index}
        return CrossEntropy(smoothing=loss.label_smoothing, second=True, **options)
    return None


def _check_signature(function: Callable[[Any, Any], Any], name: str) -> None:
    """Refuse a loss that cannot be called with output and target."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # Written in C: torch says what is wrong when it is called.
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            f"the loss {name!r} takes the arguments {signature}, but it is called with two, the "
            "model's output and the targets of a batch; write it as a function (output, target) "
            "-> mean loss, such as `lambda output, target: my_loss(output)`."
        ) from None


def _as_scalar(value: Any, name: str) -> Tensor:
    """Refuse a loss that is not one number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the loss {name!r} returned {shape}; it must return the mean over the batch as one "
            "number (for a torch loss: `reduction='mean'`)."
        )
    return value.reshape(())


def _check_signs(name: str, guess: Tensor, target: Any) -> None:
    """Refuse targets other than -1 and 1."""
    check_range(name, target, -math.inf, math.inf, "")
    odd = target[(target != 1) & (target != -1)]
    if odd.numel():
        raise ValueError(
            f"the loss {name!r} got the target {odd.reshape(-1)[0].item():g}, but it needs -1 or "
            "1; give `2 * y - 1` for labels 0 and 1."
        )


def _check_not_negative(name: str, guess: Tensor, target: Any) -> None:
    """Refuse targets below zero."""
    needed = "it needs numbers of at least 0; check what the targets are (logarithms? centred "
    check_range(name, target, 0, math.inf, f"{needed}values?).")


def _check_label_lists(name: str, guess: Tensor, target: Any) -> None:
    """Refuse lists of class numbers, filled up with -1, that name classes that do not exist."""
    classes = guess.shape[-1]
    needed = (
        f"the model has {classes} outputs, so class numbers must lie in 0..{classes - 1} (-1 ends "
        "a list); check the model's last layer and the labels."
    )
    check_range(name, target, -1, classes - 1, needed)


#: What torch's further losses accept as targets.
_TARGET_CHECKS: tuple[tuple[Any, Any, Check], ...] = (
    (nn.BCELoss, F.binary_cross_entropy, check_unit_interval),
    (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, check_unit_interval),
    (nn.HingeEmbeddingLoss, F.hinge_embedding_loss, _check_signs),
    (nn.KLDivLoss, F.kl_div, _check_not_negative),
    (nn.MultiLabelMarginLoss, F.multilabel_margin_loss, _check_label_lists),
    (nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss, check_unit_interval),
    (nn.MultiMarginLoss, F.multi_margin_loss, check_labels),
    (nn.PoissonNLLLoss, F.poisson_nll_loss, _check_not_negative),
    (nn.SoftMarginLoss, F.soft_margin_loss, _check_signs),
)


def _target_check(loss: Any) -> Check | None:
    """What refuses the targets of one of torch's losses; None for others."""
    if getattr(loss, "log_target", False):  # The targets are logarithms.
        return None
    for module, function, check in _TARGET_CHECKS:
        if type(loss) is module or loss is function:
            return check
    return None


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

    def shows_all(self, batch: Batch) -> bool:
        """Whether a batch has only labels that the chosen samples show."""
        labels = labels_of(batch)
        return labels is not None and distinct_values(labels) <= self.seen

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


def select_probe_samples(data: DataSource) -> ProbeSamples | None:
    """Choose the samples of one kind that differ most; None if no batch can be split."""
    own = data.processes.run("probe samples", lambda: _choose(data.chunks(256)))
    if data.processes.size == 1:
        return own
    found = data.processes.all_gather(None if own is None else own.samples())
    return _choose(batch for batch in found if batch is not None)


def _choose(batches: Iterable[Batch]) -> ProbeSamples | None:
    """Look at batches, kind by kind."""
    choices: dict[Hashable, ProbeSamples] = {}
    for batch in batches:
        if batch.splittable:
            choices.setdefault(batch.kind, ProbeSamples()).look(batch)
    return max(choices.values(), key=ProbeSamples.variety, default=None)


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


def _count_labels(batch: Batch) -> float:
    labels = labels_of(batch)
    return float(batch.samples if labels is None else count_labels(labels).sum())


def _count_next_tokens(batch: Batch) -> float:
    if labels_of(batch) is None or batch.target.dim() < 2:
        return float(batch.samples)
    return float(count_labels(batch.target[:, 1:].cpu()).sum())


def _count_numbers(batch: Batch) -> float:
    target = batch.target
    if not isinstance(target, Tensor) or not target.is_floating_point() or target.dim() == 0:
        return float(batch.samples)
    return float(target.numel())


#: What a mean may be taken over, in order of preference; the samples where it does not apply.
CANDIDATES: dict[str, Count] = {
    "samples": lambda batch: float(batch.samples),
    "labels other than -100": _count_labels,
    "next-token labels other than -100": _count_next_tokens,
    "numbers in the target": _count_numbers,
}

#: The name of a denominator that the user gave.
_GIVEN = "`denominator=`"


def find_reduction(
    loss: Loss,
    data: DataSource,
    evaluate: Callable[..., Tensor],
    given: Count | None,
    *,
    whole: bool = True,
) -> tuple[Count, list[str]]:
    """Find what the loss of a batch must be multiplied by to give a sum over its samples."""
    known = {} if given is None else {loss.name if loss.knows_count else _GIVEN: given}
    choice = select_probe_samples(data)
    if choice is None:
        return _of_whole_batches(loss, known, data, evaluate)
    together = choice.samples()
    alone = together.samples == 1
    several = together.rows([0, 0]) if alone else together  # Of one, a sum is also a mean.
    fitting = _keep_fitting(loss, known or CANDIDATES, several, evaluate)
    if not loss.knows_count:
        # Chunk by chunk, joined to samples of the same kind.
        check = partial(_check_chunks, loss, fitting, data, choice, evaluate if whole else None)
        found = data.processes.gather("what the mean is over", check)
        fitting = {n: count for n, count in fitting.items() if all(n in one for one in found)}
        if not fitting:
            raise ValueError(_NO_MEAN.format(loss.name))
        _check_unambiguous(loss, {n: [x for one in found for x in one[n]] for n in fitting})
    notes = ["too few samples to check that the loss is a mean over them"] if alone else []
    return next(iter(fitting.values())), notes


def _of_whole_batches(
    loss: Loss, known: dict[str, Count], data: DataSource, evaluate: Callable[..., Tensor]
) -> tuple[Count, list[str]]:
    """The count of batches that cannot be split: it must be known, as it cannot be found."""
    own = data.processes.run("the first batch", lambda: next(iter(data), None))
    first = data.processes.first_available(own)
    assert first is not None
    if not known:
        raise ValueError(_CANNOT_SPLIT.format(loss.name, why_whole(first)))
    _evaluate_twice(first, evaluate)
    note = f"batches are taken whole, as {why_whole(first)}; that the loss is a mean is not checked"
    return next(iter(known.values())), [note]


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


def _check_chunks(
    loss: Loss,
    counts: dict[str, Count],
    data: DataSource,
    choice: ProbeSamples,
    evaluate: Callable[..., Tensor] | None,
) -> dict[str, list[float]]:
    """The candidates that hold for the data of this process, with what each counts by chunk."""
    together = choice.samples()
    known: dict[Hashable, tuple[Batch, Tensor]] = {}
    tallies: dict[str, list[float]] = {name: [] for name in counts}
    for chunk in data.chunks(_CHUNK):
        if not chunk.splittable:
            if _GIVEN not in counts:
                raise ValueError(_CANNOT_SPLIT.format(loss.name, why_whole(chunk)))
            continue
        for name, count in counts.items():
            tallies[name].append(count(chunk))
        if evaluate is None or (chunk.kind == together.kind and choice.shows_all(chunk)):
            continue
        if chunk.kind not in known:
            few = together if chunk.kind == together.kind else chunk.rows(slice(_JOINED)).copy()
            known[chunk.kind] = few, to_float64(evaluate(few, gradient=False))
        few, of_few = known[chunk.kind]
        parts = [of_few, to_float64(evaluate(chunk, gradient=False))]
        whole = to_float64(evaluate(join([few, chunk]), gradient=False))
        counts = {
            name: count
            for name, count in counts.items()
            if _is_consistent(whole, [count(few), count(chunk)], parts)
        }
        if not counts:
            raise ValueError(_NO_MEAN.format(loss.name))
    return {name: tallies[name] for name in counts}


def _is_consistent(whole: Tensor, weights: list[float], parts: list[Tensor]) -> bool:
    """Whether two parts make the whole, or there is nothing to be seen."""
    counting = [part for part, weight in zip(parts, weights, strict=True) if weight]
    if not counting or not all(torch.isfinite(part).all() for part in counting):
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
