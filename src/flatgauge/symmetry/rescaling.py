"""Multiply the tensors of a model, and refuse a model that a gauge group does not fit.

What enters: factors in double precision, by name, each broadcastable to its parameter or buffer.
What leaves: rescaled tensors, rounded once, or an error if a number leaves the range of its
precision. `Origin` describes the model that a group was found for. Another model of the same parts
may be rescaled with that group; any other is first tried on the example.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from flatgauge.graph.export import Structure, structure_of
from flatgauge.symmetry.model_call import ModelCall, State, state_in_float64, state_of

#: How far outputs may differ if a model does not compute in double precision.
_COARSE = 1e-3

#: Seed of the trial of another model.
_SEED = 20191008


@torch.no_grad()
def multiply(model: nn.Module, factors: Mapping[str, Tensor]) -> None:
    """Multiply named tensors in place; raise `ValueError` if a number leaves its range."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, factor in factors.items():
        state[name].copy_(_product(name, state[name], factor))


@torch.no_grad()
def rescale_state(state: State, factors: Mapping[str, Tensor]) -> State:
    """Copies of parameters and buffers, some of them multiplied; see `multiply`."""
    return {
        name: _product(name, tensor, factors[name]) if name in factors else tensor.clone()
        for name, tensor in state.items()
    }


def _product(name: str, tensor: Tensor, factor: Tensor) -> Tensor:
    """A tensor times factors in double precision, rounded once."""
    factor = factor.to(tensor.device)
    coarse = factor.to(tensor.dtype)
    if bool((coarse.frexp().mantissa == 0.5).all()) and torch.equal(coarse.double(), factor):
        new = tensor * coarse  # Powers of two: the product is not rounded.
    else:
        new = (tensor.double() * factor).to(tensor.dtype)
    same_count = torch.count_nonzero(new) == torch.count_nonzero(tensor)
    if not (bool(same_count) and bool(new.sum().isfinite())):  # Rarely: look at every entry.
        lost = (new == 0) & (tensor != 0) | new.isinf() & tensor.isfinite()
        if bool(lost.any()):
            raise ValueError(
                f"the move takes {int(lost.sum())} entries of `{name}` out of the range of "
                f"{str(tensor.dtype).removeprefix('torch.')}; use a smaller `log2_range`, or "
                "convert the model with `.double()`."
            )
    return new


@dataclass(frozen=True)
class Origin:
    """The model that a group was found for.

    Attributes:
        structure: What it is built of.
        zeros: Digests of where its constants are zero: zeros have every scale.
        constants: The names of its frozen parameters that were held.
    """

    structure: Structure
    zeros: tuple[int, ...]
    constants: tuple[str, ...]
    call: ModelCall
    notes: tuple[str, ...]

    def check_fits(self, model: nn.Module, factors: Mapping[str, Tensor]) -> None:
        """Raise `ValueError` if a model has other parts and `factors` change its outputs."""
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
        """By how much of the largest a model's outputs change; zero if that is rounding."""
        generator = Generator().manual_seed(_SEED)

        def shake(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor + torch.randn(tensor.shape, generator=generator).to(tensor)

        call = self.call.map(shake)
        own = state_of(model)
        fine = state_in_float64(own)
        try:
            allowed = 0.0
            result = call.in_float64().compare(model, fine, rescale_state(fine, factors))
        except RuntimeError:  # It insists on its own precision.
            allowed = _COARSE
            result = call.compare(model, own, rescale_state(own, factors))
        same, change = result
        return 0.0 if same or change <= allowed else change


def zeros_of(model: nn.Module, constants: Iterable[str]) -> tuple[int, ...]:
    """Digests of where a model's buffers and some of its parameters are zero."""
    parameters = dict(model.named_parameters())
    tensors = [*model.buffers(), *(parameters[n] for n in constants if n in parameters)]
    return tuple(zlib.crc32((tensor == 0).cpu().numpy().tobytes()) for tensor in tensors)


def _difference(one: Structure, other: Structure) -> str:
    """The first difference between two models, "" if there is none."""
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
