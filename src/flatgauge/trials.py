"""Ways of differentiating twice, tried out on a few samples before they are trusted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatgauge.double_backward import CheapTwice
from flatgauge.objective import Objective
from flatgauge.products import (
    Function,
    GradientGraph,
    Method,
    differentiate,
    forward_product,
)
from flatgauge.subject import Subject

ONCE = "a function in the model is marked once_differentiable"

_NOT_THE_DERIVATIVE = (
    "its products differ from differences of the gradient (a backward pass that detaches, or whose "
    "own derivative is wrong in torch)"
)

#: How many entries of every parameter are compared.
_COMPARED = 2**14

#: How far a product may lie from the difference quotient, relative to the parameter's part.
_TOLERANCE = 1e-2

#: What is too small to compare, relative to the whole product.
_SMALL = 1e-4

#: Steps of the difference quotient, relative to the parameters. The first is the least likely to
#: cross the kink of a ReLU.
_STEPS = (1e-8, 1e-7, 1e-6)


def works(
    method: Method, objective: Objective, subject: Subject, *, leave_out: bool = True
) -> str | None:
    """Try a way of differentiating twice on a few samples.

    Args:
        method: The way.
        objective: What to differentiate.
        subject: The model.
        leave_out: Whether silent units are left out, see `CheapTwice`.

    Returns:
        None if it works, else what speaks against it.
    """
    if method == "differences":
        return None
    try:
        complaint = _tried(method, objective, subject, leave_out)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0]
    objective.tidy()
    if complaint is None and subject.device.type != "mps":
        try:
            right = _is_derivative(method, objective, subject.doubled(), leave_out)
        except (RuntimeError, NotImplementedError):  # It computes in single precision only.
            right = True
        complaint = None if right else _NOT_THE_DERIVATIVE
    objective.tidy()
    return complaint


def _tried(method: Method, objective: Objective, subject: Subject, leave_out: bool) -> str | None:
    """What a product says of itself: whether it fails, or is not symmetric."""
    few, leaves = objective.few(), subject.leaves
    vector = [torch.ones_like(leaf) for leaf in leaves]
    ramp = [torch.linspace(-1, 1, x.numel()).to(x).reshape(x.shape) for x in leaves]

    def function(values: Sequence[Tensor]) -> Tensor:
        return objective.total(values, few)

    def attempt() -> str | None:
        if method == "forward":
            forward_product(function, leaves, vector)
            return None
        with CheapTwice(leave_out=leave_out):
            graph = GradientGraph(function, leaves)
            if graph.has_dead_end():
                return ONCE
            products = graph.product(vector, last=False), graph.product(ramp, last=True)
        if not _symmetric(vector, ramp, *products):
            return "torch's second derivative of some function is not symmetric"
        return None

    return subject.holding(leaves, attempt)


def _is_derivative(method: Method, objective: Objective, double: Subject, leave_out: bool) -> bool:
    """Whether a product is the derivative of the gradient, as far as differences can tell."""
    few, leaves = double.place(objective.few()), double.leaves
    vector = _direction(leaves)

    def function(values: Sequence[Tensor]) -> Tensor:
        return objective.total_of(double, values, few)

    def product() -> Sequence[Tensor | None]:
        if method == "forward":
            return forward_product(function, leaves, vector)
        with CheapTwice(leave_out=leave_out):
            return GradientGraph(function, leaves).product(vector, last=True)

    claimed = _entries(double.holding(leaves, product), leaves)
    objective.tidy()
    if not all(torch.isfinite(part).all() for part in claimed):
        return True  # Not a question of the method: said when it is measured.
    before: list[Tensor] | None = None
    for step in _STEPS:
        quotient = _quotient(function, double, vector, step)
        if _close(claimed, quotient):
            return True
        if before is not None and _close(before, quotient) and _close(quotient, before):
            return False  # Two steps agree with each other, and not with the product.
        before = quotient
    return True  # Differences are too rough to tell: kinks, or rounding inside the model.


def _quotient(
    function: Function, double: Subject, vector: Sequence[Tensor], step: float
) -> list[Tensor]:
    """The central difference of the gradient along a vector."""

    def gradient(sign: int) -> list[Tensor]:
        moved = [
            (leaf.detach() + sign * step * part).requires_grad_()
            for leaf, part in zip(double.leaves, vector, strict=True)
        ]
        pieces = double.holding(moved, lambda: differentiate(function(moved), moved))
        return _entries(pieces, moved)

    pairs = zip(gradient(1), gradient(-1), strict=True)
    return [(ahead - behind) / (2 * step) for ahead, behind in pairs]


def _direction(leaves: Sequence[Tensor]) -> list[Tensor]:
    """A random direction in which every parameter moves in proportion to its own size."""
    generator = torch.Generator().manual_seed(0)
    direction = []
    for leaf in leaves:
        size = leaf.detach().square().mean().sqrt()
        noise = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)
        direction.append(noise * torch.where(size > 0, size, 1.0))
    return direction


def _entries(pieces: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Some entries of every piece, zeros for None; whole, they are the model several times over."""
    found = []
    for piece, leaf in zip(pieces, like, strict=True):
        step = max(leaf.numel() // _COMPARED, 1)
        entries = leaf.detach().reshape(-1)[::step]
        found.append(
            torch.zeros_like(entries)
            if piece is None
            else piece.detach().reshape(-1)[::step].clone()
        )
    return found


def _close(claimed: Sequence[Tensor], measured: Sequence[Tensor]) -> bool:
    """Whether products agree parameter by parameter."""
    whole = sum(float(part.square().sum()) for part in measured) ** 0.5
    return all(
        float((a - b).norm()) <= _TOLERANCE * float(b.norm()) + _SMALL * whole
        for a, b in zip(claimed, measured, strict=True)
    )


def _symmetric(
    u: Sequence[Tensor],
    v: Sequence[Tensor],
    of_u: Sequence[Tensor | None],
    of_v: Sequence[Tensor | None],
) -> bool:
    """Whether v·Hu = u·Hv, as it must be for a Hessian."""

    def dot(left: Sequence[Tensor], right: Sequence[Tensor | None]) -> float:
        pairs = zip(left, right, strict=True)
        return sum(float((a * b).sum()) for a, b in pairs if b is not None)

    def size(pieces: Sequence[Tensor | None]) -> float:
        return sum(float(piece.norm()) for piece in pieces if piece is not None)

    return abs(dot(v, of_u) - dot(u, of_v)) <= 1e-3 * (size(v) * size(of_u) + size(u) * size(of_v))
