"""What may be given to a loss surface: arguments checked, points and vectors as tensors."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Why a model sharded by FSDP is refused.
SHARDED = (
    "the model is sharded by FSDP, and only its loss, its gradient and differences of the gradient "
    "can be computed so: `epsilon_sharpness`, `expected_sharpness`, `adaptive_sharpness`, and "
    "eigenvalues and traces by products. For everything else load the full state dict "
    "(`torch.distributed.checkpoint.state_dict.get_model_state_dict` with `full_state_dict=True`) "
    "into a plain model, on every rank; the data may stay sharded."
)


def check_order(model: Any, loss: Any, data: Any) -> None:
    """Catch arguments in the wrong order, as other tools have them."""
    misplaced = isinstance(loss, nn.Module) and not isinstance(model, nn.Module)
    if misplaced or isinstance(data, nn.Module):
        kinds = ", ".join(type(item).__name__ for item in (model, loss, data))
        raise TypeError(f"LossSurface got ({kinds}); the order is LossSurface(model, loss, data).")


def check_options(chunk: Any, dtype: Any, weight_decay: Any, **switches: Any) -> None:
    """Refuse settings that mean nothing; switches are true or false, or None where allowed."""
    whole = isinstance(chunk, int) and not isinstance(chunk, bool)
    if chunk is not None and (not whole or chunk < 1):
        raise ValueError(f"`chunk={chunk!r}` must be a number of samples, at least 1, or None.")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"`dtype={dtype!r}` must be torch.float32, torch.float64 or None.")
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(
            f"`dtype={dtype}` is too coarse for second derivatives; use torch.float32, "
            "torch.float64, or None to follow the model."
        )
    if not is_finite(weight_decay) or weight_decay < 0:
        raise ValueError(f"`weight_decay={weight_decay!r}` must be a finite number of at least 0.")
    for name, value in switches.items():
        if not isinstance(value, bool) and not (value is None and name == "sharded"):
            raise TypeError(f"`{name}={value!r}` is a {type(value).__name__}; give True or False.")


def is_finite(value: Any) -> bool:
    """Whether something is a finite real number that fits double precision."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_radius(name: str, value: Any, dtype: torch.dtype) -> None:
    """Refuse a radius that is not positive, or whose square is infinite."""
    if not is_finite(value) or value <= 0:
        raise ValueError(f"`{name}={value!r}` must be a positive finite number: it is a radius.")
    largest = math.sqrt(torch.finfo(dtype).max)
    if value > largest:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"`{name}={value!r}` is too large a radius: its square overflows in {kind}, which "
            f"holds radii up to {largest:.2g}; take a smaller one."
        )


def as_tensor(numbers: Any, name: str) -> Tensor:
    """Read a point or vectors, which may be a NumPy array."""
    if isinstance(numbers, np.ndarray):
        numbers = torch.as_tensor(numbers)
    if not isinstance(numbers, Tensor):
        raise TypeError(f"`{name}` is a {type(numbers).__name__}; give a tensor or a NumPy array.")
    if not numbers.is_floating_point():
        raise ValueError(f"`{name}` is {numbers.dtype}; give floating-point numbers.")
    return numbers


def finite_loss(value: float) -> float:
    """Refuse a loss that is not finite at the model's own parameters."""
    if not math.isfinite(value):
        raise ValueError(
            f"the loss at the model's own parameters is {value}; the training diverged, or the "
            "loss overflows on this data. Nothing can be measured there."
        )
    return value


def check_finite(parts: dict[str, Tensor], what: str) -> None:
    """Refuse a derivative that is not finite, and name the parameters it is taken by."""
    bad = [name for name, part in parts.items() if not torch.isfinite(part).all()]
    if bad:
        names = ", ".join(f"`{name}`" for name in bad[:3]) + (", ..." if len(bad) > 3 else "")
        raise ValueError(
            f"the {what} by {names} is not finite, where the loss is; look for a square "
            "root, a norm or a logarithm at zero in model or loss, and keep it away from there "
            "(`torch.sqrt(x + 1e-12)`)."
        )
