"""The smallest trace on an orbit: second derivatives summed over all ways to write a network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.links import level, links_of, vanishing
from flatgauge.symmetry.minimum import Edges, gap, rescaled, smallest_sum
from flatgauge.symmetry.pattern import NOTHING, Floats, Part, Pattern, pattern_of

#: What a direction must add to an exponent to count.
_SMALL = 1e-3


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
        steps: Newton steps taken.
        imbalance: The largest relative difference left between what enters and what leaves.
        gap: How far above the infimum the value is, by Newton's decrement.
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
    """Minimise the sum of second derivatives over a gauge group.

    A tensor times c has second derivatives over c². Every power of two that the network
    may have been multiplied by is first divided out, exactly, so that all ways to write it
    by powers of two give the same bits.

    Sums of estimated second derivatives may be negative by noise alone. If only these were set to
    zero, the sum would grow by what they lacked; so the others of the tensor are lowered by one
    factor, at which the sum of the tensor in one chosen form of the network stays what it is.

    Args:
        gauge: The group.
        diagonals: The second derivatives of every tensor that counts, by name.
        weights: Of every estimated tensor, what takes second derivatives to the chosen form, up to
            one factor per tensor: constant where entries scale by the same factor.

    Returns:
        The infimum.
    """
    weights = weights or {}
    shares, start, factors, kept = {}, {}, {}, {}
    layers: list[Edges] = []
    clipped = noisy = 0
    for name, diagonal in diagonals.items():
        values = diagonal.detach().double().cpu().numpy()
        factors[name] = np.ones(())
        if name not in gauge.names:
            shares[name] = start[name] = float(values.sum())
            continue
        pattern = _pattern(gauge, name)
        terms = np.asarray(values.sum(pattern.summed, keepdims=True))
        still = pattern.still(gauge.dim)
        shares[name] = float(terms[still].sum())
        moved = np.where(still, 0.0, terms)
        negative, ratio = moved < 0, 1.0
        clipped += int(negative.sum())
        if name in weights and negative.any():
            noisy += int(negative.sum())
            scale = weights[name].detach().double().cpu().numpy()
            scale = np.broadcast_to(scale, values.shape).max(pattern.summed, keepdims=True)
            ratio = max(float((moved * scale).sum() / (np.abs(moved) * scale).sum()), 0.0)
            ratio = 2 * ratio / (1 + ratio)  # From Σ t / Σ |t| to Σ t over the positive ones.
        terms = np.where(negative, 0.0, ratio * moved)
        start[name] = shares[name] + float(terms.sum())
        kept[name] = np.where(negative, 0.0, np.where(still, 1.0, ratio))
        layers.append(Edges(pattern, terms))
    layers, shift, scales, running = _started(layers, gauge.dim)
    logs, steps, imbalance = smallest_sum(layers, gauge.dim)
    for layer, best in zip(layers, rescaled(layers, logs), strict=True):
        name, pattern = layer.pattern.name, _pattern(gauge, layer.pattern.name)
        shares[name] += float(np.ldexp(best.terms.sum(), shift))
        growth = 2 * (pattern.exponents(scales) + layer.pattern.exponents(logs) / np.log(2))
        gone = np.abs(pattern.exponents(running)) > _SMALL
        factors[name] = np.where(gone, 0.0, kept[name] * np.exp2(growth))
    left = float(np.ldexp(gap(layers, logs, gauge.dim), shift))
    count = int(np.count_nonzero(running))
    return Infimum(shares, start, factors, count, clipped, noisy, steps, imbalance, left)


def _started(layers: list[Edges], count: int) -> tuple[list[Edges], int, Floats, Floats]:
    """Leave out what vanishes, and bring the rest to one size.

    Returns:
        The terms to start from over a power of two, that power, and the logarithms to base two of
        the scales that lead there, and a direction in which what vanishes does.
    """
    links = links_of(layers, count)
    running = vanishing(links)
    logs, fixed = level(links.among(np.abs(links.rows @ running) <= _SMALL))
    started, tops = [], []
    for layer in layers:
        gone = np.abs(layer.pattern.exponents(running)) > _SMALL
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
        found.append(Edges(_without(layer.pattern, fixed), terms))
    return found, shift, logs, running


def _pattern(gauge: GaugeGroup, name: str) -> Pattern:
    """How the second derivatives of a tensor hang on the scales: against its entries."""
    pattern = pattern_of(gauge, name)
    parts = tuple(_short(part) for part in pattern.parts)
    dims = (1,) * len(pattern.shape)
    shape = tuple(int(n) for n in np.broadcast_shapes(dims, *(part.shape for part in parts)))
    return Pattern(name, shape, tuple(replace(part, powers=-part.powers) for part in parts))


def _short(part: Part) -> Part:
    """A part without the axes along which it does not vary: all, where a tensor has one scale."""
    shape = (len(part.units), *part.shape)
    units, powers = part.units.reshape(shape), part.powers.reshape(shape)
    for axis in range(1, len(shape)):
        ahead = (slice(None),) * axis + (slice(0, 1),)
        if (units == units[ahead]).all() and (powers == powers[ahead]).all():
            units, powers = units[ahead], powers[ahead]
    flat = (len(units), math.prod(units.shape[1:]))
    return Part(units.shape[1:], units.reshape(flat), powers.reshape(flat))


def _without(pattern: Pattern, fixed: NDArray[np.bool_]) -> Pattern:
    """A pattern in which some units are not scaled."""
    padded = np.append(fixed, False)
    parts = tuple(
        replace(part, units=np.where(padded[part.units], NOTHING, part.units))
        for part in pattern.parts
    )
    return replace(pattern, parts=parts)
