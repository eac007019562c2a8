"""Incidence: which unit each entry of a parameter enters, and which one it leaves.

In: a gauge group and the name of a parameter. Out: an `Incidence`, the exponents of the group's
independent scales (the units) in every entry: a weight from unit b to unit a is multiplied by
c_a / c_b, so it has exponent 1 at a, which it enters, and -1 at b, which it leaves.

The exponents of a whole tensor would take (entries × units) numbers. They are held in parts, each
of which varies along some axes only: for a layer's weight, a row part and a column part.

`weight_edges` lines up all weights in one row: the unit that each enters (its head), the unit that
it leaves (its tail) and its value. A batch-norm with stored statistics is folded:
y = γ (x - mean) / √(variance + ε) + β is the weight γ / √(variance + ε) and the bias
β - γ mean / √(variance + ε) of every channel. One whose parameters another one reads too, or that
has no scale and shift, is left as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.symmetry.inference.equations import disjoint_groups

if TYPE_CHECKING:
    from flatgauge.symmetry.gauge import GaugeGroup
    from flatgauge.symmetry.inference.scales import StoredNorm

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Stands for no unit: an input, a constant, or an output.
NO_UNIT = -1

#: Up to this many entries, a tensor is looked at entry by entry.
_FEW = 256

#: Exponents below this are rounding.
_TINY = 1e-9


@dataclass(frozen=True)
class Part:
    """A part of the exponents, which varies along some axes.

    Attributes:
        shape: Broadcasts to the incidence's.
        units: Coordinates of the group (slots, entries), `NO_UNIT` where a slot is empty.
        powers: Their exponents (slots, entries).
    """

    shape: tuple[int, ...]
    units: Integers
    powers: Floats

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
    """The exponents of a tensor: the sum of its parts.

    Attributes:
        shape: Of the tensor, with size one along the axes on which no part varies.
    """

    name: str
    shape: tuple[int, ...]
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
        by_entry = Incidence(name, whole, (_single_part(matrices, shapes, whole),))
        return by_entry if by_entry.edge_ends() is not None else found
    return found


def _single_part(
    matrices: list[Any], shapes: list[tuple[int, ...]], whole: tuple[int, ...]
) -> Part:
    """All matrices as one part, which varies along all axes."""
    rows: Any = 0
    for matrix, shape in zip(matrices, shapes, strict=True):
        places = np.arange(matrix.shape[0]).reshape(shape)
        rows = rows + matrix[np.broadcast_to(places, whole).reshape(-1)]
    return _part(rows.tocsr(), whole)


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
    seen: Counter[str] = Counter()
    names = []
    for site in gauge.sites:
        names.append(f"{site}[{seen[site]}]")
        seen[site] += 1
    return names


# -- all weights as edges --------------------------------------------------------------------------


@dataclass(frozen=True)
class Edge:
    """One weight among all: the tensor and the flat index of an entry of it."""

    name: str
    index: int


@dataclass(frozen=True)
class FoldedNorm:
    """A folded batch-norm: β moves by `slope` times what γ moves; `spread` is √(variance + ε)."""

    weight: str
    bias: str
    slope: Floats
    spread: Floats


@dataclass(frozen=True)
class WeightEdges:
    """Every weight of a network: where it comes from, where it leads, what it is.

    Inputs, constants and outputs are not units: such an end is `NO_UNIT`.

    Attributes:
        shapes: The shapes of the parameters, in the order of the model.
        starts: Where in the row the weights of each begin.
        heads: The unit that every weight enters.
        tails: The unit that it leaves.
        weights: The weights, with batch-norms folded, in double precision.
        norms: The folded batch-norms.
        absorbed: Biases in front of a folded batch-norm, whose own bias stands for them.
    """

    shapes: dict[str, tuple[int, ...]]
    starts: dict[str, int]
    heads: Integers
    tails: Integers
    weights: Floats
    norms: tuple[FoldedNorm, ...]
    absorbed: frozenset[str]

    @cached_property
    def norm_parameters(self) -> frozenset[str]:
        """The parameters of folded batch-norms."""
        return frozenset(name for norm in self.norms for name in (norm.weight, norm.bias))

    @cached_property
    def in_use(self) -> Mask:
        """All weights but absorbed biases."""
        found = np.ones(self.weights.size, bool)
        for name in self.absorbed:
            found[self.span(name)] = False
        return found

    def span(self, name: str) -> slice:
        """Where in the row the weights of a parameter are."""
        start = self.starts[name]
        return slice(start, start + math.prod(self.shapes[name]))

    def part(self, row: NDArray[Any], name: str) -> NDArray[Any]:
        """The part of a row that belongs to a parameter, in its shape."""
        return row[self.span(name)].reshape(self.shapes[name])

    def place(self, edge: Edge) -> int:
        """Where in the row an edge is."""
        return self.starts[edge.name] + edge.index

    def edge(self, place: int) -> Edge:
        """The parameter that a place in the row belongs to, and the flat index there."""
        names, starts = list(self.starts), list(self.starts.values())
        name = names[int(np.searchsorted(starts, place, side="right")) - 1]
        return Edge(name, place - self.starts[name])

    def entry_name(self, place: int) -> str:
        """A weight as a reader would write it, such as ``0.weight[1, 2]``."""
        edge = self.edge(place)
        index = np.unravel_index(edge.index, self.shapes[edge.name])
        return f"{edge.name}[{', '.join(map(str, index))}]"


def weight_edges(
    gauge: GaugeGroup, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> WeightEdges:
    """Read a network's weights as edges; raise `UnsupportedGraphError` if one is not an edge."""
    values = {n: _double(p) for n, p in parameters.items() if n in gauge.inference.scales}
    norms, absorbed = _fold_norms(gauge, values, buffers)
    starts, size = {}, 0
    for name, value in values.items():
        starts[name], size = size, size + value.size
    edges = WeightEdges(
        {name: tuple(value.shape) for name, value in values.items()},
        starts,
        np.full(size, NO_UNIT),
        np.full(size, NO_UNIT),
        np.concatenate([np.zeros(0), *(value.reshape(-1) for value in values.values())]),
        norms,
        absorbed,
    )
    for name in (name for name in values if name in gauge.names):
        ends = incidence(gauge, name).edge_ends()
        if ends is None:
            raise UnsupportedGraphError(
                f"the scale of `{name}` depends on several units at once (products of "
                "activations, or one weight used in several places), so that it is not an edge "
                "from one unit to another and paths through it have no value; basis paths exist "
                "for chains and branches of layers."
            )
        for row, end in zip((edges.heads, edges.tails), ends, strict=True):
            edges.part(row, name)[...] = end
    return edges


