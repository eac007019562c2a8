"""Solve the equations between scales: what is left free.

What enters: unknowns with linear equations, and the scales of all tensors that can be rescaled.
What leaves: every unknown as a combination of free ones. Equal unknowns are merged first;
equations that only define a parameter's unknown are set aside; the rest is eliminated in rational
numbers; free unknowns that no visible scale shows are dropped. The order of pivots decides which
coordinates are free: parameters' unknowns are solved for first, then the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.symmetry.inference.equations import Scale, ScaleEquations, disjoint_groups

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: A sum of multiples of unknowns; `CONSTANT` stands for one.
Expression = dict[int, Fraction]
CONSTANT = -1


@dataclass(frozen=True)
class Solution:
    """Every unknown as a combination of free ones.

    Attributes:
        classes: For every unknown, the class of those equal to it.
        basis: A matrix (classes, free): the log-scale of a class is its row times the free ones.
        free: For every column, an unknown that equals it.
    """

    classes: NDArray[np.int64]
    basis: csr_array
    free: NDArray[np.int64]

    def rows(self, scales: Iterable[Scale]) -> csr_array:
        """A matrix whose rows span the scales of all entries of some tensors."""
        from scipy.sparse import csr_array, vstack

        parts: list[Any] = [csr_array((0, self.basis.shape[1]))]
        for scale in scales:
            sets = disjoint_groups(scale.terms)
            for members in sets:
                others = [t for other in sets if other is not members for t in other]
                corner = [(c, ids[(slice(0, 1),) * ids.dim()]) for c, ids in others]
                terms = [*members, *corner]
                arrays = torch.broadcast_tensors(*(ids for _, ids in terms))
                stacked = distinct(torch.stack([ids.reshape(-1) for ids in arrays], 1))
                parts.append(
                    sum(
                        (
                            self.basis[self.classes[stacked[:, i].numpy()]] * float(c)
                            for i, (c, _) in enumerate(terms)
                        ),
                        start=csr_array((len(stacked), self.basis.shape[1])),
                    )
                )
        whole: csr_array = vstack(parts).tocsr()
        return whole


def distinct(rows: Tensor) -> Tensor:
    """The different rows of a matrix of whole numbers, in no particular order."""
    if len(rows) < 2:
        return rows
    keys = np.zeros(len(rows), np.uint64)
    for column in rows.numpy().astype(np.uint64).T:  # One number per row, far apart by chance.
        keys = (keys ^ (keys >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) + column
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    chosen: Tensor = rows[torch.from_numpy(first)]
    if torch.equal(chosen[torch.from_numpy(place)], rows):
        return chosen
    exact: Tensor = rows.unique(dim=0)
    return exact


def solve(equations: ScaleEquations, visible: Iterable[Scale]) -> Solution:
    """Solve equations, in as few free unknowns as the visible scales have dimensions."""
    from scipy.sparse import csr_array

    classes, pinned, rows = _merge(equations)
    count = int(classes.max()) + 1
    kinds = np.zeros(count, bool)  # Whether a class has an activation among its members.
    activation = np.repeat(
        ~np.array(equations.parameters), np.diff([*equations.starts, equations.count])
    )
    np.logical_or.at(kinds, classes, activation)
    rest, peeled = _peel(rows, ~kinds)
    expressions = eliminate(_different(rest), lambda i: (not kinds[i], i))
    solved = {*expressions, *(int(i) for _, pivots, _ in peeled for i in pivots)}
    bound = np.zeros(count, bool)
    bound[list(solved)] = True
    bound[pinned] = True
    free = np.flatnonzero(~bound)
    column = np.full(count, -1)
    column[free] = np.arange(len(free))
    entries = [(k, int(column[i]), float(v)) for k, e in expressions.items() for i, v in e.items()]
    entries += [(int(i), j, 1.0) for j, i in enumerate(free)]
    where = np.array([(k, j) for k, j, _ in entries], dtype=np.int64).reshape(-1, 2)
    values = np.array([v for _, _, v in entries])
    basis = csr_array((values, (where[:, 0], where[:, 1])), shape=(count, len(free)))
    for matrix, pivots, weights in reversed(peeled):
        placed = csr_array(
            (-1 / weights, (pivots, np.arange(len(pivots)))), shape=(count, len(pivots))
        )
        basis = (basis + placed @ (matrix @ basis)).tocsr()
    first = np.full(count, equations.count)
    np.minimum.at(first, classes, np.where(activation, np.arange(equations.count), equations.count))
    fallback = np.full(count, equations.count)
    np.minimum.at(fallback, classes, np.arange(equations.count))
    origin = np.where(first < equations.count, first, fallback)[free]
    whole = Solution(classes, basis, origin)
    kept = _independent(whole.rows(visible))
    kept = kept[np.argsort(origin[kept])]
    return Solution(classes, basis.tocsc()[:, kept].tocsr(), origin[kept])


def _merge(equations: ScaleEquations) -> tuple[NDArray[np.int64], NDArray[np.int64], csr_array]:
    """Merge equal unknowns, drop those that are zero, and give the sums that remain."""
    from scipy.sparse import coo_array, csr_array
    from scipy.sparse.csgraph import connected_components

    pairs = [torch.stack([a.reshape(-1), b.reshape(-1)], 1) for a, b in equations.equalities]
    edges = torch.cat([torch.zeros(0, 2, dtype=torch.long), *pairs]).numpy()
    zeros = torch.cat([torch.zeros(1, dtype=torch.long), *(z.reshape(-1) for z in equations.zeros)])
    left, right, values = _triplets(equations)
    count = int(left.max()) + 1 if len(left) else 0
    while True:
        graph = coo_array(
            (np.ones(len(edges)), (edges[:, 0], edges[:, 1])),
            shape=(equations.count, equations.count),
        )
        classes = connected_components(graph, directed=False)[1].astype(np.int64)
        pinned = np.unique(classes[zeros.numpy()])
        size = int(classes.max()) + 1
        rows = csr_array((values, (left, classes[right])), shape=(count, size))
        keep = np.ones(size)
        keep[pinned] = 0
        rows = csr_array(rows * keep[None, :])
        rows.data[np.abs(rows.data) < 1e-9] = 0
        rows.eliminate_zeros()
        lengths = np.diff(rows.indptr)
        lone = rows.indices[rows.indptr[:-1][lengths == 1]]
        starts = rows.indptr[:-1][lengths == 2]
        opposite = starts[np.abs(rows.data[starts] + rows.data[starts + 1]) < 1e-9]
        if not len(lone) and not len(opposite):
            return classes, pinned, rows[lengths > 0]
        member = np.zeros(size, dtype=np.int64)
        member[classes] = np.arange(equations.count)
        zeros = torch.cat([zeros, torch.from_numpy(member[lone])])
        twins = np.stack([member[rows.indices[opposite]], member[rows.indices[opposite + 1]]], 1)
        edges = np.concatenate([edges, twins])


def _triplets(
    equations: ScaleEquations,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """All sums as (equation, unknown, coefficient), each distinct equation once."""
    left, right, values, done = [], [], [], 0
    for rows, coefficients in equations.sums:
        different = distinct(rows)
        count, terms = different.shape
        left.append(np.repeat(np.arange(done, done + count), terms))
        right.append(different.reshape(-1).numpy())
        values.append(np.tile([float(c) for c in coefficients], count))
        done += count
    if not left:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    return np.concatenate(left), np.concatenate(right), np.concatenate(values)


def _peel(
    rows: csr_array, parameter: NDArray[np.bool_]
) -> tuple[csr_array, list[tuple[csr_array, NDArray[np.int64], NDArray[np.float64]]]]:
    """Set aside equations (and pivots, coefficients) that only define a parameter's unknown."""
    peeled = []
    while rows.shape[0]:
        columns = rows.tocsc()
        uses = np.diff(columns.indptr)
        once = np.flatnonzero((uses == 1) & parameter)
        if not len(once):
            break
        where = columns.indices[columns.indptr[once]]
        _, picked = np.unique(where, return_index=True)  # One unknown per equation.
        pivots, lines = once[picked], where[picked]
        weights = columns.data[columns.indptr[pivots]]
        keep = np.ones(rows.shape[1])
        keep[pivots] = 0
        defining = (rows[lines] * keep[None, :]).tocsr()
        defining.eliminate_zeros()
        peeled.append((defining, pivots, weights))
        others = np.ones(rows.shape[0], bool)
        others[lines] = False
        rows = rows[others]
    return rows, peeled


