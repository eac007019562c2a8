"""The unknown scales of a network, the equations between them, and their solution.

What enters: the shapes of parameters and activations, and what the ops demand of their scales. What
leaves: every unknown as a combination of free ones. A tensor's log scale is an array of unknowns
that broadcasts to its shape, or a sum of multiples of such arrays (`Scale`). Unknowns also stand
for *units* (channels): a weight's row, its bias and the activation that they give belong to one
unit although a batch-norm between them changes the scale; `links` records that.

To `solve`, equal unknowns are merged first; equations that only define a parameter's unknown are
set aside; the rest is eliminated in rational numbers; free unknowns that no visible scale shows are
dropped. The order of pivots decides which coordinates are free: parameters' unknowns are solved for
first, then the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: An array of unknowns, of as many axes as the tensor, of size one where it does not vary.
Ids = Tensor
Term = tuple[Fraction, Ids]

#: The unknown that is zero.
ZERO = 0

#: Most unknowns in the equations that one op adds, and in those of all ops together.
MOST_AT_ONCE, MOST = 2**19, 2**24

#: A sum of multiples of unknowns; `CONSTANT` stands for one.
Expression = dict[int, Fraction]
CONSTANT = -1

_ONE = Fraction(1)


@dataclass(frozen=True)
class Scale:
    """How much a tensor's entries grow: ``log scale = Σ coefficient · unknown[entry]``.

    A tensor of scale one everywhere (a pinned one) has no terms.
    """

    shape: tuple[int, ...]
    terms: tuple[Term, ...] = ()  #: Each broadcastable to the shape.

    @property
    def single(self) -> Ids | None:
        """The unknowns themselves, if the scale is one array of them."""
        if len(self.terms) == 1 and self.terms[0][0] == _ONE:
            return self.terms[0][1]
        return None

    def varies(self, axis: int) -> bool:
        """Whether the scale may differ along an axis."""
        return any(ids.shape[axis] > 1 for _, ids in self.terms)

    def times(self, factor: Fraction | int) -> Scale:
        """The scale of a power."""
        return Scale(self.shape, tuple((factor * c, ids) for c, ids in self.terms if factor))

    def apply(self, shape: Sequence[int], change: Callable[[Ids], Ids]) -> Scale:
        """Change every array of unknowns as it stands, size-one axes included."""
        return Scale(tuple(shape), tuple((c, change(ids)) for c, ids in self.terms))

    def move(self, shape: Sequence[int], change: Callable[[Ids], Ids]) -> Scale:
        """Move the entries' scales as an op (which is run on full arrays) moves the entries."""
        return self.apply(shape, lambda ids: squeeze(change(ids.expand(self.shape).contiguous())))

    def take(self, axis: int, index: slice) -> Scale:
        """The part of the entries in a slice along an axis."""
        size = len(range(*index.indices(self.shape[axis])))
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        where = (slice(None),) * axis + (index,)
        return self.apply(shape, lambda ids: ids[where] if ids.shape[axis] > 1 else ids)

    def lift(self, dims: int) -> Scale:
        """The same with axes of size one in front, up to a number of axes."""
        extra = (1,) * (dims - len(self.shape))
        return self.apply((*extra, *self.shape), lambda ids: ids.reshape((*extra, *ids.shape)))


def constant(shape: Sequence[int]) -> Scale:
    """The scale of a tensor that does not change."""
    return Scale(tuple(shape))


def product(*scales: Scale) -> Scale:
    """The scale of an elementwise product, with broadcasting."""
    shape = torch.broadcast_shapes(*(scale.shape for scale in scales))
    return Scale(tuple(shape), tuple(t for s in scales for t in s.lift(len(shape)).terms))


def squeeze(ids: Ids) -> Ids:
    """An array of unknowns with size one along every axis on which it does not vary."""
    for axis in range(ids.dim()):
        if ids.shape[axis] > 1:
            first = ids.narrow(axis, 0, 1)
            if bool((ids == first).all()):
                ids = first
    return ids.contiguous()


