"""Losses as sums over samples with a denominator of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flatgauge.output_curvature import Diagonal, OutputCurvature, Softmax
from flatgauge.precision import wide

#: The label that PyTorch and Hugging Face leave out of a loss.
IGNORED = -100


@dataclass(frozen=True)
class Loss:
    """A mean loss, taken apart: the mean over a data set is the sum of totals / sum of counts.

    Attributes:
        name: How it is called in reports.
        total: The sum of the loss over a chunk, from the model's output and the target.
        count: What that sum is divided by; None where it is still to be found.
        check: Refuses targets that do not fit the output.
        own: Whether the model computes the loss itself (`output.loss`).
        curvature: The second derivatives of the total by the prediction, where they are known
            in closed form; with `after`, by what goes into that last operation of the model.
        after: The operation that the model is expected to end in.
        defined: Says which samples have a loss, where that depends on the outputs.
    """

    name: str
    total: Callable[[Any, Any], Tensor]
    count: Callable[[Any], float] | None
    check: Callable[[Any, Any], None] = lambda output, target: None
    own: bool = False
    curvature: Callable[[Tensor, Any], OutputCurvature] | None = None
    after: str | None = None
    defined: Callable[[Tensor], Tensor] | None = None


def prediction(output: Any) -> Tensor:
    """The tensor that a named loss compares: the output, its `logits`, or its first item.

    Args:
        output: What the model returned.

    Returns:
        The tensor.

    Raises:
        TypeError: If there is no such tensor.
    """
    if isinstance(output, Tensor):
        return output
    candidate = getattr(output, "logits", None)
    if candidate is None and isinstance(output, Mapping):
        candidate = output.get("logits")
    if candidate is None and isinstance(output, (tuple, list)) and output:
        candidate = output[0]
    if not isinstance(candidate, Tensor):
        raise TypeError(
            f"the model returns a {type(output).__name__} with no `logits`; a named loss needs a "
            "tensor. Pass `loss=` a callable (output, target) -> mean loss that takes it apart."
        )
    return candidate


def _labels(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Bring logits and class labels to the shapes (M, C) and (M,) or (M, C) of torch."""
    if target.is_floating_point():
        return logits, target
    fits = logits.shape[:1] + logits.shape[2:] == target.shape
    if not fits and logits.shape[:-1] == target.shape:  # (N, T, C): one label per position
        logits, target = logits.flatten(0, -2), target.flatten()
    return logits, target.long()


def cross_entropy(
    *,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    second: bool = False,
) -> Loss:
    """Softmax cross-entropy of logits (N, C), (N, C, ...) or (N, T, C)."""
    # With `second`, classes are the second dimension where both readings fit.

    def total(output: Any, target: Tensor) -> Tensor:
        logits, labels = _labels(prediction(output), target)
        return F.cross_entropy(
            logits,
            labels,
            weight=None if weight is None else weight.to(logits),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="sum",
        )

    def count(target: Tensor) -> float:
        return _label_count(target, weight, ignore_index)

    def check(output: Any, target: Any) -> None:
        logits = prediction(output)
        _check_labels("cross_entropy", logits, target, ignore_index)
        if not second:
            _check_layout("cross_entropy", logits, target)

    def curvature(logits: Tensor, target: Tensor) -> Softmax:
        return _softmax_curvature(logits, target, weight, ignore_index, label_smoothing)

    return Loss("cross_entropy", total, count, check, curvature=curvature)


def nll(*, weight: Tensor | None = None, ignore_index: int = IGNORED, second: bool = False) -> Loss:
    """Negative log-likelihood of log-probabilities, for models that end in log-softmax."""

    def total(output: Any, target: Tensor) -> Tensor:
        logs, labels = _labels(prediction(output), target)
        scale = None if weight is None else weight.to(logs)
        return F.nll_loss(logs, labels, weight=scale, ignore_index=ignore_index, reduction="sum")

    def count(target: Tensor) -> float:
        return _label_count(target, weight, ignore_index)

    def check(output: Any, target: Any) -> None:
        logits = prediction(output)
        _check_labels("nll", logits, target, ignore_index)
        if not second:
            _check_layout("nll", logits, target)

    def curvature(logits: Tensor, target: Tensor) -> Softmax:
        return _softmax_curvature(logits, target, weight, ignore_index, 0.0)

    return Loss("nll", total, count, check, curvature=curvature, after="log_softmax")


