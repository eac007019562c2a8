"""First and second derivatives of one scalar function of several leaves, and of single ops.

What enters: a function of the leaves and vectors. What leaves: gradients and Hessian products, by
reverse over reverse (`GradientGraph`), forward over reverse, or differences of the gradient. A kept
graph makes a product cost one backward pass, not one forward and two backward passes.

`FastDoubleBackward` runs ops with derivatives of their own where those of torch are slow or wrong.
A convolution is linear in its input x and in its weight w, so ⟨g, conv(x, w)⟩ is linear in three
tensors. Its derivative by any of them is linear in the other two, and the derivatives of these
are of the same three kinds: here each is one efficient kernel. torch differentiates a weight's
gradient by a convolution with the whole batch as channels and images as kernels instead, which
takes as long as all the rest of a product. The second derivative of its weight normalisation is
wrong in torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

ScalarFunction = Callable[[Sequence[Tensor]], Tensor]
Method = Literal["reverse", "forward", "differences"]

#: From most to least accurate and fast; the first that works is taken.
METHODS: tuple[Method, ...] = ("reverse", "forward", "differences")

DESCRIPTIONS: dict[Method, str] = {
    "reverse": "reverse over reverse, first-order graphs kept",
    "forward": "forward over reverse",
    "differences": "central differences of the gradient",
}

#: What a product takes while it is computed, in graphs of the chunk at hand: the graph itself,
#: what is passed back through it, and what kernels and allocator need on top. Measured.
WORKING = 4.0

#: What a kept graph takes in memory, relative to the tensors in it. Measured.
KEPT = 1.2

#: Steps of differences, relative to the point, and how far the gradient may be from a straight
#: line along them, relative to its change.
_STEPS = {
    torch.float32: ((torch.finfo(torch.float32).eps ** (1 / 3), 1e-2),),
    torch.float64: (
        (torch.finfo(torch.float64).eps ** (1 / 3), 1e-4),
        *((1e-7, 1e-4), (1e-8, 1e-4), (1e-9, 1e-4), (1e-10, 1e-3)),
    ),
}

#: What rounding may change in a gradient, in units of its last digit.
_ROUNDINGS = 1e3

#: What to do about a kink that every difference crosses.
ON_A_KINK = (
    "second derivatives can be had by differences of the gradient only ({reason}), and the "
    "gradient jumps at this point: units sit on a kink (a ReLU whose input is exactly 0, as in "
    "pruned or zero-initialised layers), or the model rounds inside. Differences would give a "
    "wrong Hessian. {remedy}; or measure what needs no Hessian products (`epsilon_sharpness`, "
    "`expected_sharpness`)."
)

REENTRANT = (
    "the model uses `torch.utils.checkpoint` with `use_reentrant=True`, which loses gradients and "
    "cannot be differentiated twice; pass `use_reentrant=False` there, or switch checkpointing off "
    "(`model.gradient_checkpointing_disable()` for Hugging Face models)."
)


class GradientGraph:
    """The gradient of a function, with the graph that can be differentiated once more."""

    def __init__(self, function: ScalarFunction, leaves: Sequence[Tensor]) -> None:
        gradient = differentiate(function(leaves), leaves, create_graph=True)
        self._leaves = leaves
        self._pieces = [
            (index, get_gradient_edge(piece))  # Without its numbers, of the model's size.
            for index, piece in enumerate(gradient)
            if piece is not None and piece.requires_grad
        ]

    def product(self, vector: Sequence[Tensor], *, last: bool) -> Sequence[Tensor | None]:
        """Differentiate along a vector; with `last` the graph is used up."""
        if not self._pieces:  # The function is linear: its Hessian is zero.
            return [None] * len(self._leaves)
        indices, ends = zip(*self._pieces, strict=True)
        return torch.autograd.grad(
            ends,
            self._leaves,
            grad_outputs=[vector[index] for index in indices],
            retain_graph=not last,
            allow_unused=True,
        )

    def has_dead_end(self) -> bool:
        """Whether a function in the graph can be differentiated once only."""
        # Autograd does not object to `once_differentiable`: it takes the function for a constant,
        # and products come out too small without a word.
        return any(node.name() == "torch::autograd::Error" for node in self.nodes())

    def nodes(self) -> Iterator[Any]:
        """Visit every node of the graph once."""
        return nodes_from([end.node for _, end in self._pieces])


def nodes_from(ends: Sequence[Any]) -> Iterator[Any]:
    """Visit every node of an autograd graph once, from where it ends."""
    seen: set[Any] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def differentiate(
    value: Tensor, leaves: Sequence[Tensor], *, create_graph: bool = False
) -> Sequence[Tensor | None]:
    """The gradient of a scalar; None for leaves it does not depend on."""
    if not value.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter as far as autograd can see; "
            "look for `torch.no_grad()`, `.detach()`, `.item()` or NumPy in the model's forward "
            "or in the loss."
        )
    try:
        pieces = torch.autograd.grad(value, leaves, create_graph=create_graph, allow_unused=True)
    except RuntimeError as error:
        checkpointed = ("use_reentrant", "Checkpointing is not compatible")
        if not any(text in str(error) for text in checkpointed):
            raise
        raise ValueError(REENTRANT) from error
    return [
        piece.to_dense() if piece is not None and piece.is_sparse else piece for piece in pieces
    ]


def forward_product(
    function: ScalarFunction, leaves: Sequence[Tensor], vector: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Push a vector forward through the gradient."""

    def scalar(*arguments: Tensor) -> Tensor:
        return function(arguments)

    # Not `grad`: torch cannot push forward through the gradient of a mean squared error.
    gradient = torch.func.jacrev(scalar, argnums=tuple(range(len(leaves))))
    product: Sequence[Tensor] = torch.func.jvp(gradient, tuple(leaves), tuple(vector))[1]
    return product