def align_terms(scales: Sequence[Scale]) -> list[tuple[Fraction, list[Ids]]]:
    """Line up the terms of several tensors by coefficient; `ZERO` where one has no such term."""
    aligned: list[tuple[Fraction, list[Ids]]] = []
    rest = [list(scale.terms) for scale in scales]
    while any(rest):
        coefficient = next(terms[0][0] for terms in rest if terms)
        row = []
        for scale, terms in zip(scales, rest, strict=True):
            found = next((t for t in terms if t[0] == coefficient), None)
            if found is None:
                row.append(torch.full((1,) * len(scale.shape), ZERO))
            else:
                terms[:] = [t for t in terms if t is not found]
                row.append(found[1])
        aligned.append((coefficient, row))
    return aligned


def disjoint_groups(terms: Iterable[Term]) -> list[list[Term]]:
    """Split terms into sets that vary along disjoint axes; constant ones join the first set."""
    sets: list[tuple[set[int], list[Term]]] = []
    constants: list[Term] = []
    for term in terms:
        axes, members = set(_varying_axes(term[1])), [term]
        if not axes:
            constants.append(term)
            continue
        for other in [s for s in sets if s[0] & axes]:
            axes |= other[0]
            members = other[1] + members
            sets.remove(other)
        sets.append((axes, members))
    if not sets:
        return [constants] if constants else []
    sets[0][1].extend(constants)
    return [members for _, members in sets]


