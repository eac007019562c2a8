"""First and second derivatives, tried out on a few samples before they are trusted.

They are compared with differences in double precision, at a point near the model's own: a unit
that is exactly zero, as in a pruned network, sits on the kink of its ReLU, where differences of
the gradient give something else than its derivative however short the step. Nearby it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flatgauge.batch import Batch
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

#: How far from the model's parameters derivatives are compared, relative to their size.
_AWAY = 1e-2

#: How far a product may lie from the difference quotient, relative to the parameter's part.
_TOLERANCE = 1e-3

#: What is too small to compare, relative to the whole product.
_SMALL = 1e-4

#: How far a slope may lie from the difference quotient, relative to what parameters add to it.
_SLOPE_TOLERANCE = 1e-4

#: How many times closer two quotients must lie to each other than to what they contradict.
_CLOSER = 30

#: Steps of the difference quotients, relative to the parameters: of the gradient, the first being
#: the least likely to cross the kink of a ReLU; and of the loss, which kinks hardly disturb.
_STEPS, _SLOPE_STEPS = (1e-8, 1e-7, 1e-6), (1e-6, 1e-5, 1e-4)


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


def computes_in_double(objective: Objective, subject: Subject) -> bool:
    """Whether gradients can be computed in double precision, tried on a few samples.

    Args:
        objective: What to differentiate.
        subject: The model, not sharded.

    Returns:
        Whether they can.
    """
    if subject.device.type == "mps":
        return False
    double = subject.doubled()
    try:
        gradient_at(double.leaves, objective, double, double.place(objective.few()))
    except (RuntimeError, NotImplementedError):
        return subject.dtype is torch.float64
    return True


def gradient_at(
    leaves: Sequence[Tensor], objective: Objective, subject: Subject, batch: Batch
) -> Sequence[Tensor | None]:
    """The gradient of the loss summed over a batch.

    Args:
        leaves: The values of the trainable parameters.
        objective: What to differentiate.
        subject: The model, in the precision of these values.
        batch: The batch, in this precision.

    Returns:
        One tensor for every parameter, None where the loss does not depend on it.
    """

    def gradient() -> Sequence[Tensor | None]:
        return differentiate(objective.total_of(subject, leaves, batch), leaves)

    return subject.holding(leaves, gradient)


def has_right_gradient(objective: Objective, subject: Subject) -> bool:
    """Whether the gradient is the derivative of the loss, as far as differences can tell.

    Args:
        objective: What to differentiate.
        subject: The model.

    Returns:
        Whether it is, by the parameters that autograd reaches; the others count as constants.
        Where rounding inside the model hides small steps, this cannot be told, and the gradient
        is trusted.
    """
    if subject.sharded or subject.device.type == "mps":
        return True
    try:
        return _slope_agrees(objective, subject.doubled())
    except (RuntimeError, NotImplementedError):  # It computes in single precision only.
        return True
    finally:
        objective.tidy()


def _slope_agrees(objective: Objective, double: Subject) -> bool:
    """Whether the gradient along one direction is the slope of the loss there."""
    few = double.place(objective.few())
    point, pieces = _finite_near(double, lambda leaves: gradient_at(leaves, objective, double, few))
    if point is None:
        return True  # Said when it is measured.
    vector = _reached(_direction(double.leaves), pieces)
    parts = [
        float((piece * part).sum())
        for piece, part in zip(pieces, vector, strict=True)
        if piece is not None
    ]
    claimed, size = sum(parts), sum(map(abs, parts))

    def value(step: float) -> float:
        moved = _moved(point, vector, step)
        total = double.holding(moved, lambda: objective.total_of(double, moved, few))
        return float(total.detach())

    before: float | None = None
    for step in _SLOPE_STEPS:
        slope = (value(step) - value(-step)) / (2 * step)
        off, allowed = abs(claimed - slope), _SLOPE_TOLERANCE * max(size, abs(slope))
        if off <= allowed:
            return True
        # No change at all says that the model rounds, not that the loss has no slope.
        if before and slope and off > _CLOSER * abs(slope - before):
            return False
        before = slope
    return True


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
    few = double.place(objective.few())
    vector = _reached(_direction(double.leaves), gradient_at(double.leaves, objective, double, few))

    def function(values: Sequence[Tensor]) -> Tensor:
        return objective.total_of(double, values, few)

    def product(leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        def compute() -> Sequence[Tensor | None]:
            if method == "forward":
                return forward_product(function, leaves, vector)
            with CheapTwice(leave_out=leave_out):
                return GradientGraph(function, leaves).product(vector, last=True)

        return double.holding(leaves, compute)

    point, pieces = _finite_near(double, product)
    objective.tidy()
    if point is None:
        return True  # Not a question of the method: said when it is measured.
    claimed = _entries(pieces, point)
    before: list[Tensor] | None = None
    for step in _STEPS:
        quotient = _quotient(function, double, point, vector, step)
        wrong = _far(claimed, quotient)
        if not wrong:
            return True
        if before is not None and any(
            float((claimed[i] - quotient[i]).norm())
            > _CLOSER * float((quotient[i] - before[i]).norm())
            for i in wrong
        ):
            return False  # Two steps agree with each other, and not with the product.
        before = quotient
    return True  # Differences are too rough to tell: kinks, or rounding inside the model.


def _finite_near(
    double: Subject, compute: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
) -> tuple[Sequence[Tensor] | None, Sequence[Tensor | None]]:
    """A point near the model's own where derivatives are finite, and these; or its own point."""
    nearby = _moved(double.leaves, _direction(double.leaves, seed=1), _AWAY)
    for point in (nearby, double.leaves):
        pieces = compute(point)
        if all(piece is None or bool(torch.isfinite(piece).all()) for piece in pieces):
            return point, pieces
    return None, ()


