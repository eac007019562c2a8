"""Losses by name, as torch modules, as callables, or of the model's own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flatgauge.blame import user_code
from flatgauge.label_losses import check_labels, cross_entropy, nll
from flatgauge.loss import Loss, prediction
from flatgauge.output_curvature import Diagonal
from flatgauge.precision import wide
from flatgauge.targets import (
    check_label_lists,
    check_not_negative,
    check_signs,
    check_unit_interval,
)

#: Refuses targets that a loss makes no sense of, from its name, the tensor it reads and them.
Check = Callable[[str, Tensor, Any], None]


def elementwise(
    name: str,
    function: Callable[..., Tensor],
    second: Callable[[Tensor, Tensor], Tensor],
    accepts: Check | None = None,
    **options: Any,
) -> Loss:
    """A loss averaged over samples and outputs alike, such as the squared error.

    Args:
        name: How it is called.
        function: The loss as torch has it.
        second: Its second derivative by the outputs, from outputs and targets.
        accepts: Refuses targets by their values.
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
        if accepts is not None:
            accepts(name, guess, target)

    def curvature(guess: Tensor, target: Tensor) -> Diagonal:
        return Diagonal(second(wide(guess.detach()), wide(target)).expand(guess.shape).contiguous())

    return Loss(name, total, lambda target: float(target.numel()), check, curvature=curvature)


def binary_cross_entropy(pos_weight: Tensor | None = None) -> Loss:
    """Binary cross-entropy of logits; the positive cases may weigh more."""

    def second(logits: Tensor, target: Tensor) -> Tensor:
        more = 1.0 if pos_weight is None else pos_weight.to(logits)
        return (target * more + 1 - target) * logits.sigmoid() * (-logits).sigmoid()

    extra = {} if pos_weight is None else {"pos_weight": pos_weight}
    function = F.binary_cross_entropy_with_logits
    return elementwise("binary_cross_entropy", function, second, check_unit_interval, **extra)


def from_callable(function: Callable[[Any, Any], Any]) -> Loss:
    """A user's own mean loss; what its mean is taken over is found out later."""
    name = str(getattr(function, "__name__", type(function).__name__))
    _check_arguments(function, name)
    accepts = _accepts(function)

    def total(output: Any, target: Any) -> Tensor:
        with user_code(f"the loss {name!r}"):
            value = function(output, target)
        return _scalar(value, name)

    def check(output: Any, target: Any) -> None:
        if accepts is not None:
            accepts(name, prediction(output), target)

    return Loss(name, total, None, check)


def _check_arguments(function: Callable[[Any, Any], Any], name: str) -> None:
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


#: What torch's further losses accept as targets.
_ACCEPTED: tuple[tuple[Any, Any, Check], ...] = (
    (nn.BCELoss, F.binary_cross_entropy, check_unit_interval),
    (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, check_unit_interval),
    (nn.HingeEmbeddingLoss, F.hinge_embedding_loss, check_signs),
    (nn.KLDivLoss, F.kl_div, check_not_negative),
    (nn.MultiLabelMarginLoss, F.multilabel_margin_loss, check_label_lists),
    (nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss, check_unit_interval),
    (nn.MultiMarginLoss, F.multi_margin_loss, check_labels),
    (nn.PoissonNLLLoss, F.poisson_nll_loss, check_not_negative),
    (nn.SoftMarginLoss, F.soft_margin_loss, check_signs),
)


def _accepts(loss: Any) -> Check | None:
    """What refuses the targets of one of torch's losses; None for others."""
    if getattr(loss, "log_target", False):  # The targets are logarithms.
        return None
    for module, function, accepts in _ACCEPTED:
        if type(loss) is module or loss is function:
            return accepts
    return None


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
        ValueError: If the name is unknown, the loss is not reduced, or its denominator is known
            already.
        TypeError: If it, or the denominator, is none of these, or a class.
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
    if loss == "auto":
        return replace(cross_entropy(), own_differs="take")
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
    for function, name in _FUNCTIONS:
        if loss is function:
            return {**NAMED, **_TORCH_LAYOUT}[name]()
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "sum" and isinstance(loss, nn.Module):
        name = type(loss).__name__
        note = f"the loss {name}(reduction='sum') is taken as its mean, {name}(reduction='mean')"
        mean = copy.copy(loss)
        mean.reduction = "mean"  # type: ignore[assignment]
        return replace(_resolved(mean), notes=(note,))
    if reduction not in ("mean", "batchmean"):
        raise ValueError(
            f"the loss {type(loss).__name__} has reduction={reduction!r}, but a loss surface is a "
            f"mean over samples; use {type(loss).__name__}(reduction='mean')."
        )
    return _from_module(loss) or from_callable(loss)


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