def difference_product(
    gradient: Callable[[Tensor], Tensor], point: Tensor, vector: Tensor
) -> Tensor | None:
    """Central difference of the gradient, within one smooth piece of the function."""
    # The first step balances the rounding error of the gradient (eps / h) against the third
    # derivative (h²), hence the cube root; it is as long, relative to the point, in every unit of
    # weight. A third gradient between the two shows whether the gradient is a straight line there.
    # It is not where the step crosses a kink (of a ReLU, say): then the difference is not the
    # second derivative, and a shorter step is tried.
    length = vector.norm()
    if length == 0:
        return torch.zeros_like(vector)
    size = point.norm()
    size = torch.where(size > 0, size, 1.0)
    for relative, tolerance in _STEPS[point.dtype]:
        step = relative * size / length
        behind, between, ahead = (gradient(point + t * step * vector) for t in (-1.0, 1 / 3, 1.0))
        rise = ahead - behind
        # Of a line zero; at least a third of the jump, wherever the gradient jumps.
        bend = (between - behind / 3 - 2 * ahead / 3).norm()
        rounding = _ROUNDINGS * torch.finfo(point.dtype).eps * ahead.norm()
        straight = bend <= torch.maximum(tolerance * rise.norm(), rounding)
        if straight or not torch.isfinite(rise).all():  # The latter is said by who asks.
            difference: Tensor = rise / (2 * step)
            return difference
    return None


#: Units are left out where no more than this share of them are active: putting rows of weights
#: together costs about as much as a twentieth of the products they are made for.
_MOST = 0.9

#: Layers with fewer units are left alone, and as many are gone on with as make a multiple of this:
#: products of other sizes are slower.
_FEWEST, _EVEN = 32, 16

#: Under what name a tensor remembers where it comes from.
_NOTE = "_flatgauge_origin"