def eliminate(
    rows: Any, prefer: Callable[[int], Any], right: NDArray[np.float64] | None = None
) -> dict[int, Expression]:
    """Solve equations in rational numbers, each for its unknown of largest preference."""
    solved: dict[int, Expression] = {}
    users: dict[int, set[int]] = {}
    unknowns = len(np.unique(rows.indices))
    for line, (start, end) in enumerate(zip(rows.indptr[:-1], rows.indptr[1:], strict=True)):
        if len(solved) == unknowns:
            break  # What is left follows.
        equation = {CONSTANT: Fraction(0 if right is None else -float(right[line]))}
        for index, value in zip(rows.indices[start:end], rows.data[start:end], strict=True):
            coefficient = Fraction(float(value)).limit_denominator(10**6)
            for other, share in solved.get(int(index), {int(index): Fraction(1)}).items():
                equation[other] = equation.get(other, Fraction(0)) + coefficient * share
        equation = {i: c for i, c in equation.items() if c}
        if not equation.keys() - {CONSTANT}:
            continue
        pivot = max(equation.keys() - {CONSTANT}, key=prefer)
        scale = -equation.pop(pivot)
        expression = {i: c / scale for i, c in equation.items()}
        for other in users.pop(pivot, set()):  # It is no longer free where it was used.
            share = solved[other].pop(pivot)
            for i, c in expression.items():
                total = solved[other].get(i, Fraction(0)) + share * c
                if total:
                    solved[other][i] = total
                    users.setdefault(i, set()).add(other)
                else:
                    solved[other].pop(i, None)
                    users.get(i, set()).discard(other)
        solved[pivot] = expression
        for i in expression:
            users.setdefault(i, set()).add(pivot)
    return solved


