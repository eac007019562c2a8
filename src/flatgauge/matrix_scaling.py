"""The smallest Σ A_ij x_i y_j + B_ij / (x_i y_j) over scales of rows and columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatgauge.osborne import PROMISED, Array, balance

Mask = npt.NDArray[np.bool_]
Labels = npt.NDArray[np.int_]

#: Below this many entries, components are looked for without a try for a single one.
_SMALL = 10_000


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


def smallest_sum(forward: Array, backward: Array) -> Scaling:
    r"""Minimise a sum over positive scales of rows and of columns.

    Definition:
        .. math:: \inf_{x, y > 0} \sum_{ij} A_{ij} x_i y_j + \frac{B_{ij}}{x_i y_j}

        The infimum need not be attained: terms between different strongly connected components
        of the graph row i -> column j (where A > 0), column j -> row i (where B > 0) can be
        driven to zero together, and are left out. Within a component it is attained.

    Multiplying A_ij by 4^-(a_i + b_j) and B_ij by 4^(a_i + b_j), for whole numbers a and b, gives
    the same value bit for bit, and multiplies the products exactly.

    Args:
        forward: A, nowhere negative: (rows, columns), or (groups, rows, columns) for a sum of
            as many problems.
        backward: B, of the same shape.

    Returns:
        The value with its gap.

    Raises:
        ValueError: If the shapes differ, or an entry is negative or not finite.

    Example:
        One entry costs 2 √(A B); here only the two entries on the diagonal lie on a cycle.

        >>> one, other = np.array([[1.0, 5.0], [0.0, 1.0]]), np.array([[4.0, 0.0], [0.0, 9.0]])
        >>> smallest_sum(one, other).value
        10.0
    """
    forward, backward = _checked(forward), _checked(backward)
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
        values, gaps, products[where] = _solved(ahead[where], back[where])
        value, gap = value + values, gap + gaps
    return Scaling(value, gap, products.reshape(shape), gap <= PROMISED * value)


def _checked(matrix: Array) -> Array:
    """Refuse what is no matrix of non-negative numbers."""
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
    if groups == 1 and ahead.size > _SMALL:
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
    """One component beside single nodes, if that is what there is: cheaper than a graph."""
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


def _solved(forward: Array, backward: Array) -> tuple[float, float, Array]:
    """The sums, gaps and products of a stack of connected pairs."""
    exponents = np.stack([_exponents(a, b) for a, b in zip(forward, backward, strict=True)])
    found = balance(np.ldexp(forward, exponents), np.ldexp(backward, -exponents))
    products = found.rows[:, :, None] * found.columns[:, None, :]
    return float(found.values.sum()), float(found.gaps.sum()), np.ldexp(products, exponents)


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
