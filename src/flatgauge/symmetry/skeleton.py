"""The strongest skeleton: for every unit the path of largest value in, and the one out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.pattern import NOTHING, Floats, Integers, Pattern, pattern_of

#: The numbers of the first and the last op that reads a parameter.
Times = tuple[int, int]

#: The exponent of zero.
_LOWEST = -(2**60)


@dataclass(frozen=True)
class Values:
    """Values of paths, positive or zero, that may leave the range of floating point.

    Attributes:
        mantissas: Between a half and one, or zero.
        exponents: Of two.
        lengths: How many weights each path has.
    """

    mantissas: Floats
    exponents: Integers
    lengths: Integers

    @property
    def zero(self) -> NDArray[np.bool_]:
        """Which of them are zero."""
        return np.equal(self.mantissas, 0)


@dataclass(frozen=True)
class Edge:
    """One weight among all: the tensor and the flat index of an entry of it."""

    name: str
    index: int


@dataclass(frozen=True)
class Skeleton:
    """The strongest paths of a network, in units of its gauge group.

    Attributes:
        outward: R: for every unit, the largest product of |weights| along a path to an output.
        inward: P: the largest along a path from an input or a bias.
        leaving: The first edge of that path out, None where there is none.
        entering: The last edge of that path in, None where there is none.
        ties: Units whose strongest edge is not the only one.
        irregular: Tensors whose entries are no edges from unit to unit.
    """

    outward: Values
    inward: Values
    leaving: list[Edge | None]
    entering: list[Edge | None]
    ties: tuple[int, ...]
    irregular: tuple[str, ...]


@dataclass(frozen=True)
class Turns:
    """When units are used, as numbers of ops.

    Attributes:
        entered: When something last enters every unit.
        read: When every unit is first read.
    """

    entered: Integers
    read: Integers

    def leads_on(self, tails: Integers, time: Times) -> NDArray[np.bool_]:
        """Whether routes out of units may begin with an edge of a time."""
        return time[1] > np.append(self.entered, -1)[tails]

    def leads_in(self, heads: Integers, time: Times) -> NDArray[np.bool_]:
        """Whether routes into units may end with an edge of a time."""
        return time[0] < np.append(self.read, np.iinfo(np.int64).max)[heads]


@dataclass(frozen=True)
class _Layer:
    """A tensor as edges: the largest |weight| between units, which entry it is, and its time."""

    pattern: Pattern
    strengths: Floats
    places: Integers
    heads: Integers
    tails: Integers
    time: Times


@dataclass(frozen=True)
class _Directed:
    """A tensor in the direction of a pass: the end whose units look for an edge, and the other.

    Attributes:
        layer: The tensor.
        here: The units that look.
        there: Those at the other end.
        allowed: Which of those that look may take an edge of it.
    """

    layer: _Layer
    here: Integers
    there: Integers
    allowed: NDArray[np.bool_]


@dataclass(frozen=True)
class _Candidates:
    """For every unit at one end of a tensor, its strongest edge there.

    Attributes:
        name: Of the tensor.
        units: The units.
        mantissas: Of the value of the path that begins with the edge.
        exponents: Of the same.
        lengths: How many weights that path has.
        places: Flat indices of the edges.
        tied: Whether another edge there is as strong.
    """

    name: str
    units: Integers
    mantissas: Floats
    exponents: Integers
    lengths: Integers
    places: Integers
    tied: NDArray[np.bool_]


def strongest(gauge: GaugeGroup, state: Mapping[str, Tensor]) -> Skeleton:
    """Find the strongest skeleton by two passes of dynamic programming.

    Rescaling multiplies all candidates of a unit by the same factor, so the choice does not
    depend on how the network is written.

    Args:
        gauge: The network's gauge group.
        state: Its parameters, by name.

    Returns:
        The skeleton.
    """
    layers, irregular = _layers(gauge, state)
    times = turns(gauge.dim, [(layer.heads, layer.tails, layer.time) for layer in layers])
    outward, leaving, tied_out = _relax(gauge.dim, _directed(layers, times, out=True))
    inward, entering, tied_in = _relax(gauge.dim, _directed(layers, times, out=False))
    ties = tuple(sorted(tied_out | tied_in))
    return Skeleton(outward, inward, leaving, entering, ties, irregular)


def _layers(gauge: GaugeGroup, state: Mapping[str, Tensor]) -> tuple[list[_Layer], tuple[str, ...]]:
    """All parameters that are edges, and the names of those that are not."""
    layers, irregular = [], []
    for name in gauge.names:
        if name not in state:
            continue  # A stored mean is no weight.
        pattern = pattern_of(gauge, name)
        ends = pattern.edge()
        if ends is None:
            irregular.append(name)
            continue
        weights = state[name].detach().double().abs().cpu().numpy()
        strengths, places = _largest(weights, pattern.summed)
        layers.append(_Layer(pattern, strengths, places, *ends, gauge.inference.times[name]))
    return layers, tuple(irregular)


def _largest(weights: Floats, axes: tuple[int, ...]) -> tuple[Floats, Integers]:
    """The largest entry along some axes (kept, of size one), and its flat index."""
    kept = [a for a in range(weights.ndim) if a not in axes]
    moved = weights.transpose(*kept, *axes).reshape(*(weights.shape[a] for a in kept), -1)
    index = np.arange(weights.size).reshape(weights.shape).transpose(*kept, *axes)
    index = index.reshape(moved.shape)
    best = moved.argmax(-1)[..., None]
    shape = tuple(1 if a in axes else size for a, size in enumerate(weights.shape))
    return (
        np.take_along_axis(moved, best, -1).reshape(shape),
        np.take_along_axis(index, best, -1).reshape(shape),
    )


def turns(count: int, edges: Iterable[tuple[Integers, Integers, Times]]) -> Turns:
    """When every unit is last entered and first read.

    A route out of a unit must begin after all that enters it, and a route into it must end before
    anything reads it: then ops come one after the other along every route, which makes it a path
    of the network and leads it in no circle. Where no two ops write into one unit, or read it,
    that excludes nothing. A weight that is read more than once leads out by its last reading and
    in by its first.

    Args:
        count: How many units there are.
        edges: Of every parameter, the units at its heads, those at its tails, and when it is read.

    Returns:
        The times.
    """
    entered = np.full(count + 1, -1)
    read = np.full(count + 1, np.iinfo(np.int64).max)
    for heads, tails, (first, last) in edges:
        ends = np.zeros((2, count + 1), bool)
        ends[0, heads] = ends[1, tails] = True
        entered[ends[0]] = np.maximum(entered[ends[0]], last)
        read[ends[1]] = np.minimum(read[ends[1]], first)
    return Turns(entered[:count], read[:count])


def _relax(
    count: int, rounds: list[tuple[NDArray[np.bool_], list[_Directed]]]
) -> tuple[Values, list[Edge | None], set[int]]:
    """Largest products of weights along paths, units in turn.

    Args:
        count: How many units there are.
        rounds: Whose turn it is, and the tensors to look at; what they lead to had its turn before.

    Returns:
        The products, the edge next to every unit, and the units where two edges are equal.
    """
    # The last place is that of inputs and outputs, whose value is one.
    mantissas = np.append(np.zeros(count), 0.5)
    exponents = np.append(np.zeros(count, dtype=np.int64), 1)
    lengths = np.zeros(count + 1, dtype=np.int64)
    chosen: list[Edge | None] = [None] * count
    ties: set[int] = set()
    for mine, touching in rounds:
        values = Values(mantissas, exponents, lengths)
        found = [_candidates(layer, values) for layer in touching]
        tops = np.full(count + 1, _LOWEST)
        for one in found:
            np.maximum.at(tops, one.units, one.exponents)
        best = np.zeros(count + 1)
        for one in found:
            np.maximum.at(best, one.units, _ldexp(one.mantissas, one.exponents - tops[one.units]))
        seen: set[int] = set()
        for one in found:
            sizes = _ldexp(one.mantissas, one.exponents - tops[one.units])
            for i in np.flatnonzero(mine[one.units] & (sizes > 0) & (sizes == best[one.units])):
                unit = int(one.units[i])
                if unit in seen or one.tied[i]:
                    ties.add(unit)
                if unit not in seen:
                    chosen[unit] = Edge(one.name, int(one.places[i]))
                    mantissas[unit], exponents[unit] = best[unit], tops[unit]
                    lengths[unit] = one.lengths[i]
                    seen.add(unit)
    return Values(mantissas[:count], exponents[:count], lengths[:count]), chosen, ties


def _directed(
    layers: list[_Layer], times: Turns, *, out: bool
) -> list[tuple[NDArray[np.bool_], list[_Directed]]]:
    """The units and the tensors to look at, one turn after the other."""
    order = -times.entered if out else times.read
    found: dict[int, list[_Directed]] = {}
    for layer in layers:
        here, there = (layer.tails, layer.heads) if out else (layer.heads, layer.tails)
        allowed = (times.leads_on if out else times.leads_in)(here, layer.time)
        units = np.unique(here[allowed])
        for turn in np.unique(order[units[units != NOTHING]]).tolist():
            found.setdefault(turn, []).append(_Directed(layer, here, there, allowed))
    return [(np.append(order == turn, False), found[turn]) for turn in sorted(found)]


def _candidates(directed: _Directed, values: Values) -> _Candidates:
    """For every unit at this end of a tensor, its strongest edge there."""
    layer, here, there = directed.layer, directed.here, directed.there
    fractions, powers = np.frexp(layer.strengths)
    fractions, shifts = np.frexp(fractions * values.mantissas[there])
    powers = powers + shifts + values.exponents[there]
    powers = np.where(fractions > 0, powers, _LOWEST)
    axes = tuple(a for a in range(powers.ndim) if here.shape[a] == 1 < powers.shape[a])
    kept = [a for a in range(powers.ndim) if a not in axes]

    def rows(array: Any) -> Any:
        spread = np.broadcast_to(array, powers.shape).transpose(*kept, *axes)
        return spread.reshape(here.size, -1)

    tops = rows(powers).max(1, keepdims=True)
    sizes = _ldexp(rows(fractions), rows(powers) - tops)
    best = sizes.argmax(1)[:, None]
    largest = np.take_along_axis(sizes, best, 1)
    allowed = directed.allowed.reshape(-1)
    return _Candidates(
        name=layer.pattern.name,
        units=here.reshape(-1),
        mantissas=np.where(allowed, largest[:, 0], 0.0),
        exponents=np.where(allowed, tops[:, 0], _LOWEST),
        lengths=np.take_along_axis(rows(values.lengths[there]), best, 1)[:, 0] + 1,
        places=np.take_along_axis(rows(layer.places), best, 1)[:, 0],
        tied=(sizes == largest).sum(1) > 1,
    )


def _ldexp(fractions: Floats, powers: Integers) -> Floats:
    """Multiply by powers of two, none positive: what is far below the largest is zero."""
    return np.ldexp(fractions, np.maximum(powers, -2000))
