"""Losses: a sum over samples, what divides it, and its second derivatives by the outputs.

What enters: outputs and targets. What leaves: the loss summed over a chunk (`total`), what the sum
is divided by (`count`), and its second derivatives (`hessian`). The mean over a data set is the sum
of `total` over its chunks, divided by the sum of `count`. Targets that torch would take silently,
or refuse without a reason, are refused with what to give instead. `user_loss` reads what the user
gave.

The second derivatives of a sample are a symmetric matrix B over its outputs. It comes as a sum of
weight · u uᵀ: of all factors u, or of those that carry most and random combinations of the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from flatgauge.estimators.linalg import random_signs, to_float64
from flatgauge.surface.data import IGNORED

#: How far probabilities may be from a sum of one: they may have been stored in half precision.
_SUM = 1e-2

#: One vector u per sample, shaped like the outputs, and its weights (n,) if they are not all one.
Factor = tuple[Tensor, Tensor | None]

#: Refuses targets, from the name of a loss, the tensor that it reads, and the targets.
Check = Callable[[str, Tensor, Any], None]


class LossHessian(ABC):
    """B for every sample of a chunk.

    Attributes:
        rank: How many factors give B exactly.
        axis: Of the outputs, along which classes lie.
        can_sample: Whether B also comes as its top factors and random combinations of the rest.
    """

    rank: int
    axis = 1
    can_sample = False

    @abstractmethod
    def factors(self) -> Iterator[Factor]:
        """All factors, so that B is exact."""

    def top_factors(self, count: int) -> Iterator[Factor]:
        """The factors that carry most; the others are left to `random_factors`."""
        raise NotImplementedError

    def random_factors(self, count: int, generator: Generator) -> Iterator[Factor]:
        """Combinations, with random signs, of what `top_factors` left; each is unbiased."""
        raise NotImplementedError


@dataclass
class SoftmaxHessian(LossHessian):
    """Weight · (diag p − p pᵀ) at every position: cross-entropy.

    Attributes:
        probabilities: The softmax p (n, positions, classes), in double precision.
        weights: Of every position (n, positions).
        restore: Brings (n, positions, classes) to the shape of the outputs.
    """

    probabilities: Tensor
    weights: Tensor
    restore: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    axis: int = 1

    def __post_init__(self) -> None:
        p = self.probabilities
        self.rank = p.shape[1] * (p.shape[2] - 1)
        self.can_sample = bool((self.weights >= 0).all())
        self._rest: Tensor | None = None
        # 1 − p is a sum of small terms where p is nearly one: no difference of near numbers.
        self._top = p.argmax(-1, keepdim=True)
        self._others = (1 - p).scatter(
            -1, self._top, p.scatter(-1, self._top, 0.0).sum(-1, keepdim=True)
        )

    def factors(self) -> Iterator[Factor]:
        """The columns of an LDLᵀ decomposition: sums of positive terms, no difference anywhere."""
        p = self.probabilities
        tails = p.flip(-1).cumsum(-1).flip(-1).clamp_min(torch.finfo(p.dtype).tiny)  # Σ_{j≥k} p_j
        for position in range(p.shape[1]):
            given = self.weights[:, position]
            weights = None if bool((given == 1).all()) else given
            for k in range(p.shape[2] - 1):
                after = tails[:, position, k + 1]
                root = (p[:, position, k] * after / tails[:, position, k]).sqrt()
                vector = torch.zeros_like(p)
                vector[:, position, k] = root
                vector[:, position, k + 1 :] = p[:, position, k + 1 :] * (-root / after)[:, None]
                yield self.restore(vector.to(self.dtype)), weights

    def top_factors(self, count: int) -> Iterator[Factor]:
        """The factors √p_k (e_k − p) of largest norm."""
        p = self.probabilities
        squares = p.square()
        apart = (squares.sum(-1, keepdim=True) - squares).clamp_min(0)
        norms = self.weights[..., None] * p * (self._others.square() + apart)
        picked = norms.flatten(1).topk(min(count, norms[0].numel()), dim=1).indices
        self._rest = torch.ones_like(p).flatten(1).scatter(1, picked, 0.0).view_as(p)
        single = -p.to(self.dtype)
        rows = torch.arange(len(p), device=p.device)
        for index in picked.T:
            position, k = index // p.shape[2], index % p.shape[2]
            root = (self.weights[rows, position] * p[rows, position, k]).sqrt()
            vector = torch.zeros_like(single)
            vector[rows, position] = single[rows, position] * root.to(self.dtype)[:, None]
            vector[rows, position, k] = (root * self._others[rows, position, k]).to(self.dtype)
            yield self.restore(vector), None

    def random_factors(self, count: int, generator: Generator) -> Iterator[Factor]:
        """Random combinations of the other factors √p_k (e_k − p)."""
        p = self.probabilities
        scale = (self.weights[..., None] * p / count).sqrt()
        if self._rest is not None:
            scale = scale * self._rest
        for _ in range(count):
            mixed = scale * random_signs(scale.shape, generator).to(scale)
            sums = mixed.sum(-1, keepdim=True)
            vector = mixed - p * sums
            own = mixed.gather(-1, self._top)
            # Where one class has nearly all, the difference is taken apart to keep its digits.
            most = own * self._others.gather(-1, self._top)
            most = most - p.gather(-1, self._top) * (sums - own)
            yield self.restore(vector.scatter(-1, self._top, most).to(self.dtype)), None


@dataclass
class DiagonalHessian(LossHessian):
    """A diagonal B ≥ 0, shaped like the outputs: losses that are sums over outputs."""

    values: Tensor

    can_sample = True

    def __post_init__(self) -> None:
        self.rank = self.values[0].numel()
        self._rest: Tensor | None = None

    def factors(self) -> Iterator[Factor]:
        """One unit vector per output."""
        values = rows_of(self.values)
        for k in range(self.rank):
            vector = torch.zeros_like(values)
            vector[:, k] = 1
            yield vector.view_as(self.values), values[:, k]

    def top_factors(self, count: int) -> Iterator[Factor]:
        """The outputs of largest curvature."""
        values = rows_of(self.values)
        picked = values.topk(min(count, self.rank), dim=1).indices
        self._rest = torch.ones_like(values).scatter(1, picked, 0.0)
        for index in picked.T:
            vector = torch.zeros_like(values).scatter(1, index[:, None], 1.0)
            yield vector.view_as(self.values), values.gather(1, index[:, None])[:, 0]

    def random_factors(self, count: int, generator: Generator) -> Iterator[Factor]:
        """Random combinations of the other outputs."""
        roots = rows_of(self.values).sqrt() * (1.0 if self._rest is None else self._rest)
        for _ in range(count):
            signs = random_signs(roots.shape, generator).to(roots)
            yield (roots * signs / count**0.5).view_as(self.values), None


def rows_of(tensor: Tensor) -> Tensor:
    """One row per sample."""
    return tensor.reshape(len(tensor), -1)


class Loss:
    """A mean loss, as the sum over samples and what divides it.

    Attributes:
        name: How it is called in reports.
        notes: How what the user gave was read.
        own: Whether the model computes the loss itself (`output.loss`).
        knows_count: Whether `count` is known; else `total` returns a mean.
        has_hessian: Whether `hessian` is known.
        last_op: The operation that the model must end in for `hessian`, by whose input it is.
        may_be_undefined: Whether samples can have no loss, depending on the outputs. They add
            nothing to the total, and must not be counted.
        ignored: The label that is left out, if there is one.
        own_differs: What to do if the model computes another loss from the same labels:
            ``"ignore"`` it, ``"refuse"``, or ``"take"`` the model's.
    """

    name: str
    notes: tuple[str, ...] = ()
    own = False
    knows_count = True
    has_hessian = False
    last_op: str | None = None
    may_be_undefined = False
    ignored: int | None = None
    own_differs: Literal["ignore", "refuse", "take"] = "ignore"

    def __deepcopy__(self, memo: dict[int, Any]) -> Loss:
        return self  # It does not change, and may hold the user's function.

    def total(self, output: Any, target: Any) -> Tensor:
        """The sum of the loss over a chunk; its mean where the count is not known."""
        raise NotImplementedError

    def count(self, target: Any) -> float:
        """What the sum is divided by."""
        raise NotImplementedError

    def check(self, output: Any, target: Any) -> None:
        """Refuse targets that do not fit the output."""

    def hessian(self, logits: Tensor, target: Any) -> LossHessian:
        """The second derivatives of the total by the prediction, or by the input of `last_op`."""
        raise NotImplementedError

    def is_defined(self, outputs: Tensor) -> Tensor:
        """Which samples have a loss."""
        raise NotImplementedError

    def term_size(self, outputs: Tensor) -> Tensor:
        """The size of the terms of each sample's second derivatives, which may cancel."""
        raise NotImplementedError


