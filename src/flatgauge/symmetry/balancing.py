"""The balanced representative: of all ways to write a network, the one of smallest norm."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatgauge.subject import unwrapped
from flatgauge.surface import LossSurface
from flatgauge.symmetry.finding import find_gauge
from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.minimum import TOLERANCE, Edges, rescaled, smallest_sum, total
from flatgauge.symmetry.of_surface import gauge_of
from flatgauge.symmetry.pattern import pattern_of
from flatgauge.symmetry.rescaling import copied
from flatgauge.symmetry.skeleton import Skeleton, strongest


@dataclass(frozen=True)
class Balance:
    """How a network was balanced.

    Attributes:
        factors: What every tensor was multiplied by: terms to be multiplied in turn.
        one_sided: Units that cannot be balanced as only one side of them is not zero, perhaps
            after others were left out, by name: that side has norm one.
        empty: Units without any weight that is not zero, by name: left as they are.
        irregular: Parameters that are no weights from unit to unit: for units that these alone
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
    def converged(self) -> bool:
        """Whether every unit is balanced."""
        return self.imbalance <= TOLERANCE


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
    inner = unwrapped(model)
    for name, parameter in inner.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ValueError(
                f"`{name}` of the model holds values that are nan or infinite, which no factor "
                "balances; the training diverged, or the checkpoint is damaged."
            )
    found = balance_of(gauge, dict(inner.named_parameters()))
    for caveat in checked(found):
        warnings.warn(caveat, stacklevel=2)
    twin = copied(inner)
    apply(found, twin)
    return twin


def balanced(surface: LossSurface) -> tuple[LossSurface, list[str]]:
    """The same loss and data on a balanced copy of the model.

    Args:
        surface: The surface; not changed.

    Returns:
        The surface of the copy, and what is to be said about it.
    """
    gauge, twin = gauge_of(surface), surface.twin()
    found = balance_of(gauge, dict(twin.model.named_parameters()))
    notes = [f"measured in the balanced gauge ({gauge.dim} scales fixed)", *checked(found)]
    apply(found, twin.model)
    return twin, notes


def checked(found: Balance) -> list[str]:
    """Refuse a balance that was not reached, and tell what is special about one that was.

    Args:
        found: The balance.

    Returns:
        Caveats, in words.

    Raises:
        RuntimeError: If the balance was not reached.
    """
    if not found.converged:
        raise RuntimeError(
            f"the balance was not reached: after {found.steps} Newton steps what enters and what "
            f"leaves a unit still differ by {found.imbalance:.1g} of their size; are there weights "
            "that differ by many powers of ten?"
        )
    if not found.one_sided and not found.empty:
        return []
    return [
        f"{len(found.one_sided)} units have weights on one side only, which got norm one, and "
        f"{len(found.empty)} have none: {', '.join([*found.one_sided, *found.empty][:8])}"
    ]


def apply(found: Balance, model: nn.Module) -> None:
    """Apply the factors of a balance to a model, in place.

    Args:
        found: The balance.
        model: The model it was computed for.
    """
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, factors in found.factors.items():
            value = state[name].double()
            for factor in factors:
                value = value * factor.to(value.device)
            state[name].copy_(value)


def balance_of(gauge: GaugeGroup, state: Mapping[str, Tensor]) -> Balance:
    """Compute the balanced form.

    Args:
        gauge: The network's gauge group.
        state: Its parameters, by name. Entries that a constant mask hides do not count.

    Returns:
        The factors that take it there.
    """
    state = {name: _shown(gauge, name, tensor.detach()) for name, tensor in state.items()}
    skeleton = strongest(gauge, state)
    start = _Start(gauge, skeleton)
    layers = []
    for name in gauge.names:
        if name in state:  # Stored means are no weights: their norm does not count.
            pattern = pattern_of(gauge, name)
            value = state[name].detach().double().cpu()
            for factor in start.factors(name):
                value = value * factor
            squares = value.square().numpy().sum(pattern.summed, keepdims=True)
            layers.append(Edges(pattern, np.where(pattern.still(gauge.dim), 0.0, squares)))
    empty = total(layers, gauge.dim, square=True) == 0
    removed, left = _peel(layers, gauge.dim)
    logs, steps, imbalance = smallest_sum(layers, gauge.dim)
    for units, side, edges in reversed(removed):
        weights = rescaled(edges, logs)
        sums = total(weights, gauge.dim, sign=side)[units]
        powers = total(weights, gauge.dim, square=True)[units] / sums  # One, but for pow and sqrt.
        logs[units] -= side * 0.5 * np.log(sums / powers) / powers
    names = _names(gauge)
    factors = {}
    for name in gauge.names:
        pattern = pattern_of(gauge, name)
        exponents = torch.from_numpy(np.array(pattern.exponents(logs)))
        factors[name] = [*start.factors(name), exponents.exp()]
    return Balance(
        factors,
        one_sided=tuple(names[u] for u in np.flatnonzero(left & ~empty)),
        empty=tuple(names[u] for u in np.flatnonzero(empty)),
        irregular=skeleton.irregular,
        steps=steps,
        imbalance=imbalance,
    )


def _shown(gauge: GaugeGroup, name: str, tensor: Tensor) -> Tensor:
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

    def __init__(self, gauge: GaugeGroup, skeleton: Skeleton) -> None:
        self._gauge = gauge
        out, into = skeleton.outward, skeleton.inward
        whole = ~out.zero & ~into.zero
        product, shift = np.frexp(np.where(whole, out.mantissas * into.mantissas, 0.5))
        value = np.log2(product) + shift + out.exponents + into.exponents
        share = out.lengths / np.maximum(out.lengths + into.lengths, 1)
        even = np.where(whole, np.round(value * share), 0).astype(np.int64)
        # A unit that leads nowhere is measured by what enters it instead.
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


def _peel(
    layers: list[Edges], count: int
) -> tuple[list[tuple[NDArray[np.bool_], int, list[Edges]]], NDArray[np.bool_]]:
    """Take out units of which only one side is not zero, with their edges, again and again.

    Returns:
        The units taken out in turn, with the side they have (1 entering, -1 leaving) and the edges
        there; and all units that have no edges left.
    """
    removed: list[tuple[NDArray[np.bool_], int, list[Edges]]] = []
    gone = np.zeros(count, bool)
    while True:
        sums = {sign: total(layers, count, sign=sign) for sign in (1, -1)}
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
                break  # The other side is looked at anew: these edges are gone.
        if len(removed) == before:
            return removed, (sums[1] == 0) & (sums[-1] == 0)


def _names(gauge: GaugeGroup) -> list[str]:
    """A name for every unit: where it is, and its number there."""
    seen: dict[str, int] = {}
    names = []
    for site in gauge.sites:
        seen[site] = seen.get(site, -1) + 1
        names.append(f"{site}[{seen[site]}]")
    return names