def _quotient(
    function: Function,
    double: Subject,
    point: Sequence[Tensor],
    vector: Sequence[Tensor],
    step: float,
) -> list[Tensor]:
    """The central difference of the gradient along a vector."""

    def gradient(sign: int) -> list[Tensor]:
        moved = _moved(point, vector, sign * step)
        pieces = double.holding(moved, lambda: differentiate(function(moved), moved))
        return _entries(pieces, moved)

    pairs = zip(gradient(1), gradient(-1), strict=True)
    return [(ahead - behind) / (2 * step) for ahead, behind in pairs]


def _moved(leaves: Sequence[Tensor], vector: Sequence[Tensor], step: float) -> list[Tensor]:
    """Parameters a step away, as leaves to differentiate by."""
    return [
        (leaf.detach() + step * part).requires_grad_()
        for leaf, part in zip(leaves, vector, strict=True)
    ]


def _direction(leaves: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """A random direction in which every parameter moves in proportion to its own size."""
    generator = torch.Generator().manual_seed(seed)
    direction = []
    for leaf in leaves:
        size = leaf.detach().square().mean().sqrt()
        noise = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)
        direction.append(noise * torch.where(size > 0, size, 1.0))
    return direction


def _reached(vector: Sequence[Tensor], gradient: Sequence[Tensor | None]) -> list[Tensor]:
    """The direction without parameters that autograd does not reach (under `no_grad`, say)."""
    return [
        torch.zeros_like(part) if piece is None else part
        for part, piece in zip(vector, gradient, strict=True)
    ]


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


def _far(claimed: Sequence[Tensor], measured: Sequence[Tensor]) -> list[int]:
    """The parameters in whose part products do not agree."""
    whole = sum(float(part.square().sum()) for part in measured) ** 0.5
    return [
        place
        for place, (a, b) in enumerate(zip(claimed, measured, strict=True))
        if not float((a - b).norm()) <= _TOLERANCE * float(b.norm()) + _SMALL * whole
    ]


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
