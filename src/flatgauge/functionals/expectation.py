"""The functional "expectation": how much the loss rises on average when the point is shaken."""

from __future__ import annotations

import math

import torch
from torch import Generator

from flatgauge.arguments import check_radius
from flatgauge.estimators import Estimate
from flatgauge.functionals.functional import check_pairs, functional, required
from flatgauge.geometry import Chart


@functional("expectation")
def expectation(
    chart: Chart,
    *,
    sigma: float | None = None,
    pairs: int = 16,
    caller: str = "expectation",
    generator: Generator | None = None,
) -> Estimate:
    r"""Mean change of the loss under noise in a geometry, in size, by antithetic pairs.

    Definition:
        .. math:: |E\,L(u) - L(0)|

        with u the geometry's noise of size σ. Each draw is the mean over u and -u, which
        cancels every odd order: the gradient does not add to the error.

    Args:
        chart: The loss around the point.
        sigma: The size of the noise; None for the geometry's default.
        pairs: Number of pairs, at least 2 and at most a million.
        caller: Who asks, for the message about a missing generator.
        generator: Source of randomness, required.

    Returns:
        The mean with its standard error, its sign in ``details["signed"]``; infinite if some
        displacement has infinite loss.

    Raises:
        ValueError: If `sigma` is not positive, there are fewer than two pairs or more than a
            million, or the generator is missing.
    """
    source = required(generator, caller)
    sigma = chart.sigma if sigma is None else sigma
    check_radius("sigma", sigma, chart.surface.dtype)
    check_pairs(pairs)
    base = chart.value(chart.origin)
    rises = []
    for _ in range(pairs):
        u = chart.noise(sigma, source)
        rises.append((chart.value(u) + chart.value(-u)) / 2 - base)
    draws = torch.tensor(rises, dtype=torch.float64)
    options = {"sigma": sigma, "pairs": pairs, **chart.noise_settings}
    if not torch.isfinite(draws).all():
        share = int((~torch.isfinite(draws)).sum())
        note = f"the loss overflows at {share} of {pairs} pairs; take a smaller `sigma`"
        return Estimate(math.inf, converged=False, options=options, notes=(*chart.notes, note))
    mean, stderr = float(draws.mean()), float(draws.std()) / math.sqrt(pairs)
    notes = chart.notes
    if abs(mean) < 2 * stderr:
        notes += ("not told apart from zero; draw more `pairs` or take a larger `sigma`",)
    return Estimate(
        abs(mean), stderr=stderr, details={"signed": mean}, options=options, notes=notes
    )
