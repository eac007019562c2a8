"""Units, the edges between them, and skeletons: one edge out of and one into every hidden unit.

In: a gauge group and the weights of a network. Out, in this order:

1. `incidence`: the exponents of the group's independent scales (the units) in every entry of a
   parameter. A weight from unit b to unit a is multiplied by c_a / c_b: it has exponent 1 at a,
   which it enters, and -1 at b, which it leaves. The exponents of a whole tensor would take
   (entries × units) numbers, so they are held in parts, each of which varies along some axes only:
   for a layer's weight, a row part and a column part.
2. `strongest_paths`: for every unit the path of largest value in and the one out, by dynamic
   programming. Rescaling multiplies all candidates of a unit by the same factor, so the choice
   does not depend on how the network is written. The balanced form starts from it, too.
3. `Skeleton`: the edges chosen, by `strongest_skeleton` or as in the paper by `diagonal_skeleton`.

A route out of a unit must begin after everything that enters the unit, and a route into it must
end before anything reads it (`Turns`). Then ops follow one another along every route, which makes
it a path of the network without circles. On a chain of layers this excludes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.inference.equations import disjoint_groups

if TYPE_CHECKING:
    from flatgauge.symmetry.paths.basis import WeightEdges

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Stands for no unit: an input, a constant, or an output.
NO_UNIT = -1

#: Up to this many entries, a tensor is looked at entry by entry.
_FEW = 256

#: Exponents below this are rounding.
_TINY = 1e-9

#: The numbers of the first and the last op that reads a parameter.
Times = tuple[int, int]

#: The exponent of zero.
_LOWEST = -(2**60)


@dataclass(frozen=True)
class Part:
    """A part of the exponents, which varies along some axes."""

    shape: tuple[int, ...]  #: Broadcasts to the incidence's.
    units: Integers  #: Coordinates of the group (slots, entries), `NO_UNIT` in empty slots.
    powers: Floats  #: Their exponents (slots, entries).

    def exponents(self, values: Floats) -> Floats:
        """Σ exponent · value of the unit for every entry, in the part's shape."""
        padded = np.append(values, 0.0)
        total: Floats = (padded[self.units] * self.powers).sum(0)
        return total.reshape(self.shape)

    def units_of_sign(self, sign: int) -> list[Integers]:
        """The units whose exponent has a sign, slot by slot, in the part's shape."""
        chosen = np.where(np.sign(self.powers) == sign, self.units, NO_UNIT)
        chosen = np.sort(chosen, axis=0)[::-1]  # Full slots first.
        return [slot.reshape(self.shape) for slot in chosen if (slot != NO_UNIT).any()]


@dataclass(frozen=True)
class Incidence:
    """The exponents of a tensor: the sum of its parts."""

    name: str
    shape: tuple[int, ...]  #: Of the tensor, with size one along axes on which no part varies.
    parts: tuple[Part, ...]

    @property
    def constant_axes(self) -> tuple[int, ...]:
        """The axes of the tensor along which no part varies."""
        return tuple(axis for axis, size in enumerate(self.shape) if size == 1)

    def exponents(self, values: Floats) -> Floats:
        """The log-scale of every entry, for given log-scales of the units."""
        total = np.zeros(())
        for part in self.parts:
            total = total + part.exponents(values)
        return np.broadcast_to(total, self.shape)

    def sums_by_unit(
        self, weights: Floats, count: int, *, sign: int = 0, square: bool = False
    ) -> Floats:
        """Σ exponent · weight by unit; `sign` selects positive (1) or |negative| (-1) exponents."""
        total = np.zeros(count + 1)
        for part in self.parts:
            axes = tuple(a for a, size in enumerate(part.shape) if size == 1 < weights.shape[a])
            flat = weights.sum(axes, keepdims=True).reshape(-1) if axes else weights.reshape(-1)
            for units, powers in zip(part.units, part.powers, strict=True):
                factors = np.maximum(sign * powers, 0) if sign else powers
                factors = factors**2 if square else factors
                places = np.where(units == NO_UNIT, count, units)
                total += np.bincount(places, flat * factors, count + 1)
        return total[:count]

    def touches(self, chosen: Mask) -> Mask:
        """Which entries are scaled by one of the chosen units."""
        padded = np.append(chosen, False)
        found = np.zeros((), bool)
        for part in self.parts:
            hit = (padded[part.units] & (part.powers != 0)).any(0)
            found = found | hit.reshape(part.shape)
        return np.broadcast_to(found, self.shape)

    def fixed_entries(self, count: int) -> Mask:
        """Which entries no unit scales, as the parts cancel: an edge from a unit to itself."""
        values = np.random.default_rng(0).uniform(1, 2, count)
        return np.abs(self.exponents(values)) < _TINY

    def edge_ends(self) -> tuple[Integers, Integers] | None:
        """Arrays of the units that entries enter and leave; None if entries are not such edges."""
        ends = []
        for sign in (1, -1):
            found = [slot for part in self.parts for slot in part.units_of_sign(sign)]
            if len(found) > 1:
                return None
            ends.append(found[0] if found else np.full((1,) * len(self.shape), NO_UNIT))
        if any((np.abs(part.powers[part.units != NO_UNIT]) != 1).any() for part in self.parts):
            return None
        return ends[0], ends[1]


