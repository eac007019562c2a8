"""First and second derivatives of one scalar function of several leaves.

What enters: a function of the leaves and vectors. What leaves: gradients and Hessian products, by
reverse over reverse (`GradientGraph`), forward over reverse, or differences of the gradient. A kept
graph makes a product cost one backward pass, not one forward and two backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Function = Callable[[Sequence[Tensor]], Tensor]
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

    def __init__(self, function: Function, leaves: Sequence[Tensor]) -> None:
        gradient = differentiate(function(leaves), leaves, create_graph=True)
        self._leaves = leaves
        self._pieces = [
            (index, _end(piece))
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
        return nodes_from([_node(end) for _, end in self._pieces])


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


def _end(piece: Tensor) -> Any:
    """Where a gradient ends in the graph, without its numbers."""
    # Kept for every chunk, the numbers would take the size of the model each time.
    return get_gradient_edge(piece)


def _node(end: Any) -> Any:
    return end.node


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
        if "use_reentrant" not in str(error) and "Checkpointing is not compatible" not in str(
            error
        ):
            raise
        raise ValueError(REENTRANT) from error
    return [
        piece.to_dense() if piece is not None and piece.is_sparse else piece for piece in pieces
    ]


def forward_product(
    function: Function, leaves: Sequence[Tensor], vector: Sequence[Tensor]
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
