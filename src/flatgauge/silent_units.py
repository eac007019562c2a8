"""Hidden units that are silent on a whole chunk of samples are left out of its derivatives.

Where a ReLU is zero for every sample, nothing goes through the unit, forwards or backwards, to any
order: its row of weights in front and its column behind have zeros for derivatives. Networks have
many such units (a fifth to a third of them in a perceptron after a few epochs of Adam), and without
them the matrix products of a chain linear, ReLU, linear are as much smaller on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

#: Units are left out where no more than this share of them speak: putting rows of weights
#: together costs about as much as a twentieth of the products they are made for.
_MOST = 0.9

#: Layers with fewer units are left alone, and as many are gone on with as make a multiple of this:
#: products of other sizes are slower.
_FEWEST, _EVEN = 32, 16

#: Under what name a tensor remembers where it comes from.
_NOTE = "_flatgauge_origin"


def speaking(units: Tensor) -> Tensor | None:
    """Which units to go on with.

    Args:
        units: What comes out of a ReLU (..., units), nowhere negative.

    Returns:
        The places of those that are not silent, and of a few more; None to go on with all.
    """
    if units.shape[-1] < _FEWEST or units.dim() < 2:
        return None
    # What is not a number counts as heard.
    heard = units.detach().flatten(0, -2).sum(0) != 0
    count = -(-int(heard.sum()) // _EVEN) * _EVEN
    if count > _MOST * len(heard):
        return None
    # Those that are heard come first; some of the others fill up.
    return heard.to(torch.uint8).argsort(descending=True, stable=True)[: max(count, _EVEN)]


@dataclass(frozen=True)
class Choice:
    """Some rows and columns of matrices.

    Attributes:
        rows: Which rows; None for all.
        columns: Which columns; None for all.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return self.rows is None and self.columns is None

    def taken(self, matrix: Tensor) -> Tensor:
        """The chosen part of a matrix (rows, columns)."""
        return matrix if self.everything else matrix[self._places()]

    def spread(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """A matrix of zeros but for the chosen part."""
        if self.everything:
            return part
        whole = part.new_zeros(shape)
        whole[self._places()] = part
        return whole

    def _places(self) -> tuple[Any, ...]:
        if self.rows is None:
            return slice(None), self.columns
        return (self.rows,) if self.columns is None else (self.rows[:, None], self.columns)


@dataclass(frozen=True)
class _Mapped:
    """A tensor is a linear map of another one.

    Attributes:
        inputs: What is mapped (..., in), of units that speak.
        chosen: Which units these are; None if all.
        weight: The whole weight (out, all inputs).
        bias: The whole bias (out,).
    """

    inputs: Tensor
    chosen: Tensor | None
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _Rectified:
    """A tensor has zeros in all but some columns, and zero derivatives there.

    Attributes:
        units: Those columns (..., chosen).
        chosen: Which they are.
    """

    units: Tensor
    chosen: Tensor


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map, of the units that speak.

    Args:
        inputs: What is mapped (..., in).
        weight: The weight (out, in).
        bias: The bias (out,), or None.

    Returns:
        The map (..., out).
    """
    known, chosen = _noted(inputs, _Rectified), None
    if known is not None:
        inputs, chosen = known.units, known.chosen
    output = F.linear(inputs, _chosen(weight, Choice(columns=chosen)), bias)
    _note(output, _Mapped(inputs, chosen, weight, bias))
    return output


def rectified(op: Callable[..., Tensor], inputs: Tensor, *options: Any, **named: Any) -> Tensor:
    """A ReLU that remembers, behind a linear map, which of its units speak.

    Args:
        op: The ReLU itself.
        inputs: Its input.
        options: What else it is called with.
        named: The same by name.

    Returns:
        Its output, whole: whatever reads it finds what it expects.
    """
    before = _noted(inputs, _Mapped)
    values = inputs.detach()
    chosen = None if before is None else speaking(values.relu())
    if before is None or chosen is None:
        return op(inputs, *options, **named)
    kept = values.index_select(-1, chosen)  # The ReLU may be in place.
    output = op(inputs, *options, **named)
    weight = _chosen(before.weight, Choice(chosen, before.chosen))
    bias = None if before.bias is None else before.bias.index_select(0, chosen)
    units: Tensor = _Known.apply(before.inputs, weight, bias, kept)  # type: ignore[no-untyped-call]
    _note(output, _Rectified(units.relu(), chosen))
    return output


def _note(tensor: Tensor, what: _Mapped | _Rectified) -> None:
    """Remember where a tensor comes from, if it is differentiated."""
    if tensor.grad_fn is not None:
        setattr(tensor, _NOTE, (tensor._version, tensor.grad_fn, what))


def _noted(tensor: Tensor, kind: type[Any]) -> Any:
    """What is remembered of a tensor, if it is of a kind and still holds."""
    version, maker, what = getattr(tensor, _NOTE, (None, None, None))
    # It may have been written over or taken out of the graph since; and who listens to its
    # gradient wants to hear all of it.
    holds = version == tensor._version and maker is tensor.grad_fn and torch.is_grad_enabled()
    heard = tensor._backward_hooks or tensor.retains_grad
    return what if isinstance(what, kind) and holds and not heard else None


def _chosen(weight: Tensor, choice: Choice) -> Tensor:
    """Part of a weight, to be differentiated."""
    if choice.everything:
        return weight
    found: Tensor = _Taken.apply(weight, choice)  # type: ignore[no-untyped-call]
    return found


class _Taken(Function):
    """Some rows and columns of a matrix."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, choice: Choice) -> Tensor:
        ctx.choice, ctx.shape = choice, matrix.shape
        return choice.taken(matrix)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _Spread.apply(g, ctx.choice, ctx.shape), None  # type: ignore[no-untyped-call]


class _Spread(Function):
    """A matrix of zeros but for some rows and columns: the derivative of taking them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, choice: Choice, shape: torch.Size) -> Tensor:
        ctx.choice = choice
        return choice.spread(part, shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _Taken.apply(g, ctx.choice), None, None  # type: ignore[no-untyped-call]


class _Known(Function):
    """A linear map whose values are known already."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, values: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = g.flatten(0, -2)
        by_inputs = g @ weight if ctx.needs_input_grad[0] else None
        by_weight = rows.T @ inputs.flatten(0, -2) if ctx.needs_input_grad[1] else None
        by_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return by_inputs, by_weight, by_bias, None