def incidence(gauge: GaugeGroup, name: str) -> Incidence:
    """How the entries of a parameter, or of a stored mean, depend on the units of a group."""
    scale = gauge.inference.scales[name]
    matrices, shapes = [], []
    for members in disjoint_groups(scale.terms):
        shape = np.broadcast_shapes(*(tuple(ids.shape) for _, ids in members))
        rows: Any = 0
        for coefficient, ids in members:
            flat = ids.expand(shape).reshape(-1).numpy()
            rows = rows + gauge.basis[gauge.classes[flat]] * float(coefficient)
        matrices.append(rows.tocsr())
        shapes.append(shape)
    if len(matrices) > 1:
        # What most rows of the first matrix share belongs to the second: W[o, i] is held as
        # (z_o - x_0) + (x_0 - x_i), and means (z_o) + (-x_i).
        shared = _majority_exponents(matrices[0])
        matrices[0] = _add_to_rows(matrices[0], -shared)
        matrices[1] = _add_to_rows(matrices[1], shared)
    parts = tuple(_part(m, shape) for m, shape in zip(matrices, shapes, strict=True))
    whole = tuple(int(n) for n in np.broadcast_shapes((1,) * len(scale.shape), *shapes))
    found = Incidence(name, whole, parts)
    if len(parts) > 1 and found.edge_ends() is None and np.prod(whole) <= _FEW:
        # Between two units of one stream, most rows share nothing: only entry by entry is it
        # plain where each begins and ends.
        rows = 0
        for matrix, shape in zip(matrices, shapes, strict=True):
            places = np.arange(matrix.shape[0]).reshape(shape)
            rows = rows + matrix[np.broadcast_to(places, whole).reshape(-1)]
        by_entry = Incidence(name, whole, (_part(rows.tocsr(), whole),))
        return by_entry if by_entry.edge_ends() is not None else found
    return found


def _majority_exponents(rows: Any) -> Floats:
    """The exponents that more than half of all rows share."""
    shared = np.zeros(rows.shape[1])
    columns = rows.tocsc()
    counts = np.diff(columns.indptr)
    for column in np.flatnonzero(counts > rows.shape[0] / 2):
        data = columns.data[columns.indptr[column] : columns.indptr[column + 1]]
        values, times = np.unique(np.round(data, 9), return_counts=True)
        if times.max() > rows.shape[0] / 2:
            shared[column] = values[times.argmax()]
    return shared


def _add_to_rows(rows: Any, shift: Floats) -> Any:
    """Sparse rows with the same exponents added to each."""
    from scipy.sparse import csr_array

    columns = np.flatnonzero(shift)
    if not len(columns):
        return rows
    count = rows.shape[0]
    places = np.repeat(np.arange(count), len(columns)), np.tile(columns, count)
    added = csr_array((np.tile(shift[columns], count), places), shape=rows.shape)
    return without_tiny((rows + added).tocsr(), _TINY)


