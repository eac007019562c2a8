"""Solve the equations between scales: what is left free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.symmetry.scale import Scale, groups
from flatgauge.symmetry.system import System

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Expression = dict[int, Fraction]


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
        """The combinations of free unknowns that appear in some tensors' scales.

        Args:
            scales: Of the tensors.

        Returns:
            A matrix whose rows span those of all entries.
        """
        from scipy.sparse import csr_array, vstack

        parts: list[Any] = [csr_array((0, self.basis.shape[1]))]
        for scale in scales:
            sets = groups(scale.terms)
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


def solve(system: System, visible: Iterable[Scale]) -> Solution:
    """Solve a system for its unknowns.

    Args:
        system: Unknowns and equations.
        visible: The scales of all tensors that can be rescaled; free unknowns that show in none
            of them are dropped.

    Returns:
        The solution, in as few free unknowns as the visible scales have dimensions.
    """
    from scipy.sparse import csr_array

    classes, pinned, rows = _merged(system)
    count = int(classes.max()) + 1
    kinds = np.zeros(count, bool)  # Whether a class has an activation among its members.
    activation = np.repeat(~np.array(system.parameters), np.diff([*system.starts, system.count]))
    np.logical_or.at(kinds, classes, activation)
    rest, peeled = _peel(rows, ~kinds)
    expressions = _eliminate(_different(rest), kinds)
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
    first = np.full(count, system.count)
    np.minimum.at(first, classes, np.where(activation, np.arange(system.count), system.count))
    fallback = np.full(count, system.count)
    np.minimum.at(fallback, classes, np.arange(system.count))
    origin = np.where(first < system.count, first, fallback)[free]
    whole = Solution(classes, basis, origin)
    kept = _independent(whole.rows(visible))
    kept = kept[np.argsort(origin[kept])]
    return Solution(classes, basis.tocsc()[:, kept].tocsr(), origin[kept])


def _merged(system: System) -> tuple[NDArray[np.int64], NDArray[np.int64], csr_array]:
    """Merge equal unknowns, drop those that are zero, and give the sums that remain."""
    from scipy.sparse import coo_array, csr_array
    from scipy.sparse.csgraph import connected_components

    pairs = [torch.stack([a.reshape(-1), b.reshape(-1)], 1) for a, b in system.equalities]
    edges = torch.cat([torch.zeros(0, 2, dtype=torch.long), *pairs]).numpy()
    zeros = torch.cat([torch.zeros(1, dtype=torch.long), *(z.reshape(-1) for z in system.zeros)])
    left, right, values = _triplets(system)
    count = int(left.max()) + 1 if len(left) else 0
    while True:
        graph = coo_array(
            (np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(system.count, system.count)
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
        member[classes] = np.arange(system.count)
        zeros = torch.cat([zeros, torch.from_numpy(member[lone])])
        twins = np.stack([member[rows.indices[opposite]], member[rows.indices[opposite + 1]]], 1)
        edges = np.concatenate([edges, twins])


def _triplets(
    system: System,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """All sums as (equation, unknown, coefficient), each distinct equation once."""
    left, right, values, done = [], [], [], 0
    for rows, coefficients in system.sums:
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
    """Set aside equations that only define a parameter's unknown, again and again.

    Returns:
        The remaining equations, and those set aside in turn: equations without the unknown
        they define, these unknowns, and their coefficients.
    """
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


def _eliminate(rows: csr_array, activation: NDArray[np.bool_]) -> dict[int, Expression]:
    """Gauss-Jordan elimination; parameters' unknowns are solved for first, then the latest.

    Returns:
        For every unknown solved for, its expression in those that are not.
    """
    solved: dict[int, Expression] = {}
    users: dict[int, set[int]] = {}
    for start, end in zip(rows.indptr[:-1], rows.indptr[1:], strict=True):
        equation: Expression = {}
        for index, value in zip(rows.indices[start:end], rows.data[start:end], strict=True):
            coefficient = Fraction(float(value)).limit_denominator(10**6)
            for other, share in solved.get(int(index), {int(index): Fraction(1)}).items():
                equation[other] = equation.get(other, Fraction(0)) + coefficient * share
        equation = {i: c for i, c in equation.items() if c}
        if not equation:
            continue
        pivot = max(equation, key=lambda i: (not activation[i], i))
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
    # What no row shows alone is told apart by elimination: its pivots are independent.
    pivots = _eliminate(_different(rows), np.zeros(rows.shape[1], bool))
    found[list(pivots)] = True
    return np.flatnonzero(found)
