"""Balance strongly connected matrices: the smallest Σ A x y + B / (x y), with a proven gap.

A matrix pair is a graph: row i -> column j of weight A_ij, column j -> row i of weight B_ij. The
sum is smallest where as much flows into every node as out of it [osborne1960preconditioning].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: Gap, relative to the value, at which to stop.
_TOLERANCE = 1e-12

#: Gap, relative to the value, that is promised.
PROMISED = 1e-8

#: Most closed-form sweeps before Newton's method, and the change in them that is small.
_SWEEPS, _SETTLED = 30, 1e-4

#: Most Newton steps, and most of these without a smaller gap.
_STEPS, _PATIENCE = 200, 3

#: The longest Newton step, as a change of the logarithm of any term.
_LONGEST = 4.0

#: A change of logarithms that a power series of four terms is exact for.
_SMALL = 1e-3

#: Up to this many rows, Newton's equations are solved densely at once.
_DENSE = 96

#: Up to this many rows, they are solved densely where conjugate gradients fail.
_MOST_DENSE = 3000

#: Most conjugate gradient steps, and the residual to reach.
_GRADIENTS, _RESIDUAL = 60, 1e-9


@dataclass(frozen=True)
class Balance:
    """The scales of a stack of connected pairs.

    Attributes:
        values: The sums (stack,).
        gaps: How far each may lie above the smallest possible (stack,).
        rows: x (stack, rows).
        columns: y (stack, columns).
    """

    values: Array
    gaps: Array
    rows: Array
    columns: Array


def balance(forward: Array, backward: Array) -> Balance:
    """Minimise Σ_ij A_ij x_i y_j + B_ij / (x_i y_j) over x, y > 0.

    Args:
        forward: A (stack, rows, columns), nowhere negative.
        backward: B, of the same shape; the graph of every pair must be strongly connected.

    Returns:
        Scales, values and gaps.
    """
    if forward.shape[1] > forward.shape[2]:  # Equations are solved for the shorter side.
        turned = balance(forward.transpose(0, 2, 1), backward.transpose(0, 2, 1))
        return Balance(turned.values, turned.gaps, turned.columns, turned.rows)
    forward, backward = np.ascontiguousarray(forward), np.ascontiguousarray(backward)
    x, y = _swept(forward, backward)
    best = Balance(np.full(len(x), np.inf), np.full(len(x), np.inf), x.copy(), y.copy())
    active, waiting = np.arange(len(x)), np.zeros(len(x), dtype=int)
    for _ in range(_STEPS):
        terms = _Terms(forward[active], backward[active], x[active], y[active])
        steps, gaps = terms.newton()
        better = (gaps < 0.5 * best.gaps[active]) | np.isinf(best.gaps[active])
        _keep(best, active[better], terms, gaps, better)
        waiting[active] = np.where(better, 0, waiting[active] + 1)
        # A step that is too long for a bound at all is one on the way, not one in vain.
        bounded = np.isfinite(best.gaps[active])
        enough = best.gaps[active] <= _TOLERANCE * best.values[active]
        going = ~(bounded & (enough | (waiting[active] >= _PATIENCE)))
        active = active[going]
        if not len(active):
            break
        x[active], y[active] = terms.moved(going, *(step[going] for step in steps))
    return best


def _keep(
    best: Balance,
    into: npt.NDArray[np.int_],
    terms: _Terms,
    gaps: Array,
    which: npt.NDArray[np.bool_],
) -> None:
    """Note the points with the smallest gaps."""
    best.values[into], best.gaps[into] = terms.values[which], gaps[which]
    best.rows[into], best.columns[into] = terms.x[which], terms.y[which]


def _swept(forward: Array, backward: Array) -> tuple[Array, Array]:
    """Closed-form minimisation by the rows' scales, then by the columns', a few times."""
    x, y = np.ones(forward.shape[:2]), np.ones((len(forward), forward.shape[2]))
    for _ in range(_SWEEPS):
        before = y
        x = _closed_form(_times(backward, 1 / y), _times(forward, y))
        y = _closed_form(_over(1 / x, backward), _over(x, forward))
        if (np.abs(y / before - 1) < _SETTLED).all():
            break
    return x, y


def _closed_form(back: Array, ahead: Array) -> Array:
    """The scale at which what enters a node is what leaves it."""
    scale: Array = np.sqrt(back) / np.sqrt(ahead)
    return scale


def _times(matrices: Array, vectors: Array) -> Array:
    """Matrix times vector, for a stack."""
    return (matrices @ vectors[:, :, None])[:, :, 0]


def _over(vectors: Array, matrices: Array) -> Array:
    """Vector times matrix, for a stack."""
    return (vectors[:, None, :] @ matrices)[:, 0, :]


class _Terms:
    """The terms of the sums at one point, and what follows from them."""

    def __init__(self, forward: Array, backward: Array, x: Array, y: Array) -> None:
        self.x, self.y = x, y
        self._forward, self._backward = forward, backward
        products = x[:, :, None] * y[:, None, :]
        out, back = forward * products, backward / products
        self._flow = out + back
        self._excess = out - back
        self.values: Array = self._flow.sum((1, 2))
        self._out, self._back = out, back

    def newton(self) -> tuple[tuple[Array, Array], Array]:
        """Newton's step in the logarithms of x and y, and the gap that it proves."""
        rows, columns = self._excess.sum(2), self._excess.sum(1)
        total_rows, total_columns = self._flow.sum(2), self._flow.sum(1)
        # Eliminate the columns; what is left is the Laplacian of a graph on the rows.
        right = -(rows - _times(self._flow, columns / total_columns))
        # In exact arithmetic it adds up to zero; what does not is shared out by size.
        right -= total_rows * (right.sum(1) / self.values)[:, None]
        if right.shape[1] <= _DENSE:
            step = _dense(self._flow, total_columns, right)
        else:
            each = zip(self._flow, total_rows, total_columns, right, strict=True)
            step = np.stack([_gradients(*item) for item in each])
        other = -(columns + _over(step, self._flow)) / total_columns
        return (step, other), self._gap(step, other)

    def _gap(self, step: Array, other: Array) -> Array:
        """How far the values may lie above the smallest."""
        # For every circulation f ≥ 0 (as much into every node as out of it), Σ f (1 + log(w / f))
        # bounds the sum from below, w the terms at any point. Newton's step changes the terms z to
        # first order to z (1 + Δ), and that is a circulation: this is what Newton's equations say.
        # What remains of it at the nodes counts as far as the solution may be away.
        change = step[:, :, None] + other[:, None, :]  # Δ of A's terms, -Δ of B's
        change[self._flow == 0] = 0.0
        if (np.abs(change) < _SMALL).all():  # By the power series, even and odd terms apart.
            square = change * change
            gaps = _inner(self._flow, square * (1 / 2 + square / 12))
            gaps -= _inner(self._excess, change * square * (1 / 6 + square / 20))
            surplus = self._excess + self._flow * change
        else:
            gaps = _inner(self._out, _rise(change)) + _inner(self._back, _rise(-change))
            surplus = self._out * (1 + change).clip(0) - self._back * (1 - change).clip(0)
        left = np.abs(surplus.sum(2)).sum(1) + np.abs(surplus.sum(1)).sum(1)
        gaps += left / 2 * self._reach() + 4 * np.finfo(float).eps * self.values
        # No entry costs less than its own best.
        own = 2 * _inner(np.sqrt(self._out), np.sqrt(self._back))
        return np.fmin(gaps, self.values - own)

    def _reach(self) -> Array:
        """How far the logarithms of a better point's scales can move apart from here."""
        # No term of a better point exceeds the sum here, so that a term z lets its ends move
        # apart by at most log(sum / z); a way there and back through all nodes adds that up.
        total = np.zeros(len(self.x))
        for there, back in ((self._out, self._back), (self._back, self._out)):
            rows, columns = np.zeros_like(self.x), np.zeros_like(self.y)
            rows[:, 0] = 1.0
            for _ in range(self.x.shape[1]):
                scaled = rows / self.values[:, None]
                columns = (scaled[:, :, None] * there).max(1)
                scaled = columns / self.values[:, None]
                rows = np.maximum(rows, (scaled[:, None, :] * back).max(2))
                least = np.minimum(rows.min(1), columns.min(1))
                if (least > 0).all():
                    break
            with np.errstate(divide="ignore"):
                total -= np.log(least)
        return total

    def moved(self, which: npt.NDArray[np.bool_], step: Array, other: Array) -> tuple[Array, Array]:
        """Go Newton's way as far as the sum falls, then sweep once."""
        forward, backward = self._forward[which], self._backward[which]
        x, y, before = self.x[which], self.y[which], self.values[which]
        change = np.where(self._flow[which] > 0, step[:, :, None] + other[:, None, :], 0.0)
        longest = np.abs(change).max((1, 2))
        length = np.minimum(1.0, _LONGEST / np.maximum(longest, _LONGEST))
        for _ in range(30):
            new_x, new_y = x * np.exp(length[:, None] * step), y * np.exp(length[:, None] * other)
            ahead, behind = _times(forward, new_y), _times(backward, 1 / new_y)
            grows = ~((new_x * ahead + behind / new_x).sum(1) <= before * (1 + 1e-14))
            if not grows.any():
                break
            length = np.where(grows, length / 2, length)
        new_x = _closed_form(behind, ahead)
        return new_x, _closed_form(_over(1 / new_x, backward), _over(new_x, forward))