class Elementwise(Loss):
    """A loss averaged over samples and outputs, such as the squared error.

    `second` gives its second derivative by the outputs, from outputs and targets; `options` are
    tensors that go to the function.
    """

    has_hessian = True

    def __init__(
        self,
        name: str,
        function: Callable[..., Tensor],
        second: Callable[[Tensor, Tensor], Tensor],
        check_values: Check | None = None,
        **options: Tensor,
    ) -> None:
        self.name, self._function, self._second = name, function, second
        self._check_values, self._options = check_values, options

    def total(self, output: Any, target: Tensor) -> Tensor:
        """The sum over samples and outputs."""
        guess = prediction(output)
        extra = {key: value.to(guess) for key, value in self._options.items()}
        total: Tensor = self._function(guess, target.to(guess), reduction="sum", **extra)
        return total

    def count(self, target: Tensor) -> float:
        """The number of targets."""
        return float(target.numel())

    def check(self, output: Any, target: Any) -> None:
        """Refuse targets of another shape than the outputs, or of impossible values."""
        guess = prediction(output)
        if not isinstance(target, Tensor) or target.shape != guess.shape:
            given = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(
                f"`loss={self.name!r}` compares outputs of shape {tuple(guess.shape)} with targets "
                f"of shape {given}, which would be broadcast silently; give targets of the "
                "outputs' shape (`y[:, None]` for one output, `F.one_hot(y, classes).float()` for "
                "class labels)."
            )
        if self._check_values is not None:
            self._check_values(self.name, guess, target)

    def hessian(self, logits: Tensor, target: Tensor) -> DiagonalHessian:
        """A diagonal matrix."""
        values = self._second(to_float64(logits.detach()), to_float64(target))
        return DiagonalHessian(values.expand(logits.shape).contiguous())


