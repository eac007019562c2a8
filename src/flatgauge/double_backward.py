"""Operations with second derivatives of their own, where those of torch are slow or wrong.

A convolution is linear in its input x and in its weight w, so ⟨g, conv(x, w)⟩ is linear in three
tensors. Its derivative by any of them is linear in the other two, and the derivatives of these
are of the same three kinds: here each is one efficient kernel. torch differentiates a weight's
gradient by a convolution with the whole batch as channels and images as kernels instead, which
takes as long as all the rest of a product. The second derivative of its weight normalisation is
wrong in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

from flatgauge import silent_units

#: Tells whether tensors saved for backward are put by in another way (newer torch only).
_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

#: The convolutions, and how many spatial axes they have.
_SPACES = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}

#: The names under which a ReLU is called.
_RECTIFIERS = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}


class _Shape(NamedTuple):
    """How a convolution is made: what `torch.ops.aten.convolution` takes beside tensors."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


class _Forward(Function):
    """The convolution of an input with a weight: the derivative by g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, shape: _Shape) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.shape = shape
        found: Tensor = torch.ops.aten.convolution(x, w, None, *shape)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        by_input = _applied(_ByInput, g, w, x, ctx.shape) if wanted[0] else None
        by_weight = _applied(_ByWeight, g, x, w, ctx.shape) if wanted[1] else None
        return by_input, by_weight, None


class _ByInput(Function):
    """The derivative by the input; `like` is any tensor of its kind."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor, like: Tensor, shape: _Shape) -> Tensor:
        ctx.save_for_backward(g, w)
        ctx.shape = shape
        found: Tensor = _gradients(g, like, w, shape, (True, False))[0]
        return found

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor | None, ...]:
        g, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        by_output = _applied(_Forward, x, w, ctx.shape) if wanted[0] else None
        by_weight = _applied(_ByWeight, g, x, w, ctx.shape) if wanted[1] else None
        return by_output, by_weight, None, None


class _ByWeight(Function):
    """The derivative by the weight; `like` is any tensor of its kind."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, like: Tensor, shape: _Shape) -> Tensor:
        ctx.save_for_backward(g, x)
        ctx.shape = shape
        found: Tensor = _gradients(g, x, like, shape, (False, True))[1]
        return found

    @staticmethod
    def backward(ctx: Any, w: Tensor) -> tuple[Tensor | None, ...]:
        g, x = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        by_output = _applied(_Forward, x, w, ctx.shape) if wanted[0] else None
        by_input = _applied(_ByInput, g, w, x, ctx.shape) if wanted[1] else None
        return by_output, by_input, None, None


def _applied(kind: Any, *arguments: Any) -> Tensor:
    """One of the three derivatives, to be differentiated further."""
    found: Tensor = kind.apply(*arguments)
    return found


def _gradients(g: Tensor, x: Tensor, w: Tensor, shape: _Shape, wanted: tuple[bool, bool]) -> Any:
    """The gradients of a convolution by input and weight, as far as they are wanted."""
    return torch.ops.aten.convolution_backward(g, x, w, None, *shape, [*wanted, False])


class CheapTwice(TorchFunctionMode):
    """While entered, some operations run as defined here.

    These are convolutions, batch-norms with stored statistics, and weight normalisation.

    Args:
        leave_out: Whether hidden units that are silent on all samples are left out of linear
            maps. What a model differentiates by such units itself is then not found.
    """

    def __init__(self, *, leave_out: bool = True) -> None:
        super().__init__()
        self._leave_out = leave_out

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one op."""
        kwargs = kwargs or {}
        if func in _SPACES:
            return _convolved(func, *args, **kwargs)
        if func is F.batch_norm:
            return _normalised(*args, **kwargs)
        if func is torch._weight_norm:
            return _weight_normalised(*args, **kwargs)
        if not self._leave_out:
            return func(*args, **kwargs)
        if func is F.linear:
            return _mapped(*args, **kwargs)
        if func in _RECTIFIERS:
            return _rectified(func, *args, **kwargs)
        return func(*args, **kwargs)


def _convolved(
    func: Callable[..., Any],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution, with its bias added afterwards."""
    space = _SPACES[func]
    alone = input.dim() != space + 2 or weight.dim() != space + 2
    if alone or isinstance(padding, str) or not _plain(input, weight, bias):
        found: Tensor = func(input, weight, bias, stride, padding, dilation, groups)
        return found
    steps, sides, gaps = (_each(given, space) for given in (stride, padding, dilation))
    shape = _Shape(steps, sides, gaps, False, [0] * space, groups)
    output = _applied(_Forward, input, weight, shape)
    return output if bias is None else output + bias.view(-1, *[1] * space)


def _plain(*tensors: Tensor | None) -> bool:
    """Whether an op on tensors is what it says: nothing casts, transforms or overrides it."""
    # Nor is it part of a checkpoint: that runs again in the backward pass, where torch switches
    # modes off, and must save the same tensors then.
    given = [tensor for tensor in tensors if tensor is not None]
    return (
        {type(tensor) for tensor in given} <= {Tensor, nn.Parameter}
        and len({tensor.dtype for tensor in given}) == 1
        and given[0].is_floating_point()
        and not torch.is_autocast_enabled(given[0].device.type)
        and (_HOOKS is None or _HOOKS(False) is None)
        and not torch._C._are_functorch_transforms_active()
        and all(forward_ad.unpack_dual(tensor).tangent is None for tensor in given)
    )


def _each(given: Any, space: int) -> list[int]:
    """One number for every spatial axis."""
    numbers = [given] if isinstance(given, int) else list(given)
    return numbers * space if len(numbers) == 1 else numbers


def _mapped(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map, of the units that are not silent."""
    usual = weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])
    if input.dim() < 2 or not usual or not _plain(input, weight, bias):
        return F.linear(input, weight, bias)
    return silent_units.linear(input, weight, bias)


def _rectified(func: Callable[..., Any], input: Tensor, *options: Any, **named: Any) -> Tensor:
    """A ReLU, which remembers the units that are not silent."""
    if not _plain(input):
        found: Tensor = func(input, *options, **named)
        return found
    return silent_units.rectified(func, input, *options, **named)


def _normalised(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch-norm; with stored statistics, as the scale and shift of every channel that it is."""
    stored = running_mean is not None and running_var is not None and not training
    if not stored or not _plain(input, running_mean, running_var, weight, bias):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    assert running_mean is not None
    assert running_var is not None
    scale = (running_var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    spread = (-1, *[1] * (input.dim() - 2))
    return torch.addcmul(shift.view(spread), input, scale.view(spread))


def _weight_normalised(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """A weight of direction v and size g."""
    if not _plain(v, g):
        return torch._weight_norm(v, g, dim)
    return v * (g / torch.norm_except_dim(v, 2, dim))
