"""The balanced form of a network, and the smallest trace among all ways to write it.

In: a model (or a surface) and its gauge group; for the trace, the second derivatives of every
tensor. Out: the factors that take every tensor to the way of smallest norm (`Balance`), or a
balanced copy; for the trace, its `Infimum`. Both are sums of terms a · exp(2 e · t) in the
logarithms t of the units' scales (a tensor times c has second derivatives over c²): convex, and
minimised by Newton's method (`OrbitSum`).

The norm: units with weights on one side only are taken out first. The start follows from the
strongest paths by products alone, so that ways to write the network that differ by powers of two
give the same bits.

The trace: a term may be driven to zero at no cost to the others, if some direction t has e · t < 0
for it and e · t ≤ 0 for all. These terms are left out first (`_vanishing_direction`). Where terms
lead from unit to unit, they are those between different strongly connected components of the
units, with inputs and outputs as one; for any other exponents a linear program finds them. The
others are brought to about one size (`_equalizing_scales`). As many terms as there are units,
always the same ones, are first brought to the same power of two, which undoes scales by powers of
two exactly. Least squares on logarithms and Newton's method do the rest. Both steps look at
`TermKinds` only: one term of every tensor for each set of exponents.

Sums of estimated second derivatives may be negative by noise alone. If only these were set to zero,
the sum would grow by what they lacked; so the others of the tensor are lowered by one factor, at
which the sum of the tensor in one chosen form of the network stays what it is. `weights` take its
second derivatives to that form, up to one factor per tensor; they are constant where entries scale
by the same factor.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatgauge.runtime.isolation import copy_model
from flatgauge.surface.model import unwrap
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.find import find_gauge, surface_gauge
from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.incidence import (
    NO_UNIT,
    TOLERANCE,
    Floats,
    Incidence,
    Integers,
    Mask,
    OrbitSum,
    OrbitTerms,
    Part,
    incidence,
    unit_names,
    without_tiny,
)
from flatgauge.symmetry.inference.equations import CONSTANT, eliminate
from flatgauge.symmetry.skeletons import StrongestPaths, strongest_paths

#: Most steps of least squares.
_MOST_STEPS = 200

#: What a direction must add to an exponent to count, and what an exponent is to count at all.
_LEAST_EXPONENT, _TINY = 1e-3, 1e-6


@dataclass(frozen=True)
class Balance:
    """How a network was balanced.

    Attributes:
        factors: What every tensor was multiplied by: terms to be multiplied in turn.
        one_sided: Units that cannot be balanced as only one side of them is not zero, perhaps
            after others were left out, by name: that side has norm one.
        empty: Units with no other weights than zeros, by name: left as they are.
        irregular: Parameters that are not weights from unit to unit: for units that these alone
            fix, the result is unique to rounding, but not bit for bit.
        steps: Newton steps taken.
        imbalance: The largest relative difference left between what enters and what leaves.
    """

    factors: dict[str, list[Tensor]]
    one_sided: tuple[str, ...]
    empty: tuple[str, ...]
    irregular: tuple[str, ...]
    steps: int
    imbalance: float

    @property
    def has_converged(self) -> bool:
        """Whether every unit is balanced."""
        return self.imbalance <= TOLERANCE

    def notes(self) -> list[str]:
        """What is special about the balance; an error if it was not reached."""
        if not self.has_converged:
            raise RuntimeError(
                f"the balance was not reached: after {self.steps} Newton steps what enters and "
                f"what leaves a unit still differ by {self.imbalance:.1g} of their size; are there "
                "weights that differ by many powers of ten?"
            )
        if not self.one_sided and not self.empty:
            return []
        return [
            f"{len(self.one_sided)} units have weights on one side only, which got norm one, and "
            f"{len(self.empty)} have none: {', '.join([*self.one_sided, *self.empty][:8])}"
        ]

    def apply(self, model: nn.Module) -> None:
        """Balance the model that it was computed for, in place."""
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        with torch.no_grad():
            for name, factors in self.factors.items():
                value = state[name].double()
                for factor in factors:
                    value = value * factor.to(value.device)
                state[name].copy_(value)


def balance(model: nn.Module, example_inputs: Any, *, frozen: str = "fixed") -> nn.Module:
    """Write a network in its balanced form: the one way of smallest norm.

    For every independent scale of its gauge group, the squared norm of what enters (weights
    and biases) equals that of what leaves. Every way of writing the network has the same
    balanced form: bit for bit where ways differ by powers of two.

    Args:
        model: The model; not changed.
        example_inputs: What to call it with: a tensor, a tuple of positional arguments, or a
            dict of keyword arguments.
        frozen: ``"fixed"`` holds parameters that do not require a gradient, ``"free"`` lets them
            move. Where no parameter requires a gradient, all move.

    Returns:
        A copy, balanced. A unit of which only one side is not zero has no balance: that side gets
        norm one, and a warning names the unit.

    Raises:
        ValueError: If a parameter is not finite.
        RuntimeError: If the balance is not reached.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
        >>> for parameter, value in zip(net.parameters(), (3.0, 4.0, 20.0, 1.0)):
        ...     _ = nn.init.constant_(parameter, value)
        >>> even = balance(net, torch.ones(1, 1).double())  # 3² + 4² = 5², so c = √(20 / 5)
        >>> [round(p.item(), 9) for p in even.parameters()]
        [6.0, 8.0, 10.0, 1.0]
    """
    gauge = find_gauge(model, example_inputs, frozen=frozen)
    inner = unwrap(model)
    for name, parameter in inner.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(
                f"`{name}` of the model holds values that are nan or infinite, which no factor "
                "balances; the training diverged, or the checkpoint is damaged."
            )
    found = compute_balance(gauge, dict(inner.named_parameters()))
    for note in found.notes():
        warnings.warn(note, stacklevel=2)
    twin = copy_model(inner)
    found.apply(twin)
    return twin


def balanced_surface(surface: LossSurface) -> tuple[LossSurface, tuple[str, ...]]:
    """The same loss and data on a balanced copy of the model, made once, with notes about it."""

    def make() -> tuple[LossSurface, tuple[str, ...]]:
        gauge, twin = surface_gauge(surface), surface.copy()
        found = compute_balance(gauge, dict(twin.model.named_parameters()))
        notes = found.notes()
        found.apply(twin.model)
        return twin, (f"measured in the balanced gauge ({gauge.dim} scales fixed)", *notes)

    balanced, notes = surface.cache.get(("balanced",), make)
    balanced.risk.listener = surface.risk.listener
    return balanced, notes


def compute_balance(gauge: GaugeGroup, state: Mapping[str, Tensor]) -> Balance:
    """Find the factors that balance a network; entries that a constant mask hides do not count."""
    state = {name: tensor.detach() for name, tensor in state.items()}
    for name, mask in gauge.inference.hidden.items():
        if name in state:
            state[name] = state[name].masked_fill(mask.to(state[name].device), 0.0)
    skeleton = strongest_paths(gauge, state)
    start = _start_factors(gauge, skeleton)
    patterns = {name: incidence(gauge, name) for name in gauge.names}
    layers = []
    for name, pattern in patterns.items():
        if name in state:  # Stored means are not weights: their norm does not count.
            value = state[name].double().cpu()
            for factor in start[name]:
                value = value * factor
            squares = value.square().numpy().sum(pattern.constant_axes, keepdims=True)
            fixed = pattern.fixed_entries(gauge.dim)
            layers.append(OrbitTerms(pattern, np.where(fixed, 0.0, squares)))
    norm = OrbitSum(layers, gauge.dim)
    empty = norm.by_unit(square=True) == 0
    removed, unbalanced = _remove_one_sided(norm)
    logs, steps, imbalance = norm.minimize()
    for units, side, edges in reversed(removed):
        weights = edges.rescale(logs)
        sums = weights.by_unit(sign=side)[units]
        # Exponents are one, except for pow and sqrt.
        powers = weights.by_unit(square=True)[units] / sums
        logs[units] -= side * 0.5 * np.log(sums / powers) / powers
    names = unit_names(gauge)
    factors = {}
    for name, pattern in patterns.items():
        exponents = torch.from_numpy(np.array(pattern.exponents(logs)))
        factors[name] = [*start[name], exponents.exp()]
    return Balance(
        factors,
        one_sided=tuple(names[u] for u in np.flatnonzero(unbalanced & ~empty)),
        empty=tuple(names[u] for u in np.flatnonzero(empty)),
        irregular=skeleton.irregular,
        steps=steps,
        imbalance=imbalance,
    )


def _start_factors(gauge: GaugeGroup, skeleton: StrongestPaths) -> dict[str, list[Tensor]]:
    """What to multiply every tensor by, in turn, to make strongest edges out powers of two."""
    # Which power follows from the strongest path through the unit, whose value no move changes: it
    # is spread evenly over the weights of the path, so that deep networks stay within the range of
    # floating point. Factors are products and quotients of the weights themselves, without
    # logarithms: a network rescaled by powers of two gives the same bits.
    out, into = skeleton.outward, skeleton.inward
    whole = ~out.zero & ~into.zero
    product, shift = np.frexp(np.where(whole, out.mantissas * into.mantissas, 0.5))
    value = np.log2(product) + shift + out.exponents + into.exponents
    share = out.lengths / np.maximum(out.lengths + into.lengths, 1)
    even = np.where(whole, np.round(value * share), 0).astype(np.int64)
    alone = out.zero & ~into.zero  # A unit that leads nowhere is scaled by what enters it.
    mantissas = np.where(out.zero, 1.0, out.mantissas)
    mantissas[alone] = 1 / into.mantissas[alone]
    exponents = np.where(alone, -into.exponents, out.exponents - even)
    basis = gauge.basis
    bases = mantissas[basis.indices]
    powers = np.where(basis.data == -1, 1 / bases, bases**basis.data)
    powers = np.append(np.where(basis.data == 1, bases, powers), 1.0)
    starts = np.minimum(basis.indptr[:-1], len(powers) - 1)
    products = np.where(np.diff(basis.indptr) > 0, np.multiply.reduceat(powers, starts), 1.0)
    shifts = basis @ exponents.astype(float)
    found: dict[str, list[Tensor]] = {name: [] for name in gauge.names}
    for name in gauge.names:
        for coefficient, rows, shape in gauge.terms(name):
            values = products[rows] ** coefficient if coefficient != 1 else products[rows]
            # Powers of two in two halves, so that neither leaves the range.
            half = np.trunc(coefficient * shifts[rows] / 2)
            for part in (values * np.exp2(half), np.exp2(coefficient * shifts[rows] - half)):
                found[name].append(torch.from_numpy(part).reshape(shape))
    return found


def _remove_one_sided(norm: OrbitSum) -> tuple[list[tuple[Mask, int, OrbitSum]], Mask]:
    """Zero the edges of units of which only one side is not zero, until there are none.

    Returns:
        The units taken out in turn, with the side they have (1 entering, -1 leaving) and the edges
        there; and all units that have no edges left.
    """
    removed: list[tuple[Mask, int, OrbitSum]] = []
    gone = np.zeros(norm.count, bool)
    while True:
        sums = {sign: norm.by_unit(sign=sign) for sign in (1, -1)}
        found = {s: (sums[s] > 0) & (sums[-s] == 0) & ~gone for s in (1, -1)}
        side = next((side for side, units in found.items() if units.any()), 0)
        if not side:
            return removed, (sums[1] == 0) & (sums[-1] == 0)
        edges = []
        for i, layer in enumerate(norm.layers):
            touched = layer.pattern.touches(found[side]) & (layer.terms > 0)
            if touched.any():
                edges.append(replace(layer, terms=np.where(touched, layer.terms, 0.0)))
                norm.layers[i] = replace(layer, terms=np.where(touched, 0.0, layer.terms))
        removed.append((found[side], side, OrbitSum(edges, norm.count)))
        gone |= found[side]


# -- the smallest trace ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Infimum:
    """The infimum of a trace over all members of a gauge group."""

    shares: dict[str, float]  #: What every tensor adds to it.
    start: dict[str, float]  #: What every tensor adds before anything is scaled.
    #: What the second derivatives of every tensor are multiplied by there: broadcasts to the
    #: tensor, zero for those that vanish or count as zero.
    factors: dict[str, Floats]
    running: int  #: Units that run off to zero or infinity: the infimum is not attained.
    clipped: int  #: Sums of second derivatives that were negative and count as zero.
    noisy: int  #: Those among estimated ones, for which the others of a tensor are lowered.
    steps: int
    imbalance: float  #: The largest relative difference between what enters and what leaves.
    gap: float  #: How far above the infimum the value is, to second order.


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
    trace, shift, scales, running = _normalize(OrbitSum(layers, gauge.dim))
    logs, steps, imbalance = trace.minimize()
    for layer, best in zip(trace.layers, trace.rescale(logs).layers, strict=True):
        name, pattern = layer.pattern.name, _opposite_incidence(gauge, layer.pattern.name)
        shares[name] += float(np.ldexp(best.terms.sum(), shift))
        growth = 2 * (pattern.exponents(scales) + layer.pattern.exponents(logs) / np.log(2))
        gone = np.abs(pattern.exponents(running)) > _LEAST_EXPONENT
        factors[name] = np.where(gone, 0.0, kept[name] * np.exp2(growth))
    left = float(np.ldexp(trace.excess(logs), shift))
    count = int(np.count_nonzero(running))
    return Infimum(shares, start, factors, count, clipped, noisy, steps, imbalance, left)


def _normalize(trace: OrbitSum) -> tuple[OrbitSum, int, Floats, Floats]:
    """The terms that stay over 2^power, that power, their log2 scales and a vanishing direction."""
    kinds = _term_kinds(trace)
    running = _vanishing_direction(kinds)
    logs, fixed = _equalizing_scales(kinds.among(np.abs(kinds.rows @ running) <= _LEAST_EXPONENT))
    started, tops = [], []
    for layer in trace.layers:
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
    return OrbitSum(found, trace.count), shift, logs, running


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


@dataclass(frozen=True)
class TermKinds:
    """Terms that are not zero, one of every tensor for each set of exponents."""

    rows: Any  #: Their exponents, a scipy array (terms, units).
    mantissas: Floats  #: Between a half and one.
    powers: Floats  #: Of two: these alone change when units are scaled by powers of two.

    def among(self, chosen: Mask) -> TermKinds:
        """Some of them."""
        return TermKinds(self.rows[chosen], self.mantissas[chosen], self.powers[chosen])


def _term_kinds(trace: OrbitSum) -> TermKinds:
    """One term of every tensor for each set of exponents that it has."""
    from scipy.sparse import csr_array, vstack

    count, terms = trace.count, [np.zeros(0)]
    rows: list[Any] = [csr_array((0, count))]
    for layer in trace.layers:
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