class LabelLoss(Loss):
    """A loss of class labels; outputs are (N, C), (N, C, ...) or (N, T, C).

    With `second`, classes are the second dimension if both readings fit.
    """

    has_hessian = True

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        ignored: int = IGNORED,
        smoothing: float = 0.0,
        second: bool = False,
    ) -> None:
        self.weight, self.ignored, self.smoothing, self._second = weight, ignored, smoothing, second

    def count(self, target: Tensor) -> float:
        """The denominator that torch uses for class labels or class probabilities."""
        assert self.ignored is not None
        return label_count(target, self.weight, self.ignored)

    def check(self, output: Any, target: Any) -> None:
        """Refuse labels that torch would answer with an index error, or misread."""
        logits = prediction(output)
        check_labels(self.name, logits, target, self.ignored)
        if not self._second:
            check_layout(self.name, logits, target)

    def _torch_options(self, logits: Tensor) -> dict[str, Any]:
        """What torch's functions take apart from logits and labels."""
        weight = None if self.weight is None else self.weight.to(logits)
        return {"weight": weight, "ignore_index": self.ignored, "reduction": "sum"}

    def hessian(self, logits: Tensor, target: Tensor) -> SoftmaxHessian:
        """Every position's share in the loss times (diag p − p pᵀ)."""
        last = logits.dim() > 2 and align_labels(logits, target)[0].shape != logits.shape
        axis = -1 if last else 1
        moved = to_float64(logits.detach()).movedim(axis, -1)  # (n, ..., classes)
        classes = moved.shape[-1]
        scale = moved.new_ones(classes) if self.weight is None else self.weight.to(moved)
        if target.is_floating_point():
            shares = target.to(moved).movedim(axis, -1) @ scale
            shares = (1 - self.smoothing) * shares + self.smoothing * scale.mean()
        else:
            assert self.ignored is not None
            labels = target.long()
            kept = (labels != self.ignored).to(moved)
            labels = labels.where(labels != self.ignored, 0)
            shares = kept * ((1 - self.smoothing) * scale[labels] + self.smoothing * scale.mean())

        def restore(factors: Tensor) -> Tensor:
            return factors.reshape(moved.shape).movedim(-1, axis)

        probabilities = moved.softmax(-1).reshape(len(moved), -1, classes)
        shares = shares.reshape(len(moved), -1)
        return SoftmaxHessian(probabilities, shares, restore, logits.dtype, axis % logits.dim())


