"""Incidence: which unit each entry of a parameter enters and leaves; sums over scales of units.

In: a gauge group and the name of a parameter. Out: an `Incidence`, the exponents of the group's
independent scales (the units) in every entry: a weight from unit b to unit a is multiplied by
c_a / c_b, so it has exponent 1 at a, which it enters, and -1 at b, which it leaves. The exponents
of a whole tensor would take (entries × units) numbers. They are held in parts, each of which varies
along some axes only: for a layer's weight, a row part and a column part.

An `OrbitSum` is a sum of terms a · exp(2 e · t) in the logarithms t of the units' scales, with the
exponents e of some tensors: convex, and minimised by Newton's method, which needs terms on both
sides of every unit, or on neither.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.symmetry.inference.equations import disjoint_groups

if TYPE_CHECKING:
    from flatgauge.symmetry.gauge import GaugeGroup

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Stands for no unit: an input, a constant, or an output.
NO_UNIT = -1

#: Up to this many entries, a tensor is looked at entry by entry.
_FEW = 256

#: Exponents below this are rounding.
_TINY = 1e-9

#: Balanced means: what enters a unit and what leaves it differ by less than this.
TOLERANCE = 1e-12

#: Most steps of Newton's method, and of conjugate gradients in each.
_MOST_STEPS, _MOST_INNER = 100, 2000

#: The largest change of a scale's logarithm in one step.
_LONGEST = 4.0

#: Up to this many units and weights, Newton's equation is written out and solved directly.
_MOST_UNITS, _MOST_WEIGHTS = 1000, 2**21


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


# -- sums over scales of units ---------------------------------------------------------------------


@dataclass(frozen=True)
class OrbitTerms:
    """What a tensor adds to a sum over the orbit: for the norm, its squared weights."""

    pattern: Incidence  #: Which units the terms enter and leave.
    terms: Floats  #: At least zero, of the pattern's shape: entries that scale equally add up.


@dataclass(frozen=True)
class OrbitSum:
    """The terms of all tensors, for a number of units."""

    layers: list[OrbitTerms]
    count: int

    def by_unit(self, *, sign: int = 0, square: bool = False) -> Floats:
        """Σ exponent · term by unit, over all tensors; see `Incidence.sums_by_unit`."""
        sums = np.zeros(self.count)
        for layer in self.layers:
            sums += layer.pattern.sums_by_unit(layer.terms, self.count, sign=sign, square=square)
        return sums

    def rescale(self, logs: Floats) -> OrbitSum:
        """The terms after multiplying units by exp(logs)."""
        terms = (one.terms * np.exp(2 * one.pattern.exponents(logs)) for one in self.layers)
        pairs = zip(self.layers, terms, strict=True)
        return OrbitSum([replace(one, terms=new) for one, new in pairs], self.count)

    def minimize(self) -> tuple[Floats, int, float]:
        """The log scales that minimise the sum, the steps and the imbalance left."""
        logs = np.zeros(self.count)
        live = self.by_unit(square=True) > 0
        best, least = logs, np.inf
        for step in range(_MOST_STEPS + 1):
            now = self.rescale(logs)
            gradient = now.by_unit()
            sizes = now.by_unit(sign=1) + now.by_unit(sign=-1)
            imbalance = float(np.abs(gradient[live] / sizes[live]).max(initial=0.0))
            if imbalance <= TOLERANCE and imbalance > least / 2:
                break  # Rounding allows nothing better.
            if imbalance < least:
                best, least = logs, imbalance
            if imbalance == 0 or step == _MOST_STEPS:
                break
            direction = now._solve_newton(-gradient, live, min(1e-2, imbalance))
            direction *= min(1.0, _LONGEST / max(np.abs(direction).max(), 1e-300))
            logs = logs + self._step_length(logs, direction) * direction
        return best, step, least

    def excess(self, logs: Floats) -> float:
        """How far the sum is from its smallest: to second order, what a Newton step would save."""
        now = self.rescale(logs)
        gradient, live = now.by_unit(), now.by_unit(square=True) > 0
        return abs(float(gradient @ now._solve_newton(gradient, live, 1e-2)))

    def _step_length(self, logs: Floats, direction: Floats) -> float:
        """How far to go along a Newton step: all the way, unless the sum grows."""

        def sum_at(length: float) -> float:
            with np.errstate(over="ignore", invalid="ignore"):
                moved = self.rescale(logs + length * direction).layers
                value = sum(float(layer.terms.sum()) for layer in moved)
            return value if np.isfinite(value) else np.inf

        value, length = sum_at(0.0), 1.0
        while length > 1e-6 and sum_at(length) > value * (1 + 1e-13):
            length /= 2
        return length

    def _solve_newton(self, right: Floats, live: Mask, tolerance: float) -> Floats:
        """Solve Newton's equation."""
        size = sum(layer.terms.size for layer in self.layers)
        if self.count <= _MOST_UNITS and size <= _MOST_WEIGHTS:
            matrix, solution = self._second_derivatives(), np.zeros(self.count)
            with suppress(np.linalg.LinAlgError):
                solution[live] = np.linalg.solve(matrix[np.ix_(live, live)], right[live])
                return solution
        return self._conjugate_gradients(right, live, tolerance)

    def _second_derivatives(self) -> Floats:
        """Second derivatives of half the sum, written out."""
        count = self.count
        flat = np.zeros((count + 1) ** 2)
        for layer in self.layers:
            for one, other in product(layer.pattern.parts, repeat=2):
                shape = np.broadcast_shapes(one.shape, other.shape)
                axes = tuple(a for a, n in enumerate(shape) if n == 1 < layer.terms.shape[a])
                sums = layer.terms.sum(axes, keepdims=True) if axes else layer.terms
                slots = zip(one.units, one.powers, strict=True)
                others = zip(other.units, other.powers, strict=True)
                for (u, p), (v, q) in product(slots, others):
                    row = np.where(u == NO_UNIT, count, u).reshape(one.shape)
                    column = np.where(v == NO_UNIT, count, v).reshape(other.shape)
                    places = np.broadcast_to(row * (count + 1) + column, shape)
                    shares = sums * p.reshape(one.shape) * q.reshape(other.shape)
                    flat += np.bincount(places.reshape(-1), shares.reshape(-1), flat.size)
        return 2 * flat.reshape(count + 1, count + 1)[:count, :count]

    def _conjugate_gradients(self, right: Floats, live: Mask, tolerance: float) -> Floats:
        """Solve Newton's equation by conjugate gradients, preconditioned by the diagonal."""
        diagonal = np.where(live, 2 * self.by_unit(square=True), 1.0)
        x, residual = np.zeros(self.count), np.where(live, right, 0.0)
        scaled = residual / diagonal
        direction, size = scaled.copy(), float(residual @ scaled)
        goal = tolerance**2 * size
        for _ in range(_MOST_INNER):
            if size <= goal or size == 0:
                break
            image = 2 * sum(
                one.pattern.sums_by_unit(one.terms * one.pattern.exponents(direction), self.count)
                for one in self.layers
            )
            curvature = float(direction @ image)
            if curvature <= 0:
                break
            step = size / curvature
            x += step * direction
            residual = residual - step * image
            scaled = residual / diagonal
            size, before = float(residual @ scaled), size
            direction = scaled + (size / before) * direction
        return x