def without_tiny(rows: Any, limit: float) -> Any:
    """Remove entries below a limit from sparse rows, and sort the others, in place."""
    rows.data[np.abs(rows.data) < limit] = 0
    rows.eliminate_zeros()
    rows.sort_indices()
    return rows


def _part(rows: Any, shape: tuple[int, ...]) -> Part:
    """Sparse rows as slots."""
    rows = without_tiny(rows, _TINY)
    lengths = np.diff(rows.indptr)
    slots = int(lengths.max(initial=0))
    units = np.full((slots, rows.shape[0]), NO_UNIT, dtype=np.int64)
    powers = np.zeros((slots, rows.shape[0]))
    for slot in range(slots):
        full = np.flatnonzero(lengths > slot)
        units[slot, full] = rows.indices[rows.indptr[full] + slot]
        powers[slot, full] = rows.data[rows.indptr[full] + slot]
    return Part(tuple(int(n) for n in shape), units, powers)


def unit_names(gauge: GaugeGroup) -> list[str]:
    """A name for every unit of a gauge group: where it is, and its number there."""
    numbers: dict[str, Any] = defaultdict(count)
    return [f"{site}[{next(numbers[site])}]" for site in gauge.sites]


# -- the strongest paths ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Edge:
    """One weight among all: the tensor and the flat index of an entry of it."""

    name: str
    index: int


@dataclass(frozen=True)
class Turns:
    """When units are used, as numbers of ops: when last entered, and when first read."""

    entered: Integers
    read: Integers

    def leads_on(self, tails: Integers, time: Times) -> Mask:
        """Whether routes out of units may begin with an edge of a time."""
        return time[1] > np.append(self.entered, -1)[tails]

    def leads_in(self, heads: Integers, time: Times) -> Mask:
        """Whether routes into units may end with an edge of a time."""
        return time[0] < np.append(self.read, np.iinfo(np.int64).max)[heads]


def _turns(count: int, edges: Iterable[tuple[Integers, Integers, Times]]) -> Turns:
    """When every unit is last entered and first read, from the heads, tails and times of edges."""
    # A weight that is read more than once leads out by its last reading and in by its first.
    entered = np.full(count + 1, -1)
    read = np.full(count + 1, np.iinfo(np.int64).max)
    for heads, tails, (first, last) in edges:
        ends = np.zeros((2, count + 1), bool)
        ends[0, heads] = ends[1, tails] = True
        entered[ends[0]] = np.maximum(entered[ends[0]], last)
        read[ends[1]] = np.minimum(read[ends[1]], first)
    return Turns(entered[:count], read[:count])


@dataclass(frozen=True)
class Values:
    """Values of paths, positive or zero, that may leave the range of floating point."""

    mantissas: Floats  #: Between a half and one, or zero.
    exponents: Integers  #: Of two.
    lengths: Integers  #: How many weights each path has.

    @property
    def zero(self) -> Mask:
        """Which of them are zero."""
        return np.equal(self.mantissas, 0)


@dataclass(frozen=True)
class StrongestPaths:
    """The strongest paths of a network, by unit of its gauge group."""

    outward: Values  #: R: the largest product of |weights| along a path from the unit to an output.
    inward: Values  #: P: the largest along a path from an input or a bias to the unit.
    leaving: list[Edge | None]  #: The first edge of that path out, None where there is none.
    entering: list[Edge | None]  #: The last edge of that path in, None where there is none.
    ties: tuple[int, ...]  #: Units whose strongest edge is not the only one.
    irregular: tuple[str, ...]  #: Tensors whose entries are not edges from unit to unit.
    turns: Turns  #: When units are used.


@dataclass(frozen=True)
class _UnitLayer:
    """A tensor as edges: the largest |weight| between units, which entry it is, and its time."""

    name: str
    strengths: Floats
    places: Integers
    heads: Integers
    tails: Integers
    time: Times