class CrossEntropy(LabelLoss):
    """Softmax cross-entropy of logits."""

    name = "cross_entropy"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        plain = self.weight is None and self.ignored == IGNORED and self.smoothing == 0
        self.own_differs = "refuse" if plain else "ignore"

    def total(self, output: Any, target: Tensor) -> Tensor:
        """The sum over positions."""
        logits, labels = align_labels(prediction(output), target)
        return F.cross_entropy(
            logits, labels, label_smoothing=self.smoothing, **self._torch_options(logits)
        )


class NLL(LabelLoss):
    """Negative log-likelihood of log-probabilities, for models that end in log-softmax."""

    name = "nll"
    last_op = "log_softmax"

    def total(self, output: Any, target: Tensor) -> Tensor:
        """The sum over positions."""
        logs, labels = align_labels(prediction(output), target)
        return F.nll_loss(logs, labels, **self._torch_options(logs))

    def check(self, output: Any, target: Any) -> None:
        """Refuse probabilities too."""
        if isinstance(target, Tensor) and target.is_floating_point():
            raise ValueError(
                f"`loss='nll'` needs integer class labels, but got {target.dtype} targets of shape "
                f"{tuple(target.shape)}; give labels, or for class probabilities use "
                "`loss='cross_entropy'` on a model that ends before its log-softmax."
            )
        super().check(output, target)


class NormalizedCrossEntropy(Loss):
    """Cross-entropy of logits divided by their standard deviation over the classes.

    Equation (20) to (22) of Tsuzuku et al. 2019: neither scaling nor shifting the outputs
    changes it. A sample with constant logits has none.
    """

    name = "normalized_cross_entropy"
    may_be_undefined = True

    def __init__(self, ignored: int = IGNORED) -> None:
        self._left_out = ignored

    def total(self, output: Any, target: Tensor) -> Tensor:
        """The sum over samples."""
        logits = prediction(output)
        kept = self.is_defined(logits)
        # Constant logits are replaced before they are divided by zero, not after.
        safe = torch.arange(logits.shape[1], device=logits.device).to(logits)
        logits = torch.where(kept[:, None], logits, safe)
        labels = target.long()
        labels = labels.where(kept & (labels != self._left_out), IGNORED)
        std = logits.std(dim=1, correction=0, keepdim=True)
        return F.cross_entropy(logits / std, labels, ignore_index=IGNORED, reduction="sum")

    def count(self, target: Tensor) -> float:
        """The number of labels that are not left out."""
        return label_count(target, None, self._left_out)

    def check(self, output: Any, target: Any) -> None:
        """Refuse all but outputs (N, classes) and labels (N,)."""
        logits = prediction(output)
        labels = isinstance(target, Tensor) and not target.is_floating_point()
        if not labels or logits.dim() != 2 or target.shape != logits.shape[:1]:
            kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
            shape = f" of shape {tuple(target.shape)}" if isinstance(target, Tensor) else ""
            raise ValueError(
                f"`surrogate={self.name!r}` is a loss of outputs (N, classes) and class labels "
                f"(N,), but the outputs have shape {tuple(logits.shape)} and the targets are "
                f"{kind}{shape}; pass `surrogate=None` to measure the surface's own loss."
            )
        check_labels(self.name, logits, target, self._left_out)

    def is_defined(self, outputs: Tensor) -> Tensor:
        """Which samples have logits that are not constant."""
        return (outputs != outputs[:, :1]).any(dim=1)

    def term_size(self, outputs: Tensor) -> Tensor:
        """One over the variance of the logits."""
        variance = to_float64(outputs.detach()).var(dim=1, correction=0)
        return (1 / variance).where(self.is_defined(outputs), 0.0)