class TooManyScalesError(Exception):
    """An op relates more scales, `count` of them, than are tracked."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


@dataclass
class ScaleEquations:
    """Unknowns, numbered from one, and what is known of them; unknown zero is zero."""

    count: int = 1  #: How many unknowns there are, with the zero.
    size: int = 0  #: How many unknowns the equations hold.
    sites: list[str] = field(default_factory=lambda: [""])  #: Where unknowns came from, in order.
    #: Whether a site's unknowns belong to a parameter rather than an activation, and the first.
    parameters: list[bool] = field(default_factory=lambda: [True])
    starts: list[int] = field(default_factory=lambda: [0])
    equalities: list[tuple[Ids, Ids]] = field(default_factory=list)
    zeros: list[Ids] = field(default_factory=list)
    #: Arrays (equations, terms) of unknowns with coefficients, whose sums are zero.
    sums: list[tuple[Ids, tuple[Fraction, ...]]] = field(default_factory=list)
    links: list[tuple[Ids, Ids]] = field(default_factory=list)  #: Those of the same units.
    read: list[Ids] = field(default_factory=list)  #: Those that an op reads without any demand.

    def copy(self) -> ScaleEquations:
        """The same unknowns and equations, to add others to."""
        lists = (list(getattr(self, f.name)) for f in fields(self)[2:])
        return ScaleEquations(self.count, self.size, *lists)

    def fresh(self, shape: Sequence[int], site: str, *, parameter: bool = False) -> Ids:
        """An array of new unknowns; those of parameters are solved for first."""
        size = torch.Size(shape).numel()
        ids = torch.arange(self.count, self.count + size).reshape(tuple(shape))
        self.sites.append(site)
        self.parameters.append(parameter)
        self.starts.append(self.count)
        self.count += size
        return ids

    def sum_to_zero(self, terms: Sequence[Term]) -> None:
        """State that a sum of terms is zero at every entry."""
        sets = disjoint_groups(terms)
        if len(sets) == 1:
            self._add_rows(sets[0])
            return
        # Terms of different axes can only cancel if each set is constant.
        constants = [self.fresh((), "", parameter=True) for _ in sets]
        for members, value in zip(sets, constants, strict=True):
            dims = members[0][1].dim()
            self._add_rows([*members, (-_ONE, value.reshape((1,) * dims))])
        if constants:
            self._add_rows([(_ONE, value) for value in constants])

    def pin(self, scale: Scale) -> None:
        """State that a tensor cannot be scaled."""
        try:
            self.sum_to_zero(scale.terms)
        except TooManyScalesError:  # No unknown of it moves then, which takes no equations.
            self.zeros += [ids.reshape(-1) for _, ids in scale.terms]

    def mark_read(self, scale: Scale) -> None:
        """State that a tensor is read by an op that no positive scale changes."""
        self.read += [ids for _, ids in scale.terms]

    def equal(self, left: Scale, right: Scale) -> None:
        """State that two tensors have equal scales, entry by entry, and the same units."""
        dims = max(len(left.shape), len(right.shape))
        left, right = left.lift(dims), right.lift(dims)
        self.sum_to_zero([*left.terms, *right.times(-1).terms])
        self.same_units(left, right)

    def same_units(self, left: Scale, right: Scale) -> None:
        """State that entries of two tensors belong to the same units."""
        for _, one in left.terms:
            for _, other in right.terms:
                if _varying_axes(one) == _varying_axes(other):
                    self.links.append((one, other))

    def constant_along(self, scale: Scale, axes: Sequence[int]) -> Scale:
        """State that a scale is constant along some axes; these have size one in the result."""
        for axis in sorted(a % len(scale.shape) for a in axes):
            varying = [t for t in scale.terms if t[1].shape[axis] > 1]
            first = [(c, ids.narrow(axis, 0, 1)) for c, ids in varying]
            if varying:
                self.sum_to_zero([*varying, *((-c, ids) for c, ids in first)])
            rest = [t for t in scale.terms if t[1].shape[axis] == 1]
            shape = (*scale.shape[:axis], 1, *scale.shape[axis + 1 :])
            scale = Scale(shape, (*rest, *first))
        return scale

    def name_sums(self, scale: Scale, site: str) -> Scale:
        """Replace the sums in a scale by new unknowns, one term per independent set of axes."""
        lone = scale.single
        if not scale.terms or (lone is not None and not self._of_parameters(lone)):
            return scale
        terms: list[Term] = []
        for members in disjoint_groups(scale.terms):
            shape = torch.broadcast_shapes(*(ids.shape for _, ids in members))
            named = self.fresh(shape, site)
            self._add_rows([*members, (-_ONE, named)])
            if lone is not None:
                self.links.append((lone, named))
            terms.append((_ONE, named))
        return Scale(scale.shape, tuple(terms))

    def pinned_units(self, scale: Scale, site: str) -> Scale:
        """The scale of an op's output that cannot be scaled but keeps the units of its input."""
        ids = scale.single
        if ids is None:
            return Scale(scale.shape)
        mine = self.fresh(ids.shape, site)
        self.zeros.append(mine)
        self.links.append((mine, ids))
        return Scale(scale.shape, ((_ONE, mine),))

    def _of_parameters(self, ids: Ids) -> bool:
        """Whether any of some unknowns belongs to a parameter."""
        places = torch.searchsorted(torch.tensor(self.starts), ids.unique(), right=True) - 1
        return any(self.parameters[place] for place in places.unique().tolist())

    def _add_rows(self, terms: Sequence[Term]) -> None:
        """State that terms, broadcast together, add up to zero entry by entry."""
        shape = torch.broadcast_shapes(*(ids.shape for _, ids in terms))
        if len(terms) > 1:
            count = shape.numel() * len(terms)
            if count > MOST_AT_ONCE or self.size + count > MOST:
                raise TooManyScalesError(count)
            self.size += count
        arrays = torch.broadcast_tensors(*(ids for _, ids in terms))
        coefficients = tuple(c for c, _ in terms)
        if len(terms) == 1:
            self.zeros.append(arrays[0].reshape(-1))
        elif len(terms) == 2 and sum(coefficients) == 0:
            self.equalities.append((arrays[0].reshape(-1), arrays[1].reshape(-1)))
        else:
            rows = torch.stack([ids.reshape(-1) for ids in arrays], 1)
            self.sums.append((rows, coefficients))


def _varying_axes(ids: Ids) -> list[int]:
    """The axes on which an array varies."""
    return [axis for axis, size in enumerate(ids.shape) if size > 1]


# -- what is left free -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Solution:
    """Every unknown as a combination of free ones."""

    classes: NDArray[np.int64]  #: For every unknown, the class of those equal to it.
    basis: csr_array  #: (classes, free): the log-scale of a class is its row times the free ones.
    free: NDArray[np.int64]  #: For every column, an unknown that equals it.

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
    # The first activation's unknown of a class, if it has any, else its first.
    first = np.full(count, 2 * equations.count)
    np.minimum.at(first, classes, np.arange(equations.count) + equations.count * ~activation)
    origin = first[free] % equations.count
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
    left, right, values, done = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)], 0
    for rows, coefficients in equations.sums:
        different = distinct(rows)
        count, terms = different.shape
        left.append(np.repeat(np.arange(done, done + count), terms))
        right.append(different.reshape(-1).numpy())
        values.append(np.tile([float(c) for c in coefficients], count))
        done += count
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