@dataclass(frozen=True)
class _Side:
    """A tensor in one pass: units `here`, where `allowed`, look for an edge to units `there`."""

    layer: _UnitLayer
    here: Integers
    there: Integers
    allowed: Mask


@dataclass(frozen=True)
class _Candidates:
    """The strongest edge of every unit at one end of a tensor: flat index, path value and ties."""

    name: str
    units: Integers
    paths: Values
    places: Integers
    tied: Mask


def strongest_paths(gauge: GaugeGroup, state: Mapping[str, Tensor]) -> StrongestPaths:
    """Find the strongest path out of and into every unit, by two passes of dynamic programming."""
    layers, irregular = [], []
    for name in gauge.names:
        if name not in state:
            continue  # A stored mean is not a weight.
        pattern = incidence(gauge, name)
        ends = pattern.edge_ends()
        if ends is None:
            irregular.append(name)
            continue
        weights = state[name].detach().double().abs().cpu().numpy()
        strengths, places = _largest(weights, pattern.constant_axes)
        layers.append(_UnitLayer(name, strengths, places, *ends, gauge.inference.times[name]))
    turns = _turns(gauge.dim, [(layer.heads, layer.tails, layer.time) for layer in layers])
    outward, leaving, tied_out = _relax(gauge.dim, _rounds(layers, turns, out=True))
    inward, entering, tied_in = _relax(gauge.dim, _rounds(layers, turns, out=False))
    ties = tuple(sorted(tied_out | tied_in))
    return StrongestPaths(outward, inward, leaving, entering, ties, tuple(irregular), turns)


def _largest(weights: Floats, axes: tuple[int, ...]) -> tuple[Floats, Integers]:
    """The largest entry along some axes (each left with size one), and its flat index."""
    others = [a for a in range(weights.ndim) if a not in axes]
    rows = weights.transpose(*others, *axes).reshape(*(weights.shape[a] for a in others), -1)
    index = np.arange(weights.size).reshape(weights.shape).transpose(*others, *axes)
    index = index.reshape(rows.shape)
    best = rows.argmax(-1)[..., None]
    shape = tuple(1 if a in axes else size for a, size in enumerate(weights.shape))
    return (
        np.take_along_axis(rows, best, -1).reshape(shape),
        np.take_along_axis(index, best, -1).reshape(shape),
    )


def _rounds(layers: list[_UnitLayer], turns: Turns, *, out: bool) -> list[tuple[Mask, list[_Side]]]:
    """The units whose turn it is and the tensors to look at, one turn after the other."""
    order = -turns.entered if out else turns.read
    found: dict[int, list[_Side]] = {}
    for layer in layers:
        here, there = (layer.tails, layer.heads) if out else (layer.heads, layer.tails)
        allowed = (turns.leads_on if out else turns.leads_in)(here, layer.time)
        units = np.unique(here[allowed])
        for turn in np.unique(order[units[units != NO_UNIT]]).tolist():
            found.setdefault(turn, []).append(_Side(layer, here, there, allowed))
    return [(np.append(order == turn, False), found[turn]) for turn in sorted(found)]


