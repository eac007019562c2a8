"""Which targets a loss accepts: what torch would take without a word, or refuse without a reason.

Every check takes the name of the loss, the tensor it reads and the targets, and raises ValueError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: How far probabilities may be from a sum of one: they may have been stored in half precision.
_SUM = 1e-2


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


def check_distribution(name: str, guess: Tensor, target: Tensor) -> None:
    """Refuse class probabilities, along the second dimension, that are none."""
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


def _range(name: str, target: Any) -> tuple[float, float]:
    """The smallest and the largest of the targets."""
    if not isinstance(target, Tensor):
        raise ValueError(
            f"the loss {name!r} needs a tensor of targets, but got a {type(target).__name__}; give "
            "batches (inputs, targets)."
        )
    low, high = torch.aminmax(target.to(torch.uint8) if target.dtype is torch.bool else target)
    return float(low), float(high)
