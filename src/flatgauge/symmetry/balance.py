"""The balanced form: of all ways to write a network, the one of smallest norm.

In: a model (or a surface) and its gauge group. Out: the factors that take every tensor there
(`Balance`), or a balanced copy. The squared norm is a sum of terms a · exp(2 e · t) in the
logarithms t of the units' scales: convex, and minimised by Newton's method
(`minimize_orbit_sum`), which needs terms on both sides of every unit, or on neither: units with
one side are taken out first. The start follows from the strongest paths by products alone, so that
ways to write the network that differ by powers of two give the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
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
from flatgauge.symmetry.paths.skeletons import (
    NO_UNIT,
    Floats,
    Incidence,
    Mask,
    StrongestPaths,
    incidence,
    strongest_paths,
    unit_names,
)

#: Balanced means: what enters a unit and what leaves it differ by less than this.
TOLERANCE = 1e-12

#: Most Newton steps, and most steps of conjugate gradients in each.
_MOST_STEPS, _MOST_INNER = 100, 2000

#: The largest change of a scale's logarithm in one step.
_LONGEST = 4.0

#: Up to this many units and weights, Newton's equation is written out and solved directly.
_MOST_UNITS, _MOST_WEIGHTS = 1000, 2**21


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
    state = {name: _without_hidden(gauge, name, tensor.detach()) for name, tensor in state.items()}
    skeleton = strongest_paths(gauge, state)
    start = _Start(gauge, skeleton)
    patterns = {name: incidence(gauge, name) for name in gauge.names}
    layers = []
    for name, pattern in patterns.items():
        if name in state:  # Stored means are not weights: their norm does not count.
            value = state[name].detach().double().cpu()
            for factor in start.factors(name):
                value = value * factor
            squares = value.square().numpy().sum(pattern.constant_axes, keepdims=True)
            fixed = pattern.fixed_entries(gauge.dim)
            layers.append(OrbitTerms(pattern, np.where(fixed, 0.0, squares)))
    empty = sums_by_unit(layers, gauge.dim, square=True) == 0
    removed, unbalanced = _remove_one_sided(layers, gauge.dim)
    logs, steps, imbalance = minimize_orbit_sum(layers, gauge.dim)
    for units, side, edges in reversed(removed):
        weights = rescale(edges, logs)
        sums = sums_by_unit(weights, gauge.dim, sign=side)[units]
        # Exponents are one, except for pow and sqrt.
        powers = sums_by_unit(weights, gauge.dim, square=True)[units] / sums
        logs[units] -= side * 0.5 * np.log(sums / powers) / powers
    names = unit_names(gauge)
    factors = {}
    for name, pattern in patterns.items():
        exponents = torch.from_numpy(np.array(pattern.exponents(logs)))
        factors[name] = [*start.factors(name), exponents.exp()]
    return Balance(
        factors,
        one_sided=tuple(names[u] for u in np.flatnonzero(unbalanced & ~empty)),
        empty=tuple(names[u] for u in np.flatnonzero(empty)),
        irregular=skeleton.irregular,
        steps=steps,
        imbalance=imbalance,
    )


def _without_hidden(gauge: GaugeGroup, name: str, tensor: Tensor) -> Tensor:
    """A tensor with zeros where a mask hides it."""
    hidden = gauge.inference.hidden.get(name)
    return tensor if hidden is None else tensor.masked_fill(hidden.to(tensor.device), 0.0)


class _Start:
    """A gauge to start from: the strongest edge out of every unit is a power of two.

    Which power follows from the strongest path through the unit, whose value no move changes: it
    is spread evenly over the weights of the path, so that deep networks stay within the range of
    floating point. Factors are products and quotients of the weights themselves, without
    logarithms: a network rescaled by powers of two gives the same bits.
    """

    def __init__(self, gauge: GaugeGroup, skeleton: StrongestPaths) -> None:
        self._gauge = gauge
        out, into = skeleton.outward, skeleton.inward
        whole = ~out.zero & ~into.zero
        product, shift = np.frexp(np.where(whole, out.mantissas * into.mantissas, 0.5))
        value = np.log2(product) + shift + out.exponents + into.exponents
        share = out.lengths / np.maximum(out.lengths + into.lengths, 1)
        even = np.where(whole, np.round(value * share), 0).astype(np.int64)
        # A unit that leads nowhere is scaled by what enters it instead.
        alone = out.zero & ~into.zero
        self._mantissas = np.where(out.zero, 1.0, out.mantissas)
        self._mantissas[alone] = 1 / into.mantissas[alone]
        self._exponents = np.where(alone, -into.exponents, out.exponents - even)
        basis = gauge.basis
        bases = self._mantissas[basis.indices]
        powers = np.where(
            basis.data == 1, bases, np.where(basis.data == -1, 1 / bases, bases**basis.data)
        )
        padded = np.append(powers, 1.0)
        lengths = np.diff(basis.indptr)
        products = np.multiply.reduceat(padded, np.minimum(basis.indptr[:-1], len(powers)))
        self._classes = np.where(lengths > 0, products, 1.0)
        self._shifts = basis @ self._exponents.astype(float)

    def factors(self, name: str) -> list[Tensor]:
        """What to multiply a tensor by, in turn."""
        found = []
        for coefficient, rows, shape in self._gauge.terms(name):
            values = self._classes[rows] ** coefficient if coefficient != 1 else self._classes[rows]
            shifts = coefficient * self._shifts[rows]
            # Powers of two in two halves, so that neither leaves the range.
            half = np.trunc(shifts / 2)
            for part in (values * np.exp2(half), np.exp2(shifts - half)):
                found.append(torch.from_numpy(part).reshape(shape))
        return found


def _remove_one_sided(
    layers: list[OrbitTerms], count: int
) -> tuple[list[tuple[Mask, int, list[OrbitTerms]]], Mask]:
    """Zero the edges of units of which only one side is not zero, until there are none.

    Returns:
        The units taken out in turn, with the side they have (1 entering, -1 leaving) and the edges
        there; and all units that have no edges left.
    """
    removed: list[tuple[Mask, int, list[OrbitTerms]]] = []
    gone = np.zeros(count, bool)
    while True:
        sums = {sign: sums_by_unit(layers, count, sign=sign) for sign in (1, -1)}
        before = len(removed)
        for side in (1, -1):
            units = (sums[side] > 0) & (sums[-side] == 0) & ~gone
            if units.any():
                edges = []
                for i, layer in enumerate(layers):
                    touched = layer.pattern.touches(units) & (layer.terms > 0)
                    if touched.any():
                        edges.append(replace(layer, terms=np.where(touched, layer.terms, 0.0)))
                        rest = np.where(touched, 0.0, layer.terms)
                        layers[i] = replace(layer, terms=rest)
                removed.append((units, side, edges))
                gone |= units
                break  # These edges are gone, so the sums of the other side have changed.
        if len(removed) == before:
            return removed, (sums[1] == 0) & (sums[-1] == 0)


@dataclass(frozen=True)
class OrbitTerms:
    """What a tensor adds to a sum over the orbit: for the norm, its squared weights.

    Attributes:
        pattern: Which units the terms enter and leave.
        terms: At least zero, of the pattern's shape: entries that scale equally are added up.
    """

    pattern: Incidence
    terms: Floats


def sums_by_unit(
    layers: Sequence[OrbitTerms], count: int, *, sign: int = 0, square: bool = False
) -> Floats:
    """Σ exponent · term by unit, over all tensors; see `Incidence.sums_by_unit`."""
    sums = np.zeros(count)
    for layer in layers:
        sums += layer.pattern.sums_by_unit(layer.terms, count, sign=sign, square=square)
    return sums


def rescale(layers: Sequence[OrbitTerms], logs: Floats) -> list[OrbitTerms]:
    """The terms after multiplying units by exp(logs)."""
    return [
        replace(layer, terms=layer.terms * np.exp(2 * layer.pattern.exponents(logs)))
        for layer in layers
    ]


def minimize_orbit_sum(layers: Sequence[OrbitTerms], count: int) -> tuple[Floats, int, float]:
    """The log scales that minimise Σ terms · exp(2 exponents), the steps and the imbalance left."""
    logs = np.zeros(count)
    live = sums_by_unit(layers, count, square=True) > 0
    best, least = logs, np.inf
    for step in range(_MOST_STEPS + 1):
        weights = rescale(layers, logs)
        gradient = sums_by_unit(weights, count)
        sizes = sums_by_unit(weights, count, sign=1) + sums_by_unit(weights, count, sign=-1)
        imbalance = float(np.abs(gradient[live] / sizes[live]).max(initial=0.0))
        if imbalance <= TOLERANCE and imbalance > least / 2:
            break  # Rounding allows nothing better.
        if imbalance < least:
            best, least = logs, imbalance
        if imbalance == 0 or step == _MOST_STEPS:
            break
        direction = _solve_newton(weights, -gradient, live, count, min(1e-2, imbalance))
        direction *= min(1.0, _LONGEST / max(np.abs(direction).max(), 1e-300))
        logs = logs + _step_length(layers, logs, direction) * direction
    return best, step, least


def excess(layers: Sequence[OrbitTerms], logs: Floats, count: int) -> float:
    """How far the sum is from its smallest: to second order, what a Newton step would save."""
    weights = rescale(layers, logs)
    gradient = sums_by_unit(weights, count)
    live = sums_by_unit(weights, count, square=True) > 0
    return abs(float(gradient @ _solve_newton(weights, gradient, live, count, 1e-2)))


def _step_length(layers: Sequence[OrbitTerms], logs: Floats, direction: Floats) -> float:
    """How far to go along a Newton step: all the way, unless the sum grows."""
    value, length = _sum_after(layers, logs), 1.0
    while length > 1e-6 and _sum_after(layers, logs + length * direction) > value * (1 + 1e-13):
        length /= 2
    return length


def _sum_after(layers: Sequence[OrbitTerms], logs: Floats) -> float:
    """The sum after rescaling."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = sum(float(layer.terms.sum()) for layer in rescale(layers, logs))
    return value if np.isfinite(value) else np.inf