def _relax(
    count: int, rounds: list[tuple[Mask, list[_Side]]]
) -> tuple[Values, list[Edge | None], set[int]]:
    """Largest path values, every unit's edge and the ties; a round leads to earlier rounds only."""
    # The last place is that of inputs and outputs, whose value is one.
    mantissas = np.append(np.zeros(count), 0.5)
    exponents = np.append(np.zeros(count, dtype=np.int64), 1)
    lengths = np.zeros(count + 1, dtype=np.int64)
    chosen: list[Edge | None] = [None] * count
    ties: set[int] = set()
    for mine, sides in rounds:
        values = Values(mantissas, exponents, lengths)
        found = [_candidates(side, values) for side in sides]
        tops = np.full(count + 1, _LOWEST)
        for one in found:
            np.maximum.at(tops, one.units, one.paths.exponents)
        sizes = [
            _ldexp(one.paths.mantissas, one.paths.exponents - tops[one.units]) for one in found
        ]
        best = np.zeros(count + 1)
        for one, size in zip(found, sizes, strict=True):
            np.maximum.at(best, one.units, size)
        seen: set[int] = set()
        for one, size in zip(found, sizes, strict=True):
            for i in np.flatnonzero(mine[one.units] & (size > 0) & (size == best[one.units])):
                unit = int(one.units[i])
                if unit in seen or one.tied[i]:
                    ties.add(unit)
                if unit not in seen:
                    chosen[unit] = Edge(one.name, int(one.places[i]))
                    mantissas[unit], exponents[unit] = best[unit], tops[unit]
                    lengths[unit] = one.paths.lengths[i]
                    seen.add(unit)
    return Values(mantissas[:count], exponents[:count], lengths[:count]), chosen, ties


def _candidates(side: _Side, values: Values) -> _Candidates:
    """For every unit at this end of a tensor, its strongest edge there."""
    layer, here, there = side.layer, side.here, side.there
    fractions, powers = np.frexp(layer.strengths)
    fractions, shifts = np.frexp(fractions * values.mantissas[there])
    powers = powers + shifts + values.exponents[there]
    powers = np.where(fractions > 0, powers, _LOWEST)
    axes = tuple(a for a in range(powers.ndim) if here.shape[a] == 1 < powers.shape[a])
    others = [a for a in range(powers.ndim) if a not in axes]

    def rows(array: Any) -> Any:
        spread = np.broadcast_to(array, powers.shape).transpose(*others, *axes)
        return spread.reshape(here.size, -1)

    tops = rows(powers).max(1, keepdims=True)
    sizes = _ldexp(rows(fractions), rows(powers) - tops)
    best = sizes.argmax(1)[:, None]
    largest = np.take_along_axis(sizes, best, 1)
    allowed = side.allowed.reshape(-1)
    paths = Values(
        np.where(allowed, largest[:, 0], 0.0),
        np.where(allowed, tops[:, 0], _LOWEST),
        np.take_along_axis(rows(values.lengths[there]), best, 1)[:, 0] + 1,
    )
    places = np.take_along_axis(rows(layer.places), best, 1)[:, 0]
    tied = (sizes == largest).sum(1) > 1
    return _Candidates(layer.name, here.reshape(-1), paths, places, tied)


def _ldexp(fractions: Floats, powers: Integers) -> Floats:
    """Multiply by powers of two, none positive: what is far below the largest is zero."""
    return np.ldexp(fractions, np.maximum(powers, -2000))


# -- skeletons -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Skeleton:
    """The edges that routes are made of, as places among all edges; `NO_UNIT` where there is none.

    Units are in the order `outward` if the head of a leaving edge comes before its tail, and in
    the order `inward` if the tail of an entering edge comes before its head.
    """

    leaving: Integers  #: The first edge of every unit's route to an output: its free weight.
    entering: Integers  #: The last edge of every unit's route from an input or a bias.
    outward: Integers
    inward: Integers
    ties: tuple[int, ...]  #: Units for which another edge would have done as well.
    choices: Integers  #: For every unit, how many edges it was chosen from: out and in (units, 2).


def strongest_skeleton(gauge: GaugeGroup, edges: WeightEdges) -> Skeleton:
    """The edges of the strongest paths: neither rescaling nor the order of units changes them."""
    state = {
        name: torch.from_numpy(edges.part(edges.weights, name))
        for name in edges.shapes
        if name not in edges.absorbed
    }
    found = strongest_paths(gauge, state)
    leaving, entering = (
        np.array(
            [NO_UNIT if e is None else edges.starts[e.name] + e.index for e in chosen], np.int64
        )
        for chosen in (found.leaving, found.entering)
    )
    return _skeleton(edges, found.turns, leaving, entering, found.ties)


