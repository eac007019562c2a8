"""The smallest trace on an orbit: second derivatives summed over all ways to write a network.

In: a gauge group and the second derivatives of every tensor. Out: the `Infimum` of their sum over
the group. A tensor times c has second derivatives over c², so the sum is one of terms
a · exp(2 e · t) in the logarithms t of the units' scales, as for the balanced form (`balance`).

Other than there, a term may be driven to zero at no cost to the others: if some direction t has
e · t < 0 for it and e · t ≤ 0 for all. These terms are left out first (`_vanishing_direction`).
Where terms lead from unit to unit, they are those between different strongly connected components
of the units, with inputs and outputs as one; for any other exponents a linear program finds them.

The others are brought to about one size (`_equalizing_scales`). As many terms as there are units,
always the same ones, are first brought to the same power of two. This undoes scales by powers of
two exactly: from there on, all ways to write the network by powers of two give the same bits. Least
squares on logarithms and Newton's method do the rest. Both steps look at `TermKinds` only: one term
of every tensor for each set of exponents.

Sums of estimated second derivatives may be negative by noise alone. If only these were set to zero,
the sum would grow by what they lacked; so the others of the tensor are lowered by one factor, at
which the sum of the tensor in one chosen form of the network stays what it is. `weights` take its
second derivatives to that form, up to one factor per tensor; they are constant where entries scale
by the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from flatgauge.symmetry.balance import OrbitTerms, excess, minimize_orbit_sum, rescale
from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.inference.equations import CONSTANT, eliminate
from flatgauge.symmetry.paths.skeletons import (
    NO_UNIT,
    Floats,
    Incidence,
    Integers,
    Mask,
    Part,
    incidence,
    without_tiny,
)

#: What a direction must add to an exponent to count.
_LEAST_EXPONENT = 1e-3


@dataclass(frozen=True)
class Infimum:
    """The infimum of a trace over all members of a gauge group.

    Attributes:
        shares: What every tensor adds to it.
        start: What every tensor adds before anything is scaled.
        factors: What the second derivatives of every tensor are multiplied by there: broadcasts to
            the tensor, zero for those that vanish or count as zero.
        running: Units that run off to zero or infinity: the infimum is not attained.
        clipped: Sums of second derivatives that were negative and count as zero.
        noisy: Those among estimated ones, for which the others of the same tensor are lowered.
        imbalance: The largest relative difference left between what enters and what leaves.
        gap: How far above the infimum the value is, to second order.
    """

    shares: dict[str, float]
    start: dict[str, float]
    factors: dict[str, Floats]
    running: int
    clipped: int
    noisy: int
    steps: int
    imbalance: float
    gap: float


def smallest_trace(
    gauge: GaugeGroup,
    diagonals: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
) -> Infimum:
    """Minimise the sum of second derivatives; `weights` take estimated ones to a chosen form."""
    weights = weights or {}
    shares, start, factors, kept = {}, {}, {}, {}
    layers: list[OrbitTerms] = []
    clipped = noisy = 0
    for name, diagonal in diagonals.items():
        values = diagonal.detach().double().cpu().numpy()
        factors[name] = np.ones(())
        if name not in gauge.names:
            shares[name] = start[name] = float(values.sum())
            continue
        pattern = _opposite_incidence(gauge, name)
        terms = np.asarray(values.sum(pattern.constant_axes, keepdims=True))
        still = pattern.fixed_entries(gauge.dim)
        shares[name] = float(terms[still].sum())
        moved = np.where(still, 0.0, terms)
        negative, ratio = moved < 0, 1.0
        clipped += int(negative.sum())
        if name in weights and negative.any():
            noisy += int(negative.sum())
            scale = weights[name].detach().double().cpu().numpy()
            scale = np.broadcast_to(scale, values.shape).max(pattern.constant_axes, keepdims=True)
            ratio = max(float((moved * scale).sum() / (np.abs(moved) * scale).sum()), 0.0)
            ratio = 2 * ratio / (1 + ratio)  # From Σ t / Σ |t| to Σ t over the positive ones.
        terms = np.where(negative, 0.0, ratio * moved)
        start[name] = shares[name] + float(terms.sum())
        kept[name] = np.where(negative, 0.0, np.where(still, 1.0, ratio))
        layers.append(OrbitTerms(pattern, terms))
    layers, shift, scales, running = _normalize(layers, gauge.dim)
    logs, steps, imbalance = minimize_orbit_sum(layers, gauge.dim)
    for layer, best in zip(layers, rescale(layers, logs), strict=True):
        name, pattern = layer.pattern.name, _opposite_incidence(gauge, layer.pattern.name)
        shares[name] += float(np.ldexp(best.terms.sum(), shift))
        growth = 2 * (pattern.exponents(scales) + layer.pattern.exponents(logs) / np.log(2))
        gone = np.abs(pattern.exponents(running)) > _LEAST_EXPONENT
        factors[name] = np.where(gone, 0.0, kept[name] * np.exp2(growth))
    left = float(np.ldexp(excess(layers, logs, gauge.dim), shift))
    count = int(np.count_nonzero(running))
    return Infimum(shares, start, factors, count, clipped, noisy, steps, imbalance, left)


def _normalize(
    layers: list[OrbitTerms], count: int
) -> tuple[list[OrbitTerms], int, Floats, Floats]:
    """The terms that stay over 2^power, that power, their log2 scales and a vanishing direction."""
    kinds = _term_kinds(layers, count)
    running = _vanishing_direction(kinds)
    logs, fixed = _equalizing_scales(kinds.among(np.abs(kinds.rows @ running) <= _LEAST_EXPONENT))
    started, tops = [], []
    for layer in layers:
        gone = np.abs(layer.pattern.exponents(running)) > _LEAST_EXPONENT
        mantissas, powers = np.frexp(np.where(gone, 0.0, layer.terms))
        powers = powers + 2 * layer.pattern.exponents(logs)
        tops.append(float(powers[mantissas > 0].max(initial=-np.inf)))
        started.append((layer, mantissas, powers))
    top = max(tops, default=-np.inf)
    shift = int(np.ceil(top)) if np.isfinite(top) else 0
    found = []
    for layer, mantissas, powers in started:
        whole = np.floor(powers - shift)
        parts = mantissas * np.exp2(powers - shift - whole)
        terms = np.ldexp(parts, np.maximum(whole, -2000).astype(np.int64))
        found.append(OrbitTerms(_fix_units(layer.pattern, fixed), terms))
    return found, shift, logs, running


def _opposite_incidence(gauge: GaugeGroup, name: str) -> Incidence:
    """The exponents of a tensor's second derivatives: the opposite of its entries'."""
    pattern = incidence(gauge, name)
    parts = tuple(_without_constant_axes(part) for part in pattern.parts)
    dims = (1,) * len(pattern.shape)
    shape = tuple(int(n) for n in np.broadcast_shapes(dims, *(part.shape for part in parts)))
    return Incidence(name, shape, tuple(replace(part, powers=-part.powers) for part in parts))


def _without_constant_axes(part: Part) -> Part:
    """A part without the axes along which it does not vary: all, where a tensor has one scale."""
    shape = (len(part.units), *part.shape)
    units, powers = part.units.reshape(shape), part.powers.reshape(shape)
    for axis in range(1, len(shape)):
        ahead = (slice(None),) * axis + (slice(0, 1),)
        if (units == units[ahead]).all() and (powers == powers[ahead]).all():
            units, powers = units[ahead], powers[ahead]
    flat = (len(units), math.prod(units.shape[1:]))
    return Part(units.shape[1:], units.reshape(flat), powers.reshape(flat))


def _fix_units(pattern: Incidence, fixed: Mask) -> Incidence:
    """An incidence in which some units are not scaled."""
    padded = np.append(fixed, False)
    parts = tuple(
        replace(part, units=np.where(padded[part.units], NO_UNIT, part.units))
        for part in pattern.parts
    )
    return replace(pattern, parts=parts)


#: What an exponent must exceed not to be rounding.
_TINY = 1e-6

#: Most steps of the least squares that bring terms to one size.
_MOST_STEPS = 200


@dataclass(frozen=True)
class TermKinds:
    """Terms that are not zero, one of every tensor for each set of exponents.

    Attributes:
        rows: Their exponents, a scipy array (terms, units).
        mantissas: Of the terms, between a half and one.
        powers: Of two: whole numbers, which alone change when units are scaled by powers of two.
    """

    rows: Any
    mantissas: Floats
    powers: Floats

    def among(self, chosen: Mask) -> TermKinds:
        """Some of them."""
        return TermKinds(self.rows[chosen], self.mantissas[chosen], self.powers[chosen])


def _term_kinds(layers: Sequence[OrbitTerms], count: int) -> TermKinds:
    """One term of every tensor for each set of exponents that it has."""
    from scipy.sparse import csr_array, vstack

    rows: list[Any] = [csr_array((0, count))]
    terms = [np.zeros(0)]
    for layer in layers:
        places = np.flatnonzero(layer.terms.reshape(-1) > 0)
        ends = layer.pattern.edge_ends()
        if ends is not None:
            heads, tails = (np.broadcast_to(end, layer.terms.shape).reshape(-1) for end in ends)
            keys = (heads[places] + 1) * (count + 1) + tails[places] + 1
            places = np.sort(places[np.unique(keys, return_index=True)[1]])
        rows.append(_rows(layer.pattern, places, count))
        terms.append(layer.terms.reshape(-1)[places])
    mantissas, powers = np.frexp(np.concatenate(terms))
    return TermKinds(vstack(rows).tocsr(), mantissas, powers.astype(float))


def _rows(pattern: Incidence, places: Integers, count: int) -> Any:
    """The exponents of some entries, as sparse rows."""
    from scipy.sparse import csr_array

    indices = np.unravel_index(places, pattern.shape) if pattern.shape else ()
    total: Any = csr_array((len(places), count))
    for part in pattern.parts:
        where = [i if n > 1 else np.zeros_like(i) for i, n in zip(indices, part.shape, strict=True)]
        inner = np.ravel_multi_index(where, part.shape) if where else np.zeros_like(places)
        for units, powers in zip(part.units, part.powers, strict=True):
            full = np.flatnonzero(units[inner] != NO_UNIT)
            chosen = inner[full]
            total = total + csr_array(
                (powers[chosen], (full, units[chosen])), shape=(len(places), count)
            )
    return without_tiny(total.tocsr(), _TINY)


def _are_differences(rows: Any) -> bool:
    """Whether every row is one unit, or the difference of two, times a factor."""
    lengths = np.diff(rows.indptr)
    starts = rows.indptr[:-1][lengths == 2]
    opposite = np.abs(rows.data[starts] + rows.data[starts + 1]) < _TINY
    return bool((lengths <= 2).all() and opposite.all())


# -- what can be made to vanish ------------------------------------------------------------------


def _vanishing_direction(kinds: TermKinds) -> Floats:
    """A direction t with e · t = 0 for the terms that stay and no others; its sign is arbitrary."""
    count = kinds.rows.shape[1]
    if not kinds.rows.shape[0]:
        return np.zeros(count)
    if _are_differences(kinds.rows):
        return _direction_by_components(kinds.rows)
    return _direction_by_linear_program(kinds.rows)


def _direction_by_components(rows: Any) -> Floats:
    """A vanishing direction by the strongly connected components of the units."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = rows.shape[1]
    ends = np.full((2, rows.shape[0]), count)  # The last node stands for inputs and outputs.
    owners = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
    for side, chosen in ((0, rows.data > 0), (1, rows.data < 0)):
        ends[side, owners[chosen]] = rows.indices[chosen]
    graph = coo_array((np.ones(rows.shape[0]), (ends[0], ends[1])), shape=(count + 1, count + 1))
    labels = connected_components(graph.tocsr(), connection="strong")[1]
    pieces = connected_components(graph.tocsr(), connection="weak")[1]
    # A piece apart from inputs and outputs moves relative to one of its own units.
    origins = np.full(pieces.max() + 1, count + 1)
    np.minimum.at(origins, pieces, labels)
    origins[pieces[count]] = labels[count]
    direction: Floats = (labels - origins[pieces])[:count].astype(float)
    return direction


