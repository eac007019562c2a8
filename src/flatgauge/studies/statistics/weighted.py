"""Correlations of many resamples at once: each resample is a row of counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flatgauge.studies.statistics.resampling import Array

#: Up to this many points all sums of signs are below 2^24 and exact in single precision.
EXACT = 4096


def levels(values: Array) -> NDArray[np.int64]:
    """Number the distinct values from the lowest up; equal values share a number.

    Args:
        values: The numbers, infinite ones too.

    Returns:
        Integers in the same order as the values.
    """
    found: NDArray[np.int64] = np.unique(values, return_inverse=True)[1].astype(np.int64)
    return found


def midranks(counts: Array, values: Array) -> Array:
    """Rank the points of every resample; equal points share the mean of their ranks.

    Args:
        counts: How often each point was drawn, `(resamples, points)`.
        values: The numbers, `(points,)`.

    Returns:
        The rank that each point has in each resample, `(resamples, points)`.
    """
    level = levels(values)
    order = np.argsort(level, kind="stable")
    starts = np.flatnonzero(np.diff(level[order], prepend=-1))
    sizes = np.add.reduceat(counts[:, order], starts, axis=1)
    shared: Array = np.cumsum(sizes, axis=1) - (sizes - 1) / 2
    return np.take(shared, level, axis=1)


def constant(counts: Array, values: Array) -> NDArray[np.bool_]:
    """Say which resamples hold one value only, and so have no correlation.

    Args:
        counts: How often each point was drawn, `(resamples, points)`.
        values: The numbers, `(points,)`.

    Returns:
        One truth value for each resample.
    """
    level = levels(values)
    lowest = np.where(counts > 0, level, len(level)).min(1)
    highest = np.where(counts > 0, level, -1).max(1)
    same: NDArray[np.bool_] = lowest == highest
    return same


def product_moment(counts: Array, x: Array, y: Array) -> Array:
    """Pearson's correlation of weighted points, row by row.

    Args:
        counts: How often each point was drawn, `(resamples, points)`.
        x: One side, `(points,)` or `(resamples, points)`.
        y: The other side, likewise.

    Returns:
        The correlations; nan where a side does not vary.
    """
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
