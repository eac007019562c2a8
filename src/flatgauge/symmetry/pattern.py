"""How a parameter's entries hang on the independent scales: which unit each enters or leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.symmetry.scale import groups

if TYPE_CHECKING:
    from flatgauge.symmetry.gauge import GaugeGroup

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Stands for no unit: an input, a constant, or an output.
NOTHING = -1

#: Up to so many entries, a pattern is looked at entry by entry.
_FEW = 256


@dataclass(frozen=True)
class Part:
    """A part of the exponents, which varies along some axes.

    Attributes:
        shape: Broadcasts to the pattern's.
        units: Coordinates of the group (slots, entries), `NOTHING` where a slot is empty.
        powers: Their exponents (slots, entries).
    """

    shape: tuple[int, ...]
    units: Integers
    powers: Floats

    def sum(self, values: Floats) -> Floats:
        """The exponents' product with values of the units, as an array of the part's shape."""
        padded = np.append(values, 0.0)
        total: Floats = (padded[self.units] * self.powers).sum(0)
        return total.reshape(self.shape)

    def slots(self, sign: int) -> list[Integers]:
        """The units whose exponent has a sign, slot by slot, in the part's shape."""
        chosen = np.where(np.sign(self.powers) == sign, self.units, NOTHING)
        chosen = np.sort(chosen, axis=0)[::-1]  # Full slots first.
        return [slot.reshape(self.shape) for slot in chosen if (slot != NOTHING).any()]


@dataclass(frozen=True)
class Pattern:
    """The exponents of a tensor: the sum of its parts, for axes on which any of them varies.

    Attributes:
        name: Of the tensor.
        shape: Of the tensor, with size one along the axes on which no part varies.
        parts: The parts.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def summed(self) -> tuple[int, ...]:
        """The axes of the tensor on which no part varies."""
        return tuple(axis for axis, size in enumerate(self.shape) if size == 1)

    def exponents(self, values: Floats) -> Floats:
        """The log-scale of every entry, for given log-scales of the units."""
        total = np.zeros(())
        for part in self.parts:
            total = total + part.sum(values)
        return np.broadcast_to(total, self.shape)

    def shares(self, weights: Floats, count: int, *, sign: int = 0, square: bool = False) -> Floats:
        """Add up entries by unit: Σ exponent · weight over the entries that a unit scales.

        Args:
            weights: One per entry, of the pattern's shape.
            count: How many units there are.
            sign: 1 for positive exponents only, -1 for the absolute values of negative ones.
            square: Whether exponents are squared.

        Returns:
            One sum per unit.
        """
        total = np.zeros(count + 1)
        for part in self.parts:
            axes = tuple(a for a, size in enumerate(part.shape) if size == 1 < weights.shape[a])
            flat = weights.sum(axes, keepdims=True).reshape(-1) if axes else weights.reshape(-1)
            for units, powers in zip(part.units, part.powers, strict=True):
                factors = np.maximum(sign * powers, 0) if sign else powers
                factors = factors**2 if square else factors
                places = np.where(units == NOTHING, count, units)
                total += np.bincount(places, flat * factors, count + 1)
        return total[:count]

    def touches(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which entries are scaled by one of the chosen units."""
        padded = np.append(chosen, False)
        found = np.zeros((), bool)
        for part in self.parts:
            hit = (padded[part.units] & (part.powers != 0)).any(0)
            found = found | hit.reshape(part.shape)
        return np.broadcast_to(found, self.shape)

    def still(self, count: int) -> NDArray[np.bool_]:
        """Which entries no unit scales, as the parts cancel: an edge from a unit to itself."""
        values = np.random.default_rng(0).uniform(1, 2, count)
        return np.abs(self.exponents(values)) < 1e-9

    def edge(self) -> tuple[Integers, Integers] | None:
        """The unit every entry enters and the one it leaves, where it is such a weight.

        Returns:
            Arrays of heads and tails that broadcast to the shape, `NOTHING` for outputs,
            inputs and constants; None where entries hang on units in any other way.
        """
        ends = []
        for sign in (1, -1):
            found = [slot for part in self.parts for slot in part.slots(sign)]
            if len(found) > 1:
                return None
            ends.append(found[0] if found else np.full((1,) * len(self.shape), NOTHING))
        if any((np.abs(part.powers[part.units != NOTHING]) != 1).any() for part in self.parts):
            return None
        return ends[0], ends[1]