def _solve_newton(
    weights: list[OrbitTerms], right: Floats, live: Mask, count: int, tolerance: float
) -> Floats:
    """Solve Newton's equation."""
    size = sum(layer.terms.size for layer in weights)
    if count <= _MOST_UNITS and size <= _MOST_WEIGHTS:
        matrix = _second_derivatives(weights, count)[np.ix_(live, live)]
        solution = np.zeros(count)
        try:
            solution[live] = np.linalg.solve(matrix, right[live])
        except np.linalg.LinAlgError:
            return _conjugate_gradients(weights, right, live, count, tolerance)
        return solution
    return _conjugate_gradients(weights, right, live, count, tolerance)


def _second_derivatives(weights: list[OrbitTerms], count: int) -> Floats:
    """Second derivatives of half the sum, written out."""
    flat = np.zeros((count + 1) ** 2)
    for layer in weights:
        for one in layer.pattern.parts:
            for other in layer.pattern.parts:
                shape = np.broadcast_shapes(one.shape, other.shape)
                axes = tuple(a for a, n in enumerate(shape) if n == 1 < layer.terms.shape[a])
                sums = layer.terms.sum(axes, keepdims=True) if axes else layer.terms
                for u, p in zip(one.units, one.powers, strict=True):
                    for v, q in zip(other.units, other.powers, strict=True):
                        row = np.where(u == NO_UNIT, count, u).reshape(one.shape)
                        column = np.where(v == NO_UNIT, count, v).reshape(other.shape)
                        places = np.broadcast_to(row * (count + 1) + column, shape)
                        shares = sums * p.reshape(one.shape) * q.reshape(other.shape)
                        flat += np.bincount(places.reshape(-1), shares.reshape(-1), flat.size)
    return 2 * flat.reshape(count + 1, count + 1)[:count, :count]


def _conjugate_gradients(
    weights: list[OrbitTerms], right: Floats, live: Mask, count: int, tolerance: float
) -> Floats:
    """Solve Newton's equation by conjugate gradients, preconditioned by the diagonal."""
    diagonal = np.where(live, 2 * sums_by_unit(weights, count, square=True), 1.0)
    x, residual = np.zeros(count), np.where(live, right, 0.0)
    scaled = residual / diagonal
    direction, product = scaled.copy(), float(residual @ scaled)
    goal = tolerance**2 * product
    for _ in range(_MOST_INNER):
        if product <= goal or product == 0:
            break
        image = 2 * sum(
            layer.pattern.sums_by_unit(layer.terms * layer.pattern.exponents(direction), count)
            for layer in weights
        )
        curvature = float(direction @ image)
        if curvature <= 0:
            break
        step = product / curvature
        x += step * direction
        residual = residual - step * image
        scaled = residual / diagonal
        product, before = float(residual @ scaled), product
        direction = scaled + (product / before) * direction
    return x