def prediction(output: Any) -> Tensor:
    """The tensor that a named loss compares: the output, its `logits`, or its first numbers."""
    if isinstance(output, Tensor):
        return output
    candidate = logits_of(output)
    if candidate is None:
        candidate = next(iter(float_tensors(output)), None)
    if not isinstance(candidate, Tensor):
        raise TypeError(
            f"the model returns a {type(output).__name__} with no `logits`; a named loss needs a "
            "tensor. Pass `loss=` a callable (output, target) -> mean loss that takes it apart."
        )
    return candidate


def logits_of(output: Any) -> Any:
    """What an output calls its logits; None where it has none."""
    candidate = getattr(output, "logits", None)
    return output.get("logits") if candidate is None and isinstance(output, Mapping) else candidate


def float_tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of a tuple or list, without what is nested in it (caches)."""
    items = output if isinstance(output, (tuple, list)) else ()
    return [item for item in items if isinstance(item, Tensor) and item.is_floating_point()]


def binary_cross_entropy(pos_weight: Tensor | None = None) -> Loss:
    """Binary cross-entropy of logits; the positive cases may weigh more."""

    def second(logits: Tensor, target: Tensor) -> Tensor:
        more = 1.0 if pos_weight is None else pos_weight.to(logits)
        return (target * more + 1 - target) * logits.sigmoid() * (-logits).sigmoid()

    extra = {} if pos_weight is None else {"pos_weight": pos_weight}
    function = F.binary_cross_entropy_with_logits
    return Elementwise("binary_cross_entropy", function, second, check_unit_interval, **extra)


NAMED: dict[str, Callable[[], Loss]] = {
    "binary_cross_entropy": binary_cross_entropy,
    "cross_entropy": CrossEntropy,
    "l1": lambda: Elementwise("l1", F.l1_loss, lambda guess, _: guess.new_zeros(())),
    "mse": lambda: Elementwise("mse", F.mse_loss, lambda guess, _: guess.new_full((), 2.0)),
    "nll": NLL,
}


def align_labels(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Bring logits and class labels to the shapes (M, C) and (M,) or (M, C) of torch."""
    if target.is_floating_point():
        return logits, target
    fits = logits.shape[:1] + logits.shape[2:] == target.shape
    if not fits and logits.shape[:-1] == target.shape:  # (N, T, C): one label per position
        logits, target = logits.flatten(0, -2), target.flatten()
    return logits, target.long()


def label_count(target: Tensor, weight: Tensor | None, ignored: int) -> float:
    """The denominator that torch uses for class labels or class probabilities."""
    if target.is_floating_point():
        return target.numel() / target.shape[1]
    target = target.long()  # Compared with -100, torch takes a uint8 of 156 for it.
    kept = target[target != ignored]
    if weight is None:
        return float(kept.numel())
    return float(weight.cpu().double()[kept.long().cpu()].sum())