def _different(rows: csr_array) -> csr_array:
    """The different rows of a sparse matrix."""
    lengths = np.diff(rows.indptr)
    kept = []
    for length in np.unique(lengths[lengths > 0]):
        same = np.flatnonzero(lengths == length)
        places = rows.indptr[same][:, None] + np.arange(length)[None, :]
        numbers = np.concatenate(
            [same[:, None], rows.indices[places], np.round(rows.data[places] * 2**20)], 1
        ).astype(np.int64)
        ordered = numbers[np.lexsort(numbers[:, 1:].T[::-1])]
        new = np.ones(len(ordered), bool)
        new[1:] = (ordered[1:, 1:] != ordered[:-1, 1:]).any(1)
        kept.append(ordered[new, 0])
    if not kept:
        return rows[:0]
    return rows[np.sort(np.concatenate(kept))]


def _independent(rows: csr_array) -> NDArray[np.int64]:
    """A largest set of columns that are linearly independent on some rows."""
    found = np.zeros(rows.shape[1], bool)
    while rows.shape[0]:
        rows.data[np.abs(rows.data) < 1e-9] = 0
        rows.eliminate_zeros()
        lengths = np.diff(rows.indptr)
        lone = np.unique(rows.indices[rows.indptr[:-1][lengths == 1]])
        if not len(lone):
            break
        found[lone] = True
        rows = (rows[lengths > 0] * (~found)[None, :].astype(float)).tocsr()
    # What no row shows alone is found by elimination: its pivots are independent.
    pivots = eliminate(_different(rows), lambda i: i)
    found[list(pivots)] = True
    return np.flatnonzero(found)
