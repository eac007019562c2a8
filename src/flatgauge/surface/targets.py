"""Which targets a loss accepts: what torch would take silently, or refuse without a reason.

Every check takes the name of the loss, the tensor that it reads and the targets, and raises
ValueError with what to give instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: The label that PyTorch and Hugging Face leave out of a loss.
IGNORED = -100

#: How far probabilities may be from a sum of one: they may have been stored in half precision.
_SUM = 1e-2


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
    low, high = _range(name, target)
    if low < 0 or high > 1:
        raise ValueError(
            f"the loss {name!r} got targets from {low:g} to {high:g}, but it needs probabilities "
            "from 0 to 1; give `(y + 1) / 2` for labels -1 and 1, divide by the largest for other "
            "scales, or use `loss='cross_entropy'` for class numbers."
        )


def check_signs(name: str, guess: Tensor, target: Any) -> None:
    """Refuse targets other than -1 and 1."""
    _range(name, target)
    odd = target[(target != 1) & (target != -1)]
    if odd.numel():
        raise ValueError(
            f"the loss {name!r} got the target {odd.reshape(-1)[0].item():g}, but it needs -1 or "
            "1; give `2 * y - 1` for labels 0 and 1."
        )


def check_not_negative(name: str, guess: Tensor, target: Any) -> None:
    """Refuse targets below zero."""
    low, high = _range(name, target)
    if low < 0:
        raise ValueError(
            f"the loss {name!r} got targets from {low:g} to {high:g}, but it needs numbers of at "
            "least 0; check what the targets are (logarithms? centred values?)."
        )


def check_label_lists(name: str, guess: Tensor, target: Any) -> None:
    """Refuse lists of class numbers, filled up with -1, that name classes that do not exist."""
    low, high = _range(name, target)
    classes = guess.shape[-1]
    if low < -1 or high >= classes:
        raise ValueError(
            f"the loss {name!r} got targets from {low:g} to {high:g}, but the model has {classes} "
            f"outputs, so class numbers must lie in 0..{classes - 1} (-1 ends a list); check the "
            "model's last layer and the labels."
        )


def _range(name: str, target: Any) -> tuple[float, float]:
    """The smallest and the largest of the targets."""
    if not isinstance(target, Tensor):
        raise ValueError(
            f"the loss {name!r} needs a tensor of targets, but got a {type(target).__name__}; give "
            "batches (inputs, targets)."
        )
    low, high = torch.aminmax(target.to(torch.uint8) if target.dtype is torch.bool else target)
    return float(low), float(high)