def _softmax_curvature(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
) -> Softmax:
    """Every position's share in the loss times (diag p − p pᵀ)."""
    last = logits.dim() > 2 and _labels(logits, target)[0].shape != logits.shape  # (N, T, C)
    axis = -1 if last else 1
    moved = wide(logits.detach()).movedim(axis, -1)  # (n, ..., classes)
    classes = moved.shape[-1]
    scale = moved.new_ones(classes) if weight is None else weight.to(moved)
    if target.is_floating_point():
        shares = target.to(moved).movedim(axis, -1) @ scale
        shares = (1 - smoothing) * shares + smoothing * scale.mean()
    else:
        labels = target.long()
        kept = (labels != ignore_index).to(moved)
        labels = labels.where(labels != ignore_index, 0)
        shares = kept * ((1 - smoothing) * scale[labels] + smoothing * scale.mean())

    def restore(columns: Tensor) -> Tensor:
        return columns.reshape(moved.shape).movedim(-1, axis)

    probabilities = moved.softmax(-1).reshape(len(moved), -1, classes)
    shares = shares.reshape(len(moved), -1)
    return Softmax(probabilities, shares, restore, logits.dtype, axis % logits.dim())


def _label_count(target: Tensor, weight: Tensor | None, ignore_index: int) -> float:
    """The denominator that torch uses for class labels or class probabilities."""
    if target.is_floating_point():
        return target.numel() / target.shape[1]
    target = target.long()  # Compared with -100, torch takes a uint8 of 156 for it.
    kept = target[target != ignore_index]
    if weight is None:
        return float(kept.numel())
    return float(weight.cpu().double()[kept.long().cpu()].sum())


def _check_labels(name: str, logits: Tensor, target: Any, ignore_index: int) -> None:
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
        return
    shaped, labels = _labels(logits, target)
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
    kept = labels[labels != ignore_index]
    if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= classes):
        raise ValueError(
            f"labels run from {int(kept.min())} to {int(kept.max())}, but the model has "
            f"{classes} outputs, so labels must lie in 0..{classes - 1} (or be {ignore_index} to "
            "be ignored); check the model's last layer and the labels."
        )


def _check_layout(name: str, logits: Tensor, target: Tensor) -> None:
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


def elementwise(
    name: str,
    function: Callable[..., Tensor],
    second: Callable[[Tensor, Tensor], Tensor],
    **options: Any,
) -> Loss:
    """A loss averaged over samples and outputs alike, such as the squared error.

    Args:
        name: How it is called.
        function: The loss as torch has it.
        second: Its second derivative by the outputs, from outputs and targets.
        **options: Tensors that go to the function.

    Returns:
        The loss.
    """

    def total(output: Any, target: Tensor) -> Tensor:
        guess = prediction(output)
        extra = {key: value.to(guess) for key, value in options.items()}
        return function(guess, target.to(guess), reduction="sum", **extra)

    def check(output: Any, target: Any) -> None:
        guess = prediction(output)
        if not isinstance(target, Tensor) or target.shape != guess.shape:
            given = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(
                f"`loss={name!r}` compares outputs of shape {tuple(guess.shape)} with targets of "
                f"shape {given}, which would be broadcast silently; give targets of the outputs' "
                "shape (`y[:, None]` for one output, `F.one_hot(y, classes).float()` for class "
                "labels)."
            )

    def curvature(guess: Tensor, target: Tensor) -> Diagonal:
        return Diagonal(second(wide(guess.detach()), wide(target)).expand(guess.shape).contiguous())

    return Loss(name, total, lambda target: float(target.numel()), check, curvature=curvature)


def binary_cross_entropy(pos_weight: Tensor | None = None) -> Loss:
    """Binary cross-entropy of logits; the positive cases may weigh more."""

    def second(logits: Tensor, target: Tensor) -> Tensor:
        more = 1.0 if pos_weight is None else pos_weight.to(logits)
        return (target * more + 1 - target) * logits.sigmoid() * (-logits).sigmoid()

    extra = {} if pos_weight is None else {"pos_weight": pos_weight}
    return elementwise("binary_cross_entropy", F.binary_cross_entropy_with_logits, second, **extra)


def from_callable(function: Callable[[Any, Any], Any], name: str) -> Loss:
    """A user's own mean loss; what its mean is taken over is found out later."""

    def total(output: Any, target: Any) -> Tensor:
        return _scalar(function(output, target), name)

    return Loss(name, total, None)


def from_model() -> Loss:
    """The loss that a Hugging Face model returns with its output."""

    def total(output: Any, target: Any) -> Tensor:
        value = getattr(output, "loss", None)
        if value is None and isinstance(output, Mapping):
            value = output.get("loss")
        if value is None:
            raise ValueError(
                f"`loss=None` means the model's own loss, but the {type(output).__name__} it "
                "returned has no `loss`; put labels in the batches, or pass `loss=`."
            )
        return _scalar(value, "output.loss")

    return Loss("output.loss", total, None, own=True)