def diagonal_skeleton(gauge: GaugeGroup, edges: WeightEdges) -> Skeleton:
    """The paper's: unit i to unit i, counting around where widths differ; the middle taps."""
    # Among several tensors that read a unit (or write it), the first that leads on is taken.
    names = [name for name in edges.shapes if name not in edges.absorbed]
    times = gauge.inference.times
    ends = {
        name: (edges.part(edges.heads, name), edges.part(edges.tails, name), times[name])
        for name in names
    }
    turns = _turns(gauge.dim, ends.values())
    leaving, entering = np.full((2, gauge.dim), NO_UNIT)
    # Biases (tensors of one axis) last: they are taken only where there is nothing else.
    for name in sorted(names, key=lambda name: len(edges.shapes[name]) < 2):
        if name not in gauge.names:
            continue
        rows, columns = _rows_and_columns(gauge, edges, name)
        heads, tails, time = ends[name]
        heads, tails = heads.reshape(-1), tails.reshape(-1)
        for unit, index in _middles(tails, rows, turns.leads_on(tails, time)):
            if leaving[unit] == NO_UNIT:
                leaving[unit] = edges.starts[name] + index
        for unit, index in _middles(heads, columns, turns.leads_in(heads, time)):
            if entering[unit] == NO_UNIT:
                entering[unit] = edges.starts[name] + index
    return _skeleton(edges, turns, leaving, entering, ())


#: How skeletons are chosen, by name.
SKELETONS: dict[str, Callable[[GaugeGroup, WeightEdges], Skeleton]] = {
    "strongest": strongest_skeleton,
    "diagonal": diagonal_skeleton,
}


def _skeleton(
    edges: WeightEdges, turns: Turns, leaving: Integers, entering: Integers, ties: tuple[int, ...]
) -> Skeleton:
    """A skeleton, with the orders in which its routes are followed."""
    outward = np.argsort(-turns.entered, kind="stable")
    inward = np.argsort(turns.read, kind="stable")
    counts = [
        np.bincount(ends[(ends != NO_UNIT) & edges.in_use], minlength=len(leaving))
        for ends in (edges.tails, edges.heads)
    ]
    return Skeleton(leaving, entering, outward, inward, ties, np.stack(counts, axis=1))


def _rows_and_columns(
    gauge: GaugeGroup, edges: WeightEdges, name: str
) -> tuple[Integers, Integers]:
    """For every weight of a parameter, the number of its row and that of its column."""
    # A row is all that enters one unit (or output), a column all that leaves one unit (or input).
    shape, ends = edges.shapes[name], incidence(gauge, name).edge_ends()
    assert ends is not None
    axes = [_unit_axis(end) for end in ends]
    found = []
    for end, axis in zip(ends, axes, strict=True):
        if axis is None:  # Inputs or outputs: the other one of the first two axes.
            free = next((a for a in range(min(2, len(shape))) if a not in axes), None)
            numbers = np.arange(1 if free is None else shape[free])
            end = numbers.reshape([-1 if a == free else 1 for a in range(len(shape))])
        found.append(np.broadcast_to(end, shape).reshape(-1))
    return found[0], found[1]


def _unit_axis(end: Integers) -> int | None:
    """The first axis along which units differ; None if there are none."""
    if (end == NO_UNIT).all():
        return None
    return next((a for a, size in enumerate(end.shape) if size > 1), 0)


def _middles(units: Integers, others: Integers, allowed: Mask) -> Iterator[tuple[int, int]]:
    """For the i-th unit, the flat index of the middle weight to its i-th neighbour."""
    order = np.argsort(units, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(units[order])) + 1) if units.size else []
    groups = [group for group in groups if units[group[0]] != NO_UNIT]
    for rank, group in enumerate(sorted(groups, key=lambda group: int(group[0]))):
        free = group[allowed[group]]
        neighbours = list(dict.fromkeys(others[free].tolist()))
        if neighbours:
            taps = free[others[free] == neighbours[rank % len(neighbours)]]
            yield int(units[group[0]]), int(taps[len(taps) // 2])