def _direction_by_linear_program(rows: Any) -> Floats:
    """A vanishing direction by linear programming: as many terms as possible fall, none rises."""
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, hstack

    terms, count = rows.shape
    found = linprog(
        np.append(np.zeros(count), -np.ones(terms)),
        A_ub=hstack([rows, eye_array(terms)]).tocsr(),
        b_ub=np.zeros(terms),
        bounds=[(None, None)] * count + [(0, 1)] * terms,
    )
    if found.x is None or not found.success:
        raise RuntimeError(
            f"the linear program for vanishing second derivatives failed: {found.message}"
        )
    direction: Floats = np.where(np.abs(found.x[:count]) < _TINY, 0.0, found.x[:count])
    return direction


# -- where to start ------------------------------------------------------------------------------


def _equalizing_scales(kinds: TermKinds) -> tuple[Floats, Mask]:
    """Log2 scales that bring all terms to about one size, and units that then change no term."""
    from scipy.sparse.linalg import lsqr

    logs, fixed = _exact_scales(kinds)
    if kinds.rows.shape[0]:
        sizes = kinds.powers + 2 * (kinds.rows @ logs) + np.log2(kinds.mantissas)
        logs = logs + np.rint(lsqr(2 * kinds.rows, -sizes, iter_lim=_MOST_STEPS)[0])
    return logs, fixed