def _inner(one: Array, other: Array) -> Array:
    """Sums of products, for a stack."""
    sums: Array = np.einsum("nij,nij->n", one, other)
    return sums


def _rise(change: Array) -> Array:
    """(1 + Δ) log(1 + Δ) - Δ, zero at Δ = 0 and -Δ from Δ = -1 down: a flow is not negative."""
    whole = (1 + change).clip(0) * np.log1p(change.clip(-1 + 1e-15)) - change
    lost = np.where(change < -1, 1 + change, 0.0)  # z - f = z where there is no flow f
    series = change**2 * (1 / 2 - change * (1 / 6 - change * (1 / 12 - change / 20)))
    return np.where(np.abs(change) < _SMALL, series, whole + lost)


def _dense(flow: Array, columns: Array, right: Array) -> Array:
    """Solve the Laplacian with the first unknown at zero, for a stack."""
    links = (flow / columns[:, None, :]) @ flow.transpose(0, 2, 1)
    diagonal = np.arange(links.shape[1])
    links[:, diagonal, diagonal] = 0.0
    laplacian = -links
    laplacian[:, diagonal, diagonal] = links.sum(2)  # No difference of near numbers.
    step = np.zeros_like(right)
    try:
        step[:, 1:] = np.linalg.solve(laplacian[:, 1:, 1:], right[:, 1:, None])[:, :, 0]
    except np.linalg.LinAlgError:  # Some links underflow: no step but the sweep after it.
        if len(flow) > 1:
            each = zip(flow, columns, right, strict=True)
            return np.concatenate([_dense(f[None], c[None], r[None]) for f, c, r in each])
    step[~np.isfinite(step).all(1)] = 0.0
    return step


def _gradients(flow: Array, rows: Array, columns: Array, right: Array) -> Array:
    """Solve the Laplacian of one pair by conjugate gradients, densely where they fail."""
    step, residual = np.zeros_like(right), right.copy()
    target = _RESIDUAL * np.abs(right).sum()
    direction = scaled = residual / rows
    size = residual @ scaled
    for _ in range(_GRADIENTS):
        if np.abs(residual).sum() <= target:
            return step
        product = rows * direction - flow @ ((direction @ flow) / columns)
        length = size / (direction @ product)
        step = step + length * direction
        residual = residual - length * product
        scaled = residual / rows
        size, before = residual @ scaled, size
        direction = scaled + (size / before) * direction
    if len(right) > _MOST_DENSE:
        return step
    solved: Array = _dense(flow[None], columns[None], right[None])[0]
    return solved
