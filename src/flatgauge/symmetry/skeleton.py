"""The strongest skeleton: for every unit the path of largest value in, and the one out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.pattern import NOTHING, Floats, Integers, Pattern, pattern_of


@dataclass(frozen=True)
class Values:
    """Positive numbers (or zeros) that may leave the range of floating point.

    Attributes:
        mantissas: Between a half and one, or zero.
        exponents: Of two.
    """

    mantissas: Floats
    exponents: Integers

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
class _Layer:
    """A tensor as edges: the largest |weight| between units, and which entry it is."""

    pattern: Pattern
    strengths: Floats
    places: Integers
    heads: Integers
    tails: Integers


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
    first, last = spans(gauge)
    outward, leaving, tied_out = _relax(gauge.dim, layers, -last, outward=True)
    inward, entering, tied_in = _relax(gauge.dim, layers, first, outward=False)
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
        layers.append(_Layer(pattern, strengths, places, *ends))
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


def spans(gauge: GaugeGroup) -> tuple[Integers, Integers]:
    """When every unit is first given and last read, as numbers of ops.

    Args:
        gauge: The group.

    Returns:
        First and last use of every coordinate.
    """
    basis = gauge.basis
    lone = np.diff(basis.indptr) == 1
    unit = np.full(basis.shape[0], NOTHING)
    starts = basis.indptr[:-1][lone]
    unit[lone] = np.where(basis.data[starts] == 1, basis.indices[starts], NOTHING)
    first = np.full(gauge.dim + 1, np.iinfo(np.int64).max)
    last = np.full(gauge.dim + 1, -1)
    parameters = np.repeat(
        gauge.system.parameters, np.diff([*gauge.system.starts, gauge.system.count])
    )
    for number, (given, read) in enumerate(gauge.inference.uses):
        for target, arrays in ((first, given), (last, [*given, *read])):
            for ids in arrays:
                flat = ids.reshape(-1).numpy()
                units = unit[gauge.classes[flat[~parameters[flat]]]]
                if target is first:
                    np.minimum.at(target, units, number)
                else:
                    np.maximum.at(target, units, number)
    return first[: gauge.dim], last[: gauge.dim]


def _relax(
    count: int, layers: list[_Layer], order: Integers, *, outward: bool
) -> tuple[Values, list[Edge | None], set[int]]:
    """Largest products of weights along paths, units in turn; a path only goes back in order.

    Args:
        count: How many units there are.
        layers: The edges.
        order: When each unit's turn comes; an edge counts if its other end came strictly before.
        outward: Whether paths lead to outputs rather than from inputs.

    Returns:
        The products, the edge next to every unit, and the units where two edges are equal.
    """
    mantissas, exponents = np.zeros(count + 1), np.zeros(count + 1, dtype=np.int64)
    mantissas[count] = 0.5
    exponents[count] = 1  # Inputs and outputs have the value one.
    turns = np.append(order, np.iinfo(np.int64).min)
    chosen: list[Edge | None] = [None] * count
    ties: set[int] = set()
    for turn in np.unique(order):
        mine = np.append(order == turn, False)
        found: list[tuple[Integers, Floats, Integers, _Layer, NDArray[np.bool_]]] = []
        known = (turns < turn) & (mantissas > 0)
        if not known.any():
            continue
        top = int(exponents[known].max())
        shift = np.where(known, np.maximum(exponents - top, -2000), -3000)
        values = np.ldexp(np.where(known, mantissas, 0.0), shift)
        for layer in layers:
            here, there = (layer.tails, layer.heads) if outward else (layer.heads, layer.tails)
            if not mine[np.where(here == NOTHING, count, here)].any():
                continue
            found.append(_candidates(layer, here, values[there], count))
        if not found:
            continue
        best = np.zeros(count + 1)
        for units, strengths, _, _, _ in found:
            np.maximum.at(best, units, strengths)
        best[~mine] = 0
        seen: set[int] = set()
        for units, strengths, places, layer, tied in found:
            hit = mine[units] & (strengths > 0) & (strengths == best[units])
            for i in np.flatnonzero(hit):
                unit = int(units[i])
                if unit in seen or tied[i]:
                    ties.add(unit)
                if unit not in seen:
                    chosen[unit] = Edge(layer.pattern.name, int(places[i]))
                    seen.add(unit)
        fractions, powers = np.frexp(best)
        mantissas[mine] = fractions[mine]
        exponents[mine] = powers[mine] + top
    return Values(mantissas[:count], exponents[:count]), chosen, ties


def _candidates(
    layer: _Layer, here: Integers, values: Floats, count: int
) -> tuple[Integers, Floats, Integers, _Layer, NDArray[np.bool_]]:
    """For every unit at this end of a tensor, its strongest edge there.

    Returns:
        Units, strengths, flat indices of entries, the layer, and whether another is as strong.
    """
    products = layer.strengths * values
    axes = tuple(a for a in range(products.ndim) if here.shape[a] == 1 < products.shape[a])
    kept = [a for a in range(products.ndim) if a not in axes]
    flat = products.transpose(*kept, *axes).reshape(here.size, -1)
    places = np.broadcast_to(layer.places, products.shape).transpose(*kept, *axes)
    places = places.reshape(here.size, -1)
    best = flat.argmax(1)[:, None]
    strengths = np.take_along_axis(flat, best, 1)[:, 0]
    tied = (flat == strengths[:, None]).sum(1) > 1
    units = np.where(here == NOTHING, count, here).reshape(-1)
    return units, strengths, np.take_along_axis(places, best, 1)[:, 0], layer, tied
