"""A network written differently, by factors that a short text describes."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor, nn

from flatgauge.estimators.linalg import child_generator
from flatgauge.symmetry.find import find_gauge
from flatgauge.symmetry.gauge import GaugeGroup

_RANGE = re.compile(r"(layers|units)\s+(\S+?)\.\.(\S+)")


def rescaled(model: nn.Module, example: Tensor, rescaling: str, *, seed: int) -> nn.Module:
    """The same function with other weights.

    Args:
        model: Not changed.
        example: Some inputs.
        rescaling: ``"layers 5..25"``, ``"units 1/16..16"`` or ``"5, 4, 1/20"``.
        seed: Of random factors.

    Returns:
        A copy.

    Raises:
        ValueError: If the text has no meaning, or the network has no scale that is free.
    """
    kind, low, high, named = read_rescaling(rescaling)
    gauge = find_gauge(model, example)
    if kind != "units":
        gauge = gauge.layerwise()
    if not gauge.dim:
        raise ValueError(
            f"`rescaling={rescaling!r}` cannot be done: the network has no scale that is free; "
            "leave it out."
        )
    factors = _named(gauge, named) if named else _drawn(gauge, kind, low, high, seed)
    return gauge.rescale(model, gauge.move(factors))


def read_rescaling(text: str) -> tuple[str, float, float, tuple[float, ...]]:
    """Read how a network is to be rewritten.

    Args:
        text: As in a recipe.

    Returns:
        ``"layers"`` or ``"units"``, the range of random factors, and named factors if there are.

    Raises:
        ValueError: If it has no meaning.

    Example:
        >>> read_rescaling("units 1/4..4"), read_rescaling("5, 4, 1/20")[-1]
        (('units', 0.25, 4.0, ()), (5.0, 4.0, 0.05))
    """
    found = _RANGE.fullmatch(text.strip())
    try:
        if found:
            low, high = _number(found[2]), _number(found[3])
            if 0 < low <= high < math.inf:
                return found[1], low, high, ()
        else:
            named = tuple(_number(word) for word in text.split(","))
            if all(factor > 0 for factor in named) and math.isclose(math.prod(named), 1.0):
                return "layers", 0.0, 0.0, named
    except (ValueError, ZeroDivisionError):
        pass
    raise ValueError(
        f"`rescaling={text!r}` cannot be read; write 'layers 5..25' or 'units 1/16..16' for random "
        "factors of a range, or the factors of all layers, with product 1: '5, 4, 1/20'."
    )


def _number(word: str) -> float:
    """A number that may be written as a fraction."""
    return float(Fraction(word.strip()))


def _named(gauge: GaugeGroup, factors: tuple[float, ...]) -> list[float]:
    """The coordinates of named factors of layers."""
    if len(factors) != gauge.dim + 1:
        raise ValueError(
            f"`rescaling` names the factors of {len(factors)} layers, but the network has "
            f"{gauge.dim + 1} that can be rescaled one by one; name one factor for each."
        )
    # A coordinate is the scale of a hidden layer's output: the product of all factors up to it.
    return list(accumulate(factors, mul))[:-1]


def _drawn(gauge: GaugeGroup, kind: str, low: float, high: float, seed: int) -> Tensor:
    """Random coordinates: even factors of layers; even exponents of units, half of them shared."""
    generator = child_generator(seed, "rescaling")
    uniform = torch.rand(gauge.dim, generator=generator, dtype=torch.float64)
    if kind == "layers":
        return (low + (high - low) * uniform).cumprod(0)
    # Factors of single units alone would average out, to nearly the same for every network.
    places = {site: number for number, site in enumerate(dict.fromkeys(gauge.sites))}
    shared = torch.rand(len(places), generator=generator, dtype=torch.float64)
    shared = shared[[places[site] for site in gauge.sites]]
    return low * (high / low) ** ((uniform + shared) / 2)