def _exact_scales(kinds: TermKinds) -> tuple[Floats, Mask]:
    """Logarithms at which as many terms as possible have the power zero."""
    rows, count = kinds.rows, kinds.rows.shape[1]
    logs, known, fixed = np.zeros(count), np.zeros(count, bool), np.zeros(count, bool)
    while True:
        rest = without_tiny((rows * (~known)[None, :].astype(float)).tocsr(), _TINY)
        lengths = np.diff(rest.indptr)
        ready = np.flatnonzero(lengths == 1)
        if len(ready):
            units, first = np.unique(rest.indices[rest.indptr[ready]], return_index=True)
            chosen = ready[first]
            value = kinds.powers[chosen] / 2 + rows[chosen] @ logs
            logs[units] = -value / rest.data[rest.indptr[chosen]]
            known[units] = True
            continue
        left = np.flatnonzero(lengths)
        if not len(left):
            return logs, fixed
        if _are_differences(rest):  # A group of units that depend only on each other.
            fixed[rest.indices[0]] = known[rest.indices[0]] = True
            continue
        right = -(kinds.powers[left] / 2 + rows[left] @ logs)
        fixed[rest.indices] = True
        for unit, expression in eliminate(rest[left], lambda unit: -unit, right).items():
            fixed[unit], logs[unit] = False, float(expression.get(CONSTANT, 0))
        return logs, fixed
