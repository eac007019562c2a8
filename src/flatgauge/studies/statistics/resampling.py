"""Bootstrap resamples as counts, and the interval that is read from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Below this many draws the ends of an interval are a matter of luck.
FEWEST = 100


def check_drawing(*, level: float, resamples: int, generator: Any) -> None:
    """Refuse settings of a bootstrap that mean nothing.

    Args:
        level: How often the interval shall hold the true value.
        resamples: How many times to resample.
        generator: Source of randomness.

    Raises:
        ValueError: If the level is not between 0 and 1.
    """
    check_generator(generator)
    check_many("resamples", resamples)
    if not 0 < level < 1:
        raise ValueError(f"`level={level!r}` must lie between 0 and 1; 0.95 is usual.")


def check_generator(generator: Any) -> None:
    """Refuse a source of randomness that is none of NumPy's."""
    if not isinstance(generator, np.random.Generator):
        raise TypeError(
            f"`generator` is a {type(generator).__name__}; random numbers come from a NumPy "
            "generator, pass `generator=np.random.default_rng(0)`."
        )


def check_many(name: str, number: Any) -> None:
    """Refuse a number of draws that is no integer or too small to read a quantile from."""
    if not isinstance(number, (int, np.integer)) or isinstance(number, bool):
        raise TypeError(f"`{name}={number!r}` must be an integer.")
    if number < FEWEST:
        raise ValueError(f"`{name}={number}` is too few; give at least {FEWEST}.")


def resampled(count: int, *, resamples: int, generator: np.random.Generator) -> Array:
    """Draw as many units as there are, with replacement, again and again.

    Args:
        count: How many units there are.
        resamples: How many times to draw.
        generator: Source of randomness.

    Returns:
        How often each unit was drawn, `(resamples, count)`. Every row sums to `count`.
    """
    drawn = generator.integers(count, size=(resamples, count))
    drawn += count * np.arange(resamples)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=resamples * count)
    return counts.reshape(resamples, count).astype(np.float64)


def interval(values: Array, *, level: float, units: int) -> tuple[float, float]:
    r"""The percentile interval, widened for the number of units that were resampled.

    Plain percentiles are too narrow for few units, as a normal quantile is where Student's t is
    due, and a variance with `n` where `n - 1` is. The ends are therefore taken further out, at

    .. math:: \Phi\big(\pm\sqrt{n / (n - 1)}\; t_{n - 1}\big)

    [hesterberg2015bootstrap]. Against the bias-corrected accelerated interval (BCa), in
    simulations with 8 to 100 networks and correlations from 0 to 0.9: this one held the truth at
    least as often for all three coefficients on normal values, and clearly more often for
    Pearson's on skewed ones (0.90 against 0.82 at 100 networks, where 0.95 is asked for).

    Args:
        values: The statistic on every resample; those that are not numbers are left out.
        level: How often the interval shall hold the true value.
        units: How many units were resampled.

    Returns:
        The lower and the upper end; both nan where fewer than two values are left.
    """
    from scipy.stats import norm, t

    known = values[~np.isnan(values)]
    if units < 2 or len(known) < 2:
        return math.nan, math.nan
    reach = math.sqrt(units / (units - 1)) * float(t.ppf((1 + level) / 2, units - 1))
    tail = float(norm.cdf(-reach))
    low, high = np.quantile(known, [tail, 1 - tail])
    return float(low), float(high)