def _scalar(value: Any, name: str) -> Tensor:
    """Refuse a loss that is not one number."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the loss {name!r} returned {shape}; it must return the mean over the batch as one "
            "number (for a torch loss: `reduction='mean'`)."
        )
    return value.reshape(())


def normalized_cross_entropy() -> Loss:
    """Cross-entropy of logits divided by their standard deviation over the classes.

    Equation (20) to (22) of Tsuzuku et al. 2019: neither scaling nor shifting the outputs
    changes it. A sample with constant logits has none.

    Returns:
        The loss.
    """

    def total(output: Any, target: Tensor) -> Tensor:
        logits = prediction(output)
        spread = logits.std(dim=1, correction=0, keepdim=True)
        return F.cross_entropy(logits / spread, target.long(), reduction="sum")

    def check(output: Any, target: Any) -> None:
        _check_labels("normalized_cross_entropy", prediction(output), target, IGNORED)

    def defined(logits: Tensor) -> Tensor:
        return (logits != logits[:, :1]).any(dim=1)

    return Loss(
        "normalized_cross_entropy", total, lambda target: float(len(target)), check, defined=defined
    )


NAMED: dict[str, Callable[[], Loss]] = {
    "binary_cross_entropy": binary_cross_entropy,
    "cross_entropy": cross_entropy,
    "l1": lambda: elementwise("l1", F.l1_loss, lambda guess, _: guess.new_zeros(())),
    "mse": lambda: elementwise("mse", F.mse_loss, lambda guess, _: guess.new_full((), 2.0)),
    "nll": nll,
}

_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (F.binary_cross_entropy_with_logits, "binary_cross_entropy"),
    (F.cross_entropy, "cross_entropy"),
    (F.l1_loss, "l1"),
    (F.mse_loss, "mse"),
    (F.nll_loss, "nll"),
)


#: By torch's own functions and modules, whose classes are the second dimension.
_TORCH_LAYOUT: dict[str, Callable[[], Loss]] = {
    "cross_entropy": lambda: cross_entropy(second=True),
    "nll": lambda: nll(second=True),
}


def resolve_loss(loss: Any, denominator: Any = None) -> Loss:
    """Read what the user gave as `loss`, and refuse a denominator for one whose own is known.

    Args:
        loss: A name, a torch loss module, a callable (output, target) -> mean loss, or None
            for the loss the model itself returns.
        denominator: What the user says its mean is taken over, if anything.

    Returns:
        The loss as total and count.

    Raises:
        ValueError: If the name is unknown, the loss is a sum or not reduced, or its denominator
            is known already.
        TypeError: If it, or the denominator, is none of these.
    """
    if denominator is not None and not callable(denominator):
        raise TypeError(
            f"`denominator` is a {type(denominator).__name__}; it must be a function of a batch's "
            "targets, such as `len`."
        )
    resolved = _resolved(loss)
    if denominator is not None and resolved.count is not None:
        raise ValueError(
            f"`denominator=` is given, but the loss {resolved.name!r} has its own, which is known; "
            "leave it out, or pass the loss as a callable (output, target) -> mean loss."
        )
    return resolved


def _resolved(loss: Any) -> Loss:
    """Read a name, a module, a callable or None."""
    if loss is None:
        return from_model()
    if isinstance(loss, str):
        if loss not in NAMED:
            raise ValueError(
                f"`loss={loss!r}` is not a name flatgauge knows; use one of "
                f"{', '.join(sorted(NAMED))}, or a callable (output, target) -> mean loss."
            )
        return NAMED[loss]()
    if not callable(loss):
        raise TypeError(
            f"`loss` is a {type(loss).__name__}; it must be a name, a callable (output, target) "
            "-> mean loss, or None for the model's own loss. The order is model, loss, data."
        )
    for function, name in _FUNCTIONS:
        if loss is function:
            return {**NAMED, **_TORCH_LAYOUT}[name]()
    reduction = getattr(loss, "reduction", "mean")
    if reduction != "mean":
        raise ValueError(
            f"the loss {type(loss).__name__} has reduction={reduction!r}, but a loss surface is a "
            f"mean over samples; use {type(loss).__name__}(reduction='mean')."
        )
    return _from_module(loss) or from_callable(loss, getattr(loss, "__name__", type(loss).__name__))


def _from_module(loss: Any) -> Loss | None:
    """Read torch's own loss modules, whose denominators are known."""
    if type(loss) is nn.CrossEntropyLoss:
        return cross_entropy(
            weight=loss.weight,
            ignore_index=loss.ignore_index,
            label_smoothing=loss.label_smoothing,
            second=True,
        )
    if type(loss) is nn.NLLLoss:
        return nll(weight=loss.weight, ignore_index=loss.ignore_index, second=True)
    if type(loss) is nn.MSELoss:
        return NAMED["mse"]()
    if type(loss) is nn.L1Loss:
        return NAMED["l1"]()
    if type(loss) is nn.BCEWithLogitsLoss and loss.weight is None:
        return binary_cross_entropy(loss.pos_weight)
    return None
