"""The smallest Σ A_ij x_i y_j + B_ij / (x_i y_j) over positive scales x and y, with a proven gap.

Two non-negative matrices come in, a `Scaling` leaves. They are a graph: row i -> column j of weight
A_ij, column j -> row i of weight B_ij. The sum splits into the strongly connected components of
the graph; in each it is smallest where as much flows into every node as out of it
[osborne1960preconditioning]. Closed-form sweeps come near, Newton's method finishes, and a dual
solution bounds what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Labels = npt.NDArray[np.int_]

#: From this many entries on, a single component is tried before a search for several.
_MANY_ENTRIES = 10_000


@dataclass(frozen=True)
class Scaling:
    """The smallest sum, and the scales that come near it.

    Attributes:
        value: The sum at these scales.
        gap: How far it may lie above the smallest; proven by a dual solution.
        products: x_i y_j, of the shape of A; zero for entries that cost nothing, because x_i y_j
            may be driven there to where the entry's terms vanish.
        converged: Whether the gap is within 1e-8 of the value.
    """

    value: float
    gap: float
    products: Array
    converged: bool


def minimize_scaled_sum(forward: Array, backward: Array) -> Scaling:
    r"""Minimise a sum over positive scales of rows and of columns.

    Definition:
        .. math:: \inf_{x, y > 0} \sum_{ij} A_{ij} x_i y_j + \frac{B_{ij}}{x_i y_j}

        The infimum need not be attained: terms between different strongly connected components
        of the graph row i -> column j (where A > 0), column j -> row i (where B > 0) can be
        driven to zero together, and are left out. Within a component it is attained.

    Multiplying A_ij by 4^-(a_i + b_j) and B_ij by 4^(a_i + b_j), for whole numbers a and b, gives
    the same value bit for bit, and multiplies the products exactly. A and B are (rows, columns), or
    (groups, rows, columns) for a sum of several problems.

    Returns:
        The value with its gap.

    Raises:
        ValueError: If the shapes differ, or an entry is negative or not finite.

    Example:
        One entry costs 2 √(A B); here only the two entries on the diagonal lie on a cycle.

        >>> one, other = np.array([[1.0, 5.0], [0.0, 1.0]]), np.array([[4.0, 0.0], [0.0, 9.0]])
        >>> minimize_scaled_sum(one, other).value
        10.0
    """
    forward, backward = _check_matrix(forward), _check_matrix(backward)
    if forward.shape != backward.shape:
        raise ValueError(f"A has shape {forward.shape}, but B has shape {backward.shape}.")
    shape = forward.shape
    ahead, back = (m.reshape(-1, *shape[-2:]) for m in (forward, backward))
    rows, columns, count = _components(ahead > 0, back > 0)
    kept = rows[:, :, None] == columns[:, None, :]
    sizes = (
        np.bincount(rows.ravel(), minlength=count),
        np.bincount(columns.ravel(), minlength=count),
    )
    single = (sizes[0] == 1) | (sizes[1] == 1)
    stars = kept & single[rows][:, :, None]
    products = np.zeros_like(ahead)
    # One row, or one column: every entry has a scale of its own, and its best is known.
    roots = np.sqrt(ahead[stars]), np.sqrt(back[stars])
    products[stars] = roots[1] / roots[0]
    value, gap = 2 * float((roots[0] * roots[1]).sum()), 0.0
    for places in _by_shape(rows, columns, np.flatnonzero((sizes[0] > 1) & (sizes[1] > 1))):
        group, row, column = places
        where = group[:, None, None], row[:, :, None], column[:, None, :]
        values, gaps, products[where] = _solve_stack(ahead[where], back[where])
        value, gap = value + values, gap + gaps
    return Scaling(value, gap, products.reshape(shape), gap <= PROMISED * value)


def _check_matrix(matrix: Array) -> Array:
    """The matrix in float64; refuse negative numbers, other shapes, nan and infinity."""
    matrix = np.asarray(matrix, dtype=np.float64)
    if matrix.ndim not in (2, 3):
        raise ValueError(
            f"a matrix of shape {matrix.shape} is neither (rows, columns) nor (groups, rows, "
            "columns)."
        )
    if not (np.isfinite(matrix) & (matrix >= 0)).all():
        raise ValueError("the entries of A and B must be finite and at least zero.")
    return matrix


def _components(ahead: Mask, back: Mask) -> tuple[Labels, Labels, int]:
    """The strongly connected component of every row and column, and how many there are."""
    groups, rows, columns = ahead.shape
    if groups == 1 and ahead.size > _MANY_ENTRIES:
        alone = _one_component(ahead[0], back[0])
        if alone is not None:
            return alone
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    start = np.arange(groups)[:, None] * (rows + columns)
    row, column = start + np.arange(rows), start + rows + np.arange(columns)
    edges = [np.nonzero(mask) for mask in (ahead, back)]
    ends = [(row[g, i], column[g, j]) for g, i, j in edges]
    tails = np.concatenate([ends[0][0], ends[1][1]])
    heads = np.concatenate([ends[0][1], ends[1][0]])
    size = groups * (rows + columns)
    graph = coo_array((np.ones(len(tails), dtype=np.int8), (tails, heads)), shape=(size, size))
    count, labels = connected_components(graph.tocsr(), directed=True, connection="strong")
    return labels[row], labels[column], int(count)


def _one_component(ahead: Mask, back: Mask) -> tuple[Labels, Labels, int] | None:
    """One component next to single nodes, if that is what there is: cheaper than a graph."""
    rows, columns = np.ones(len(ahead), dtype=bool), np.ones(ahead.shape[1], dtype=bool)
    for _ in range(4):  # A node that nothing enters, or nothing leaves, is on no cycle.
        rows &= ahead[:, columns].any(1) & back[:, columns].any(1)
        columns &= ahead[rows].any(0) & back[rows].any(0)
    if not rows.any():
        return None
    for leaving, entering in ((ahead, back), (back, ahead)):
        seen = np.zeros_like(rows)
        seen[np.argmax(rows)] = True
        for _ in range(4):
            reached = np.asarray(leaving[seen].any(0))
            seen |= entering[:, reached].any(1)
        if not (seen[rows].all() and reached[columns].all()):
            return None
    # The component is number 0; single nodes have numbers of their own.
    numbers = np.arange(1, len(rows) + len(columns) + 1)
    labels = np.where(np.concatenate([rows, columns]), 0, numbers)
    return labels[None, : len(rows)], labels[None, len(rows) :], len(numbers) + 1


def _by_shape(rows: Labels, columns: Labels, components: Labels) -> list[tuple[Labels, ...]]:
    """Where components of the same shape lie: group (n,), rows (n, r), columns (n, c)."""
    if not len(components):
        return []
    ordered = [np.argsort(labels.ravel(), kind="stable") for labels in (rows, columns)]
    sorted_labels = [labels.ravel()[o] for labels, o in zip((rows, columns), ordered, strict=True)]
    found: dict[tuple[int, int], list[tuple[int, Labels, Labels]]] = {}
    for component in components:
        places = []
        for order, labels in zip(ordered, sorted_labels, strict=True):
            first, last = np.searchsorted(labels, [component, component + 1])
            places.append(order[first:last])
        group = int(places[0][0] // rows.shape[1])
        row, column = places[0] % rows.shape[1], places[1] % columns.shape[1]
        found.setdefault((len(row), len(column)), []).append((group, row, column))
    return [
        tuple(np.stack([np.asarray(place[k]) for place in places]) for k in range(3))
        for places in found.values()
    ]


def _solve_stack(forward: Array, backward: Array) -> tuple[float, float, Array]:
    """The sums, gaps and products of a stack of connected pairs."""
    exponents = np.stack([_exponents(a, b) for a, b in zip(forward, backward, strict=True)])
    scaled = np.ldexp(forward, exponents), np.ldexp(backward, -exponents)
    values, gaps, x, y = _balance(*scaled)
    products = x[:, :, None] * y[:, None, :]
    return float(values.sum()), float(gaps.sum()), np.ldexp(products, exponents)


def _exponents(forward: Array, backward: Array) -> Labels:
    """Even powers of two, one per row plus one per column, that undo any rescaling by such."""
    # Along a tree from the first row they bring the best scale of every single entry to between
    # one and four. Whatever is computed after that is the same, bit for bit, for all pairs that
    # differ by such a rescaling; and the entries are of moderate size.
    linked = (forward > 0) | (backward > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        best = np.where(backward > 0, backward, 1 / forward)
        both = (forward > 0) & (backward > 0)
        best = np.where(both, np.sqrt(backward) / np.sqrt(forward), best)
    wanted = np.frexp(best)[1] // 2
    rows, columns = np.zeros(len(forward), dtype=int), np.zeros(forward.shape[1], dtype=int)
    new_rows, left_rows = np.array([0]), np.arange(1, len(rows))
    left_columns = np.arange(len(columns))
    while len(left_rows) or len(left_columns):
        links = linked[np.ix_(new_rows, left_columns)]
        found = links.any(0)
        parents, new_columns = new_rows[links.argmax(0)[found]], left_columns[found]
        columns[new_columns] = wanted[parents, new_columns] - rows[parents]
        left_columns = left_columns[~found]
        links = linked[np.ix_(left_rows, new_columns)]
        found = links.any(1)
        parents, new_rows = new_columns[links.argmax(1)[found]], left_rows[found]
        rows[new_rows] = wanted[new_rows, parents] - columns[parents]
        left_rows = left_rows[~found]
    exponents: Labels = 2 * (rows[:, None] + columns[None, :])
    return exponents


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


def _balance(forward: Array, backward: Array) -> tuple[Array, Array, Array, Array]:
    """Sums and gaps (stack,), scales x (stack, rows) and y (stack, columns) of connected pairs."""
    if forward.shape[1] > forward.shape[2]:  # Equations are solved for the shorter side.
        values, gaps, y, x = _balance(forward.transpose(0, 2, 1), backward.transpose(0, 2, 1))
        return values, gaps, x, y
    forward, backward = np.ascontiguousarray(forward), np.ascontiguousarray(backward)
    x, y = _sweep_scales(forward, backward)
    values, gaps = np.full(len(x), np.inf), np.full(len(x), np.inf)
    rows, columns = x.copy(), y.copy()  # With the smallest gaps up to now.
    active, waiting = np.arange(len(x)), np.zeros(len(x), dtype=int)
    for _ in range(_STEPS):
        terms = _Terms(forward[active], backward[active], x[active], y[active])
        steps, bounds = terms.newton()
        better = (bounds < 0.5 * gaps[active]) | np.isinf(gaps[active])
        kept = active[better]
        values[kept], gaps[kept] = terms.values[better], bounds[better]
        rows[kept], columns[kept] = terms.x[better], terms.y[better]
        waiting[active] = np.where(better, 0, waiting[active] + 1)
        # A step that is too long for a bound at all is one on the way, not one in vain.
        bounded = np.isfinite(gaps[active])
        enough = gaps[active] <= _TOLERANCE * values[active]
        going = ~(bounded & (enough | (waiting[active] >= _PATIENCE)))
        active = active[going]
        if not len(active):
            break
        x[active], y[active] = terms.take_newton_step(going, *(step[going] for step in steps))
    return values, gaps, rows, columns


def _sweep_scales(forward: Array, backward: Array) -> tuple[Array, Array]:
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

    def take_newton_step(self, which: Mask, step: Array, other: Array) -> tuple[Array, Array]:
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