def check_labels(name: str, logits: Tensor, target: Any, ignored: int | None = None) -> None:
    """Refuse labels that torch would answer with an index error, or silently misread."""
    if not isinstance(target, Tensor) or logits.dim() < 2:
        raise ValueError(
            f"`loss={name!r}` needs outputs of shape (N, classes) and a tensor of labels, but got "
            f"outputs of shape {tuple(logits.shape)} and a {type(target).__name__} as targets."
        )
    if target.is_floating_point():
        if target.shape != logits.shape:
            raise ValueError(
                f"`loss={name!r}` got {target.dtype} targets of shape {tuple(target.shape)} for "
                f"outputs of shape {tuple(logits.shape)}; give integer class labels of shape (N,) "
                "or class probabilities of the outputs' shape, or use `loss='mse'`."
            )
        _check_distribution(name, target)
        return
    shaped, labels = align_labels(logits, target)
    classes = shaped.shape[1]
    if shaped.shape[:1] + shaped.shape[2:] != labels.shape:
        raise ValueError(
            f"`loss={name!r}` got labels of shape {tuple(target.shape)} for outputs of shape "
            f"{tuple(logits.shape)}; labels need the outputs' shape without the class dimension."
        )
    if classes == 1:
        raise ValueError(
            f"`loss={name!r}` over one class is the constant 0 and has no curvature; use "
            "`loss='binary_cross_entropy'` for one logit, or give the model one output per class."
        )
    kept = labels if ignored is None else labels[labels != ignored]
    if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= classes):
        exception = "" if ignored is None else f" (or be {ignored} to be ignored)"
        raise ValueError(
            f"labels run from {int(kept.min())} to {int(kept.max())}, but the model has "
            f"{classes} outputs, so labels must lie in 0..{classes - 1}{exception}; check the "
            "model's last layer and the labels."
        )


def check_layout(name: str, logits: Tensor, target: Tensor) -> None:
    """Refuse outputs whose classes may be the second dimension as well as the last."""
    function = {"cross_entropy": "cross_entropy", "nll": "nll_loss"}[name]
    first = logits.shape[:1] + logits.shape[2:] == target.shape
    if logits.dim() > 2 and first and logits.shape[:-1] == target.shape:
        raise ValueError(
            f"`loss={name!r}` got outputs of shape {tuple(logits.shape)} for labels of shape "
            f"{tuple(target.shape)}: the classes may be the second dimension or the last. If the "
            f"second, pass `loss=F.{function}`; if the last, pass "
            f"`loss=lambda o, t: F.{function}(o.flatten(0, -2), t.flatten())`."
        )


def _check_distribution(name: str, target: Tensor) -> None:
    """Refuse targets that are not class probabilities along the second dimension."""
    low = float(target.min())
    if low < 0:
        raise ValueError(
            f"the loss {name!r} got floating-point targets, which it takes for class "
            f"probabilities, but they go down to {low:g}; give probabilities (`y.softmax(1)` of "
            "logits), integer class labels, or use `loss='mse'` for numbers."
        )
    sums = target.sum(1)
    worst = sums.reshape(-1)[(sums - 1).abs().argmax()].item()
    if abs(worst - 1) > _SUM:
        raise ValueError(
            f"the loss {name!r} got floating-point targets, which it takes for class "
            f"probabilities, but those of one sample add up to {worst:g}; divide them by their sum "
            "(`y / y.sum(1, keepdim=True)`), or use `loss='binary_cross_entropy'` for labels that "
            "do not exclude each other."
        )


def check_unit_interval(name: str, guess: Tensor, target: Any) -> None:
    """Refuse targets that are not between 0 and 1."""
    needed = (
        "it needs probabilities from 0 to 1; give `(y + 1) / 2` for labels -1 and 1, divide by the "
        "largest for other scales, or use `loss='cross_entropy'` for class numbers."
    )
    check_range(name, target, 0, 1, needed)


def check_range(name: str, target: Any, lowest: float, highest: float, needed: str) -> None:
    """Refuse targets outside of a range, and say what is needed."""
    if not isinstance(target, Tensor):
        raise ValueError(
            f"the loss {name!r} needs a tensor of targets, but got a {type(target).__name__}; give "
            "batches (inputs, targets)."
        )
    low, high = torch.aminmax(target.to(torch.uint8) if target.dtype is torch.bool else target)
    if low < lowest or high > highest:
        raise ValueError(f"the loss {name!r} got targets from {low:g} to {high:g}, but {needed}")
