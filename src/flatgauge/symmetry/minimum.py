"""The smallest sum that rescaling can reach, of squared weights say: convex, by Newton's method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flatgauge.symmetry.pattern import NOTHING, Floats, Pattern

#: Balanced means: what enters a unit and what leaves it differ by less than this.
TOLERANCE = 1e-12

_MOST_STEPS = 100
_MOST_INNER = 2000

#: No scale changes by more than this factor's logarithm in one step.
_LONGEST = 4.0

#: Up to so many units and weights, Newton's equation is written out and solved directly.
_MOST_UNITS, _MOST_WEIGHTS = 1000, 2**21


@dataclass(frozen=True)
class Edges:
    """What a tensor adds to a sum, joined where it scales alike: its squared weights, for the norm.

    Attributes:
        pattern: Which units they enter and leave.
        terms: At least zero, of the pattern's shape.
    """

    pattern: Pattern
    terms: Floats


def total(layers: Sequence[Edges], count: int, *, sign: int = 0, square: bool = False) -> Floats:
    """Sums by unit: Σ exponent · term.

    Args:
        layers: All edges.
        count: How many units there are.
        sign: 1 for what enters only, -1 for what leaves.
        square: Whether exponents are squared.

    Returns:
        One sum per unit.
    """
    sums = np.zeros(count)
    for layer in layers:
        sums += layer.pattern.shares(layer.terms, count, sign=sign, square=square)
    return sums


def rescaled(layers: Sequence[Edges], logs: Floats) -> list[Edges]:
    """The terms after multiplying units by exp(logs)."""
    return [
        replace(layer, terms=layer.terms * np.exp(2 * layer.pattern.exponents(logs)))
        for layer in layers
    ]


def smallest_sum(layers: Sequence[Edges], count: int) -> tuple[Floats, int, float]:
    """Minimise Σ terms · exp(2 exponents) over the logarithms of the units' scales.

    Args:
        layers: All edges; every unit has some that enter and some that leave, or none.
        count: How many units there are.

    Returns:
        The logarithms, the number of steps, and the largest relative imbalance left.
    """
    logs = np.zeros(count)
    live = total(layers, count, square=True) > 0
    best, least = logs, np.inf
    for step in range(_MOST_STEPS + 1):
        weights = rescaled(layers, logs)
        gradient = total(weights, count)
        sizes = total(weights, count, sign=1) + total(weights, count, sign=-1)
        imbalance = float(np.abs(gradient[live] / sizes[live]).max(initial=0.0))
        if imbalance <= TOLERANCE and imbalance > least / 2:
            break  # Rounding allows nothing better.
        if imbalance < least:
            best, least = logs, imbalance
        if imbalance == 0 or step == _MOST_STEPS:
            break
        direction = _solved(weights, -gradient, live, count, min(1e-2, imbalance))
        direction *= min(1.0, _LONGEST / max(np.abs(direction).max(), 1e-300))
        logs = logs + _length(layers, logs, direction) * direction
    return best, step, least


def gap(layers: Sequence[Edges], logs: Floats, count: int) -> float:
    """How far the sum is from its smallest, by Newton's decrement.

    Args:
        layers: All edges.
        logs: The logarithms that were reached.
        count: How many units there are.

    Returns:
        Half the squared decrement: what the sum would lose in one more step, were it quadratic.
    """
    weights = rescaled(layers, logs)
    gradient = total(weights, count)
    live = total(weights, count, square=True) > 0
    return abs(float(gradient @ _solved(weights, gradient, live, count, 1e-2)))


def _length(layers: Sequence[Edges], logs: Floats, direction: Floats) -> float:
    """How far to go along a Newton step: all the way, unless the sum grows."""
    value, length = _sum(layers, logs), 1.0
    while length > 1e-6 and _sum(layers, logs + length * direction) > value * (1 + 1e-13):
        length /= 2
    return length


def _sum(layers: Sequence[Edges], logs: Floats) -> float:
    """The sum after rescaling."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = sum(float(layer.terms.sum()) for layer in rescaled(layers, logs))
    return value if np.isfinite(value) else np.inf


def _solved(
    weights: list[Edges], right: Floats, live: NDArray[np.bool_], count: int, tolerance: float
) -> Floats:
    """Solve Newton's equation."""
    size = sum(layer.terms.size for layer in weights)
    if count <= _MOST_UNITS and size <= _MOST_WEIGHTS:
        matrix = _matrix(weights, count)[np.ix_(live, live)]
        solution = np.zeros(count)
        try:
            solution[live] = np.linalg.solve(matrix, right[live])
        except np.linalg.LinAlgError:
            return _conjugate(weights, right, live, count, tolerance)
        return solution
    return _conjugate(weights, right, live, count, tolerance)


def _matrix(weights: list[Edges], count: int) -> Floats:
    """Second derivatives of half the sum, written out."""
    flat = np.zeros((count + 1) ** 2)
    for layer in weights:
        for one in layer.pattern.parts:
            for other in layer.pattern.parts:
                shape = np.broadcast_shapes(one.shape, other.shape)
                axes = tuple(a for a, n in enumerate(shape) if n == 1 < layer.terms.shape[a])
                sums = layer.terms.sum(axes, keepdims=True) if axes else layer.terms
                for u, p in zip(one.units, one.powers, strict=True):
                    for v, q in zip(other.units, other.powers, strict=True):
                        row = np.where(u == NOTHING, count, u).reshape(one.shape)
                        column = np.where(v == NOTHING, count, v).reshape(other.shape)
                        places = np.broadcast_to(row * (count + 1) + column, shape)
                        shares = sums * p.reshape(one.shape) * q.reshape(other.shape)
                        flat += np.bincount(places.reshape(-1), shares.reshape(-1), flat.size)
    return 2 * flat.reshape(count + 1, count + 1)[:count, :count]


def _conjugate(
    weights: list[Edges], right: Floats, live: NDArray[np.bool_], count: int, tolerance: float
) -> Floats:
    """Solve Newton's equation by conjugate gradients, preconditioned by the diagonal."""
    diagonal = np.where(live, 2 * total(weights, count, square=True), 1.0)
    x, residual = np.zeros(count), np.where(live, right, 0.0)
    scaled = residual / diagonal
    direction, product = scaled.copy(), float(residual @ scaled)
    goal = tolerance**2 * product
    for _ in range(_MOST_INNER):
        if product <= goal or product == 0:
            break
        image = 2 * sum(
            layer.pattern.shares(layer.terms * layer.pattern.exponents(direction), count)
            for layer in weights
        )
        curvature = float(direction @ image)
        if curvature <= 0:
            break
        step = product / curvature
        x += step * direction
        residual = residual - step * image
        scaled = residual / diagonal
        product, before = float(residual @ scaled), product
        direction = scaled + (product / before) * direction
    return x
