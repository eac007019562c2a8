"""Bootstrap resamples as counts, coefficients of many resamples at once, and intervals.

In: columns of numbers, one per network, and a NumPy generator. Out: coefficients, one for each
resample, and the ends of an interval. A resample is a row of counts: how often each network was
drawn. Coefficients are computed for all rows together, which is what makes intervals affordable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Below this many draws the ends of an interval are a matter of luck.
_FEWEST = 100

#: Up to this many points all sums of signs are below 2^24 and exact in single precision.
EXACT = 4096


def check_drawing(*, level: float, resamples: int, generator: Any) -> None:
    """Refuse settings of a bootstrap that mean nothing."""
    check_generator(generator)
    check_many("resamples", resamples)
    if not 0 < level < 1:
        raise ValueError(f"`level={level!r}` must lie between 0 and 1; 0.95 is usual.")


def check_generator(generator: Any) -> None:
    """Refuse a source of randomness that is not a NumPy generator."""
    if not isinstance(generator, np.random.Generator):
        raise TypeError(
            f"`generator` is a {type(generator).__name__}; random numbers come from a NumPy "
            "generator, pass `generator=np.random.default_rng(0)`."
        )


def check_many(name: str, number: Any) -> None:
    """Refuse a number of draws from which no quantile can be read."""
    if not isinstance(number, (int, np.integer)) or isinstance(number, bool):
        raise TypeError(f"`{name}={number!r}` must be an integer.")
    if number < _FEWEST:
        raise ValueError(f"`{name}={number}` is too few; give at least {_FEWEST}.")


def draw_resamples(count: int, *, resamples: int, generator: np.random.Generator) -> Array:
    """How often each of `count` units is drawn, `(resamples, count)`; rows sum to `count`."""
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


def levels(values: Array) -> NDArray[np.int64]:
    """Number the distinct values from the lowest up; equal values share a number."""
    found: NDArray[np.int64] = np.unique(values, return_inverse=True)[1].astype(np.int64)
    return found


def midranks(counts: Array, values: Array) -> Array:
    """The rank of each point in each resample; equal points share the mean of their ranks."""
    level = levels(values)
    order = np.argsort(level, kind="stable")
    starts = np.flatnonzero(np.diff(level[order], prepend=-1))
    sizes = np.add.reduceat(counts[:, order], starts, axis=1)
    shared: Array = np.cumsum(sizes, axis=1) - (sizes - 1) / 2
    return np.take(shared, level, axis=1)


def constant(counts: Array, values: Array) -> NDArray[np.bool_]:
    """Which resamples hold one value only, and so have no correlation."""
    level = levels(values)
    lowest = np.where(counts > 0, level, len(level)).min(1)
    highest = np.where(counts > 0, level, -1).max(1)
    same: NDArray[np.bool_] = lowest == highest
    return same


def product_moment(counts: Array, x: Array, y: Array) -> Array:
    """Pearson's correlation of weighted points, row by row; nan where a side does not vary."""
    total = counts.sum(1, keepdims=True)
    x = x - (counts * x).sum(1, keepdims=True) / total
    y = y - (counts * y).sum(1, keepdims=True) / total
    # Two roots instead of the root of a product, which would underflow.
    spread = np.sqrt((counts * x * x).sum(1)) * np.sqrt((counts * y * y).sum(1))
    moved = np.where(spread > 0, spread, np.nan)
    found: Array = np.clip((counts * x * y).sum(1) / moved, -1.0, 1.0)
    return found


def _pearson(counts: Array, x: Array, y: Array) -> Array:
    return product_moment(counts, x / np.abs(x).max(), y / np.abs(y).max())


def _spearman(counts: Array, x: Array, y: Array) -> Array:
    return product_moment(counts, midranks(counts, x), midranks(counts, y))


def _kendall(counts: Array, x: Array, y: Array) -> Array:
    """Tau-b from sums of signs over all pairs, which are quadratic forms of the counts."""
    if len(x) > EXACT:
        return _kendall_one_by_one(counts, x, y)
    a, b = (np.sign(np.subtract.outer(v, v)).astype(np.float32) for v in (levels(x), levels(y)))
    drawn = counts.astype(np.float32)
    sums = [((drawn @ m) * drawn).sum(1, dtype=np.float64) for m in (a * b, np.abs(a), np.abs(b))]
    spread = np.sqrt(sums[1] * sums[2])
    found: Array = np.clip(sums[0] / np.where(spread > 0, spread, np.nan), -1.0, 1.0)
    return found


def _kendall_one_by_one(counts: Array, x: Array, y: Array) -> Array:
    """Tau-b of each resample by sorting: slower for few points, but no table of all pairs."""
    from scipy.stats import kendalltau

    left, right, found = levels(x), levels(y), []
    for row, same in zip(counts, constant(counts, x) | constant(counts, y), strict=True):
        drawn = np.repeat(np.arange(len(x)), row.astype(np.int64))
        found.append(np.nan if same else float(kendalltau(left[drawn], right[drawn]).statistic))
    return np.array(found)


_BY_KIND: dict[str, Callable[[Array, Array, Array], Array]] = {
    "pearson": _pearson,
    "spearman": _spearman,
    "kendall": _kendall,
}


def correlations(kind: str, counts: Array, x: Array, y: Array) -> Array:
    """Correlate two sides in every resample.

    Args:
        kind: `"pearson"`, `"spearman"` or `"kendall"` (tau-b).
        counts: How often each point was drawn, `(resamples, points)`.
        x: One side, `(points,)`.
        y: The other side.

    Returns:
        The correlations, `(resamples,)`; nan where a side has one value only.
    """
    found = _BY_KIND[kind](counts, x, y)
    # Rounding can leave a spread where there is none, so this is decided on the values.
    return np.where(constant(counts, x) | constant(counts, y), np.nan, found)
