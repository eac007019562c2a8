"""Skeletons: one edge out of and one edge into every hidden unit, of which its routes are made.

In: a gauge group and the weights of a network. Out, in this order:

1. `strongest_paths`: for every unit the path of largest value in and the one out, by dynamic
   programming. Rescaling multiplies all candidates of a unit by the same factor, so the choice
   does not depend on how the network is written. The balanced form starts from it, too.
2. `Skeleton`: the edges chosen, by `strongest_skeleton` or as in the paper by `diagonal_skeleton`.
3. `Routes`: the products of weights along the routes, and which weights have a basis path.

A route out of a unit must begin after everything that enters the unit, and a route into it must
end before anything reads it (`Turns`). Then ops follow one another along every route, which makes
it a path of the network without circles. On a chain of layers this excludes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.incidence import NO_UNIT, Floats, Integers, Mask, incidence

if TYPE_CHECKING:
    from flatgauge.symmetry.basis_paths import WeightEdges

#: The numbers of the first and the last op that reads a parameter.
Times = tuple[int, int]

#: The exponent of zero.
_LOWEST = -(2**60)


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


@dataclass(frozen=True)
class Routes:
    """What the routes of a skeleton make of every unit; the last entry is for inputs and outputs.

    The root of a unit is the coordinate (place among `places`) of the last edge on its route in
    that is not free; `NO_UNIT` for units that are not kept.
    """

    outward: Floats  #: R: the product of the weights from the unit to an output.
    inward: Floats  #: P: the product of the weights from an input or a bias to the unit.
    kept: Mask  #: Whether neither of them is zero, for this unit and all others on its routes.
    places: Integers  #: Which weights have a basis path: all between kept units except free ones.
    root_of: Integers


def follow_routes(edges: WeightEdges, skeleton: Skeleton) -> Routes:
    """Follow all routes of a skeleton; values that leave the range of numbers count as zero."""
    count = len(skeleton.leaving)
    outward, inward = np.zeros((2, count + 1))
    outward[NO_UNIT] = inward[NO_UNIT] = 1.0
    with np.errstate(all="ignore"):
        for unit in skeleton.outward.tolist():
            place = skeleton.leaving[unit]
            if place != NO_UNIT:
                outward[unit] = edges.weights[place] * outward[edges.heads[place]]
        for unit in skeleton.inward.tolist():
            place = skeleton.entering[unit]
            if place != NO_UNIT:
                inward[unit] = inward[edges.tails[place]] * edges.weights[place]
        through = outward * inward
    kept = np.isfinite(through) & (through != 0)
    ahead, behind = edges.heads[skeleton.leaving], edges.tails[skeleton.entering]
    while (lost := kept[:-1] & ~(kept[ahead] & kept[behind])).any():
        kept[:-1] &= ~lost
    moving = kept[edges.heads] & kept[edges.tails] & edges.in_use
    moving[skeleton.leaving[kept[:-1]]] = False
    places = np.flatnonzero(moving)
    coordinate = np.full(edges.weights.size, NO_UNIT)
    coordinate[places] = np.arange(len(places))
    root_of = np.full(count + 1, NO_UNIT)
    for unit in skeleton.inward[kept[skeleton.inward]].tolist():
        place = skeleton.entering[unit]
        own = coordinate[place]
        root_of[unit] = root_of[edges.tails[place]] if own == NO_UNIT else own
    return Routes(outward, inward, kept, places, root_of)