def pattern_of(gauge: GaugeGroup, name: str) -> Pattern:
    """How the entries of a tensor hang on the coordinates of a group.

    Args:
        gauge: The group.
        name: Of a parameter or stored mean.

    Returns:
        The pattern.
    """
    dims = len(gauge.inference.scales[name].shape)
    sets = groups(gauge.inference.scales[name].terms)
    matrices, shapes = [], []
    for members in sets:
        shape = np.broadcast_shapes(*(tuple(ids.shape) for _, ids in members))
        rows: Any = 0
        for coefficient, ids in members:
            flat = ids.expand(shape).reshape(-1).numpy()
            rows = rows + gauge.basis[gauge.classes[flat]] * float(coefficient)
        matrices.append(rows.tocsr())
        shapes.append(shape)
    if len(matrices) > 1:
        # What nearly all rows of the first set share belongs to the others: W[o, i] is held as
        # (z_o - x_0) + (x_0 - x_i), and is meant as (z_o) + (-x_i).
        shared = _common(matrices[0])
        matrices[0] = _shifted(matrices[0], -shared)
        matrices[1] = _shifted(matrices[1], shared)
    parts = tuple(_part(m, shape) for m, shape in zip(matrices, shapes, strict=True))
    whole = tuple(int(n) for n in np.broadcast_shapes((1,) * dims, *shapes))
    pattern = Pattern(name, whole, parts)
    if len(parts) > 1 and pattern.edge() is None and np.prod(whole) <= _FEW:
        # Between two units of one stream, no share is held by most rows: entry by entry it is
        # plain where each begins and ends.
        joined = Pattern(name, whole, (_joined(matrices, shapes, whole),))
        return joined if joined.edge() is not None else pattern
    return pattern


def _joined(matrices: list[Any], shapes: list[tuple[int, ...]], whole: tuple[int, ...]) -> Part:
    """All parts as one, which varies along all axes."""
    rows: Any = 0
    for matrix, shape in zip(matrices, shapes, strict=True):
        places = np.arange(matrix.shape[0]).reshape(shape)
        rows = rows + matrix[np.broadcast_to(places, whole).reshape(-1)]
    return _part(rows.tocsr(), whole)


def _common(rows: Any) -> Floats:
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


def _shifted(rows: Any, shift: Floats) -> Any:
    """Rows with the same exponents added to each."""
    from scipy.sparse import csr_array

    if not shift.any():
        return rows
    columns = np.flatnonzero(shift)
    count = rows.shape[0]
    added = csr_array(
        (
            np.tile(shift[columns], count),
            (np.repeat(np.arange(count), len(columns)), np.tile(columns, count)),
        ),
        shape=rows.shape,
    )
    total = (rows + added).tocsr()
    total.data[np.abs(total.data) < 1e-9] = 0
    total.eliminate_zeros()
    return total


def _part(rows: Any, shape: tuple[int, ...]) -> Part:
    """Sparse rows as slots."""
    rows.data[np.abs(rows.data) < 1e-9] = 0
    rows.eliminate_zeros()
    rows.sort_indices()
    lengths = np.diff(rows.indptr)
    slots = int(lengths.max(initial=0))
    units = np.full((slots, rows.shape[0]), NOTHING, dtype=np.int64)
    powers = np.zeros((slots, rows.shape[0]))
    for slot in range(slots):
        full = np.flatnonzero(lengths > slot)
        units[slot, full] = rows.indices[rows.indptr[full] + slot]
        powers[slot, full] = rows.data[rows.indptr[full] + slot]
    return Part(tuple(int(n) for n in shape), units, powers)
