"""The model that a gauge group was found for, and whether another one is like it."""

from __future__ import annotations

import types
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from flatgauge.likeness import BOOKKEEPING
from flatgauge.symmetry.rescaling import (
    Call,
    cloned,
    compare,
    doubled,
    rescale_state,
    state_of,
)

#: Settings that are compared by value, and functions, which are compared by identity.
_PLAIN = (bool, int, float, str, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)

#: How far outputs may differ where a model does not compute in double precision.
_COARSE = 1e-3

#: Draws of the trial: any would do, this one is the same every time.
_SEED = 20191008

#: The parts of a model, by path: its class, its tensors and its settings.
Structure = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Origin:
    """The model that a group was found for.

    Attributes:
        structure: What it is built of.
        zeros: Digests of where its constants are zero: zeros have every scale.
        constants: The names of its frozen parameters that were held.
        call: The example call.
        notes: What was assumed about it.
    """

    structure: Structure
    zeros: tuple[int, ...]
    constants: tuple[str, ...]
    call: Call
    notes: tuple[str, ...]

    def demand_like(self, model: nn.Module, factors: Mapping[str, Tensor]) -> None:
        """Refuse a model that rescaling would change.

        A model built of the same parts is taken. Any other is tried out on the example, in double
        precision where it allows that.

        Args:
            model: The model.
            factors: What its tensors are to be multiplied by.

        Raises:
            ValueError: If it is built of other parts, and its outputs change.
        """
        difference = _difference(self.structure, structure_of(model))
        if not difference and zeros_of(model, self.constants) != self.zeros:
            difference = "its buffers or frozen parameters are zero at other places"
        if not difference:
            return
        try:
            change = self._change(model, factors)
        except Exception as error:
            change, reason = 1.0, f"it cannot be called with that example ({error})"
        else:
            reason = f"rescaled by this move, its outputs change by {change:.2g} of the largest"
        if change:
            raise ValueError(
                f"this group was found for another model ({difference}), and {reason}; find the "
                "model's own group with `find_gauge(model, example_inputs)`."
            )

    def _change(self, model: nn.Module, factors: Mapping[str, Tensor]) -> float:
        """By how much of the largest a model's outputs change; zero where it is rounding."""
        generator = Generator().manual_seed(_SEED)

        def shake(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor + torch.randn(tensor.shape, generator=generator).to(tensor)

        call = self.call.changed(shake)
        own = state_of(model)
        fine = {name: doubled(tensor) for name, tensor in own.items()}
        try:
            allowed = 0.0
            change = _compared(model, fine, factors, call.changed(doubled))
        except RuntimeError:  # It insists on its own precision.
            allowed = _COARSE
            change = _compared(model, own, factors, call)
        return change if change > allowed else 0.0


def structure_of(model: nn.Module) -> Structure:
    """What a model is built of: classes, names, shapes and ties of tensors, plain settings.

    Args:
        model: The model.

    Returns:
        Its parts; equal for copies of a model, in other precisions and with other weights.
    """
    homes: dict[int, str] = {}
    parts: Structure = {}
    for path, module in model.named_modules(remove_duplicate=False):
        tensors = tuple(
            (name, tuple(tensor.shape), homes.setdefault(id(tensor), f"{path}.{name}"))
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        )
        settings = tuple(
            (name, type(value), value)
            for name, value in vars(module).items()
            if name not in BOOKKEEPING and _is_setting(value)
        )
        parts[path] = type(module), tensors, settings
    return parts


def zeros_of(model: nn.Module, constants: Iterable[str]) -> tuple[int, ...]:
    """Digests of where a model's buffers and some of its parameters are zero.

    Args:
        model: The model.
        constants: The names of the parameters.

    Returns:
        One number for each.
    """
    parameters = dict(model.named_parameters())
    tensors = [*model.buffers(), *(parameters[n] for n in constants if n in parameters)]
    return tuple(zlib.crc32((tensor == 0).cpu().numpy().tobytes()) for tensor in tensors)


def _compared(
    model: nn.Module, state: dict[str, Tensor], factors: Mapping[str, Tensor], call: Call
) -> float:
    """By how much of the largest outputs change; zero within the rounding of double precision."""
    twin = rescale_state(state, factors)
    outputs = (call(model, cloned(each)) for each in (state, twin))
    same, change = compare(model, state, twin, call, list(zip(*outputs, strict=True)))
    return 0.0 if same else change


def _is_setting(value: Any) -> bool:
    """Whether an attribute of a module is a plain value or a function."""
    if isinstance(value, tuple):
        return all(_is_setting(item) for item in value)
    return isinstance(value, (*_PLAIN, *_FUNCTIONS))


def _difference(one: Structure, other: Structure) -> str:
    """The first difference between two models, "" where there is none."""
    for path in [*one, *(path for path in other if path not in one)]:
        place = f"`{path}`" if path else "the model"
        if path not in one or path not in other:
            return f"{place} is in one of them only"
        if one[path] == other[path]:
            continue
        kinds = one[path][0], other[path][0]
        if kinds[0] is not kinds[1]:
            return f"{place} was a {kinds[0].__qualname__} and is a {kinds[1].__qualname__}"
        what = "tensors" if one[path][1] != other[path][1] else "settings"
        return f"{place} has other {what}"
    return ""
