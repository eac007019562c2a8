"""First and second derivatives, tried out on a few samples before they are trusted.

They are compared with differences in double precision, at a point near the model's own: a unit
that is exactly zero, as in a pruned network, sits on the kink of its ReLU, where differences of
the gradient give something else than its derivative however short the step. Nearby it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatgauge.surface.derivatives import (
    Function,
    GradientGraph,
    Method,
    differentiate,
    forward_product,
)
from flatgauge.surface.double_backward import FastDoubleBackward

if TYPE_CHECKING:
    from flatgauge.surface.batch import Batch
    from flatgauge.surface.model import FunctionalModel
    from flatgauge.surface.risk import EmpiricalRisk

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


def find_fault(
    method: Method, risk: EmpiricalRisk, model: FunctionalModel, *, skip_dead: bool = True
) -> str | None:
    """Try a way of differentiating twice on a few samples."""
    if method == "differences":
        return None
    try:
        complaint = _run_once(method, risk, model, skip_dead)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0]
    risk.tidy()
    if complaint is None and model.device.type != "mps":
        try:
            right = _is_derivative(method, risk, model.in_float64(), skip_dead)
        except (RuntimeError, NotImplementedError):  # It computes in single precision only.
            right = True
        complaint = None if right else _NOT_THE_DERIVATIVE
    risk.tidy()
    return complaint


def computes_in_double(risk: EmpiricalRisk, model: FunctionalModel) -> bool:
    """Whether gradients can be computed in double precision, tried on a few samples."""
    if model.device.type == "mps":
        return False
    double = model.in_float64()
    try:
        gradient_at(double.leaves, risk, double, double.place(risk.few()))
    except (RuntimeError, NotImplementedError):
        return model.dtype is torch.float64
    return True


def gradient_at(
    leaves: Sequence[Tensor], risk: EmpiricalRisk, model: FunctionalModel, batch: Batch
) -> Sequence[Tensor | None]:
    """The gradient of the loss summed over a batch."""

    def gradient() -> Sequence[Tensor | None]:
        return differentiate(risk.total_of(model, leaves, batch), leaves)

    return model.with_parameters(leaves, gradient)


def has_right_gradient(risk: EmpiricalRisk, model: FunctionalModel) -> bool:
    """Whether the gradient is the derivative of the loss, as far as differences show."""
    if model.sharded or model.device.type == "mps":
        return True
    try:
        return _slope_agrees(risk, model.in_float64())
    except (RuntimeError, NotImplementedError):  # It computes in single precision only.
        return True
    finally:
        risk.tidy()


def _slope_agrees(risk: EmpiricalRisk, double: FunctionalModel) -> bool:
    """Whether the gradient along one direction is the slope of the loss there."""
    few = double.place(risk.few())
    point, pieces = _finite_near(double, lambda leaves: gradient_at(leaves, risk, double, few))
    if point is None:
        return True  # Said when it is measured.
    vector = _keep_reached(_direction(double.leaves), pieces)
    parts = [
        float((piece * part).sum())
        for piece, part in zip(pieces, vector, strict=True)
        if piece is not None
    ]
    claimed, size = sum(parts), sum(map(abs, parts))

    def value(step: float) -> float:
        moved = _move(point, vector, step)
        total = double.with_parameters(moved, lambda: risk.total_of(double, moved, few))
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


def _run_once(
    method: Method, risk: EmpiricalRisk, model: FunctionalModel, skip_dead: bool
) -> str | None:
    """What a product says of itself: whether it fails, or is not symmetric."""
    few, leaves = risk.few(), model.leaves
    vector = [torch.ones_like(leaf) for leaf in leaves]
    ramp = [torch.linspace(-1, 1, x.numel()).to(x).reshape(x.shape) for x in leaves]

    def function(values: Sequence[Tensor]) -> Tensor:
        return risk.total(values, few)

    def attempt() -> str | None:
        if method == "forward":
            forward_product(function, leaves, vector)
            return None
        with FastDoubleBackward(skip_dead=skip_dead):
            graph = GradientGraph(function, leaves)
            if graph.has_dead_end():
                return ONCE
            products = graph.product(vector, last=False), graph.product(ramp, last=True)
        if not _is_symmetric(vector, ramp, *products):
            return "torch's second derivative of some function is not symmetric"
        return None

    return model.with_parameters(leaves, attempt)


def _is_derivative(
    method: Method, risk: EmpiricalRisk, double: FunctionalModel, skip_dead: bool
) -> bool:
    """Whether a product is the derivative of the gradient, as far as differences show."""
    few = double.place(risk.few())
    vector = _keep_reached(_direction(double.leaves), gradient_at(double.leaves, risk, double, few))

    def function(values: Sequence[Tensor]) -> Tensor:
        return risk.total_of(double, values, few)

    def product(leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        def compute() -> Sequence[Tensor | None]:
            if method == "forward":
                return forward_product(function, leaves, vector)
            with FastDoubleBackward(skip_dead=skip_dead):
                return GradientGraph(function, leaves).product(vector, last=True)

        return double.with_parameters(leaves, compute)

    point, pieces = _finite_near(double, product)
    risk.tidy()
    if point is None:
        return True  # Not a question of the method: said when it is measured.
    claimed = _entries(pieces, point)
    before: list[Tensor] | None = None
    for step in _STEPS:
        quotient = _quotient(function, double, point, vector, step)
        wrong = _disagreeing(claimed, quotient)
        if not wrong:
            return True
        if before is not None and any(
            float((claimed[i] - quotient[i]).norm())
            > _CLOSER * float((quotient[i] - before[i]).norm())
            for i in wrong
        ):
            return False  # Two steps agree with each other, and not with the product.
        before = quotient
    return True  # Differences are too rough to decide: kinks, or rounding inside the model.


def _finite_near(
    double: FunctionalModel, compute: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
) -> tuple[Sequence[Tensor] | None, Sequence[Tensor | None]]:
    """A point near the model's own where derivatives are finite, and these; or its own point."""
    nearby = _move(double.leaves, _direction(double.leaves, seed=1), _AWAY)
    for point in (nearby, double.leaves):
        pieces = compute(point)
        if all(piece is None or bool(torch.isfinite(piece).all()) for piece in pieces):
            return point, pieces
    return None, ()


def _quotient(
    function: Function,
    double: FunctionalModel,
    point: Sequence[Tensor],
    vector: Sequence[Tensor],
    step: float,
) -> list[Tensor]:
    """The central difference of the gradient along a vector."""

    def gradient(sign: int) -> list[Tensor]:
        moved = _move(point, vector, sign * step)
        pieces = double.with_parameters(moved, lambda: differentiate(function(moved), moved))
        return _entries(pieces, moved)

    pairs = zip(gradient(1), gradient(-1), strict=True)
    return [(ahead - behind) / (2 * step) for ahead, behind in pairs]


def _move(leaves: Sequence[Tensor], vector: Sequence[Tensor], step: float) -> list[Tensor]:
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


def _keep_reached(vector: Sequence[Tensor], gradient: Sequence[Tensor | None]) -> list[Tensor]:
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


def _disagreeing(claimed: Sequence[Tensor], measured: Sequence[Tensor]) -> list[int]:
    """The parameters in whose part products do not agree."""
    whole = sum(float(part.square().sum()) for part in measured) ** 0.5
    return [
        place
        for place, (a, b) in enumerate(zip(claimed, measured, strict=True))
        if not float((a - b).norm()) <= _TOLERANCE * float(b.norm()) + _SMALL * whole
    ]


def _is_symmetric(
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