def _fold_norms(
    gauge: GaugeGroup, values: dict[str, Floats], buffers: Mapping[str, Tensor]
) -> tuple[tuple[FoldedNorm, ...], frozenset[str]]:
    """Replace the weights and biases of batch-norms by those of every channel, in place."""
    norms, absorbed = [], set()
    for norm in _unshared_norms(gauge.inference.norms):
        spread = np.sqrt(_double(buffers[norm.variance]) + norm.epsilon)
        shift = _double(buffers[norm.mean])
        if norm.before is not None:
            shift = shift - values[norm.before]
            absorbed.add(norm.before)
        values[norm.weight] = values[norm.weight] / spread
        values[norm.bias] = values[norm.bias] - values[norm.weight] * shift
        norms.append(FoldedNorm(norm.weight, norm.bias, shift / spread, spread))
    return tuple(norms), frozenset(absorbed)


def _unshared_norms(norms: tuple[StoredNorm, ...]) -> list[StoredNorm]:
    """The norms whose parameters no other norm reads."""
    parts = {norm: {norm.weight, norm.bias, norm.before} - {None} for norm in norms}
    seen = Counter(name for names in parts.values() for name in names)
    return [norm for norm, names in parts.items() if all(seen[name] == 1 for name in names)]


def _double(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().double().cpu().numpy()
    return array