def active_units(units: Tensor) -> Tensor | None:
    """Which units to go on with."""
    if units.shape[-1] < _FEWEST or units.dim() < 2:
        return None
    # What is not a number counts as active.
    active = units.detach().flatten(0, -2).sum(0) != 0
    count = -(-int(active.sum()) // _EVEN) * _EVEN
    if count > _MOST * len(active):
        return None
    # Active units come first; some of the others fill up.
    return active.to(torch.uint8).argsort(descending=True, stable=True)[: max(count, _EVEN)]


@dataclass(frozen=True)
class SubmatrixIndex:
    """Some rows and columns of matrices; None for all of them."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return self.rows is None and self.columns is None

    def take(self, matrix: Tensor) -> Tensor:
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
    """A linear map of `inputs`: the active units `chosen` (None for all); the weight is whole."""

    inputs: Tensor
    chosen: Tensor | None
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _Rectified:
    """A tensor has zeros, with zero derivatives, in all columns but `chosen`, which are `units`."""

    units: Tensor
    chosen: Tensor


def _note_origin(tensor: Tensor, what: _Mapped | _Rectified) -> None:
    """Remember where a tensor comes from, if it is differentiated."""
    if tensor.grad_fn is not None:
        setattr(tensor, _NOTE, (tensor._version, tensor.grad_fn, what))


def _origin_of(tensor: Tensor, kind: type[Any]) -> Any:
    """What is remembered of a tensor, if it is of a kind and still holds."""
    version, maker, what = getattr(tensor, _NOTE, (None, None, None))
    # It may have been written over or taken out of the graph since; and a hook on
    # it must see its whole gradient.
    holds = version == tensor._version and maker is tensor.grad_fn and torch.is_grad_enabled()
    hooked = tensor._backward_hooks or tensor.retains_grad
    return what if isinstance(what, kind) and holds and not hooked else None


def _submatrix(weight: Tensor, choice: SubmatrixIndex) -> Tensor:
    """Part of a weight, to be differentiated."""
    return weight if choice.everything else _apply(_Selected, weight, choice, None)


class _Selected(Function):
    """Part of a matrix; or, with a shape, a matrix of zeros but for a part: its derivative."""

    @staticmethod
    def forward(
        ctx: Any, matrix: Tensor, choice: SubmatrixIndex, shape: torch.Size | None
    ) -> Tensor:
        ctx.choice, ctx.back = choice, matrix.shape if shape is None else None
        return choice.take(matrix) if shape is None else choice.spread(matrix, shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(_Selected, g, ctx.choice, ctx.back), None, None


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


#: Whether tensors saved for backward are stored in another way (newer torch only).
_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

#: The convolutions, and how many spatial axes they have.
_SPACES = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}

#: The names under which a ReLU is called.
_RECTIFIERS = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}


class _Shape(NamedTuple):
    """How a convolution is made: what `torch.ops.aten.convolution` takes apart from tensors."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


class _Trilinear(Function):
    """The derivative of ⟨g, conv(x, w)⟩ by one of g, x, w (0, 1, 2), from the other two in order.

    `like` is any tensor of its kind, None for g: the convolution itself.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: int, a: Tensor, b: Tensor, like: Tensor | None, shape: _Shape
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.kind, ctx.shape = kind, shape
        found: Tensor
        if kind == 0:
            found = torch.ops.aten.convolution(a, b, None, *shape)
        else:
            x, w = (like, b) if kind == 1 else (b, like)
            wanted = [kind == 1, kind == 2, False]
            found = torch.ops.aten.convolution_backward(a, x, w, None, *shape, wanted)[kind - 1]
        return found

    @staticmethod
    def backward(ctx: Any, new: Tensor) -> tuple[Tensor | None, ...]:
        kinds = [kind for kind in range(3) if kind != ctx.kind]
        saved = dict(zip(kinds, ctx.saved_tensors, strict=True))

        def derivative(kind: int) -> Tensor:
            given = {**saved, ctx.kind: new}
            like = given.pop(kind)
            a, b = (given[other] for other in sorted(given))
            return _apply(_Trilinear, kind, a, b, like if kind else None, ctx.shape)

        wanted = zip(kinds, ctx.needs_input_grad[1:3], strict=True)
        found = [derivative(kind) if needed else None for kind, needed in wanted]
        return None, *found, None, None


def _apply(kind: Any, *arguments: Any) -> Tensor:
    """An op with a derivative of its own, to be differentiated further."""
    found: Tensor = kind.apply(*arguments)
    return found


class FastDoubleBackward(TorchFunctionMode):
    """While entered, some operations run as defined here.

    These are convolutions, batch-norms with stored statistics, and weight normalisation. With
    `skip_dead`, linear maps leave out hidden units that are zero on all samples; what a model
    differentiates by such units itself is then not found.
    """

    def __init__(self, *, skip_dead: bool = True) -> None:
        super().__init__()
        self._skip_dead = skip_dead

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
            return _convolution(func, *args, **kwargs)
        if func is F.batch_norm:
            return _batch_norm(*args, **kwargs)
        if func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        if not self._skip_dead:
            return func(*args, **kwargs)
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in _RECTIFIERS:
            return _relu(func, *args, **kwargs)
        return func(*args, **kwargs)


def _convolution(
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
    if alone or isinstance(padding, str) or not _is_plain(input, weight, bias):
        found: Tensor = func(input, weight, bias, stride, padding, dilation, groups)
        return found
    steps, sides, gaps = (_each(given, space) for given in (stride, padding, dilation))
    shape = _Shape(steps, sides, gaps, False, [0] * space, groups)
    output = _apply(_Trilinear, 0, input, weight, None, shape)
    return output if bias is None else output + bias.view(-1, *[1] * space)


def _is_plain(*tensors: Tensor | None) -> bool:
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


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear map, of the active units."""
    usual = weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])
    if input.dim() < 2 or not usual or not _is_plain(input, weight, bias):
        return F.linear(input, weight, bias)
    known, chosen = _origin_of(input, _Rectified), None
    if known is not None:
        input, chosen = known.units, known.chosen
    output = F.linear(input, _submatrix(weight, SubmatrixIndex(columns=chosen)), bias)
    _note_origin(output, _Mapped(input, chosen, weight, bias))
    return output


def _relu(func: Callable[..., Tensor], input: Tensor, *options: Any, **named: Any) -> Tensor:
    """A ReLU that remembers, behind a linear map, which of its units are active."""
    before = _origin_of(input, _Mapped) if _is_plain(input) else None
    if before is None:
        return func(input, *options, **named)
    values = input.detach()
    chosen = active_units(values.relu())
    if chosen is None:
        return func(input, *options, **named)
    kept = values.index_select(-1, chosen)  # The ReLU may be in place.
    output = func(input, *options, **named)
    weight = _submatrix(before.weight, SubmatrixIndex(chosen, before.chosen))
    bias = None if before.bias is None else before.bias.index_select(0, chosen)
    units = _apply(_Known, before.inputs, weight, bias, kept)
    _note_origin(output, _Rectified(units.relu(), chosen))
    return output


def _batch_norm(
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
    if not stored or not _is_plain(input, running_mean, running_var, weight, bias):
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


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """A weight of direction v and size g."""
    if not _is_plain(v, g):
        return torch._weight_norm(v, g, dim)
    return v * (g / torch.norm_except_dim(v, 2, dim))
