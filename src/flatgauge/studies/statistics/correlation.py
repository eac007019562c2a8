"""How closely two columns go together, with an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatgauge.studies.statistics.resampling import Array, check_drawing, interval, resampled
from flatgauge.studies.statistics.sides import FEW_UNITS, Sides, check_kind, sides
from flatgauge.studies.statistics.weighted import correlations, levels

#: An interval narrower than this is rounding.
_NO_WIDTH = 1e-9


@dataclass(frozen=True)
class Correlation:
    """A correlation with its interval, or the reason why there is none.

    Attributes:
        kind: Which coefficient.
        value: From -1 to 1; nan if there is none, and then `reason` says why.
        low: Lower end of the interval.
        high: Upper end of the interval.
        level: How often such an interval holds the true value.
        count: How many networks it rests on.
        notes: What was left out, and how far the interval can be trusted.
        reason: Why there is no value, in a few words; empty if there is one.

    Example:
        >>> print(Correlation("kendall", 0.8, 0.55, 0.93, 0.95, 40))
        0.80 [0.55, 0.93]
        >>> print(Correlation("kendall", math.nan, math.nan, math.nan, 0.95, 40,
        ...                   reason="all the same"))
        —: all the same
    """

    kind: str
    value: float
    low: float
    high: float
    level: float
    count: int
    notes: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"—: {self.reason}"
        if math.isnan(self.low):
            return f"{self.value:.2f}"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def correlate(
    x: Any,
    y: Any,
    *,
    kind: str = "pearson",
    log: bool = False,
    names: tuple[str, str] = ("x", "y"),
    level: float = 0.95,
    resamples: int = 2000,
    generator: np.random.Generator,
) -> Correlation:
    """Correlate a measure with a target over networks.

    Pearson's coefficient asks how well a straight line fits, Spearman's and Kendall's (tau-b)
    only whether one side rises where the other does. With Kendall's the share of pairs of
    networks that both sides put in the same order is (1 + tau) / 2, where nothing is tied. The
    interval comes from a bootstrap over networks.

    A network without a value (nan) is left out and noted. An infinite value has a rank, so
    Spearman's and Kendall's keep it; Pearson's leaves it out. If fewer than three networks are
    left, or a side is the same for all of them up to rounding, there is no correlation: the
    value is nan and `reason` says why.

    Args:
        x: The measure, one number for each network.
        y: The target, in the same order.
        kind: `"pearson"`, `"spearman"` or `"kendall"`.
        log: Take the logarithm of `x` first: flatness spreads over decades. Only for `x` above 0.
        names: How the two sides are called in notes.
        level: How often the interval shall hold the true value.
        resamples: How many times to resample.
        generator: Source of randomness.

    Returns:
        The correlation with its interval.

    Example:
        >>> flatness, gap = [1.0, 2.0, 4.0, 3.0], [0.1, 0.2, 0.3, 0.4]
        >>> correlate(flatness, gap, kind="kendall", generator=np.random.default_rng(0)).value
        0.666...
    """
    check_kind(kind)
    check_drawing(level=level, resamples=resamples, generator=generator)
    finite = kind == "pearson" or log
    ready = sides(names, (x, y), finite=finite, log=names[0] if log else "")
    if ready.reason:
        return without_value(kind, ready, level)
    left, right = ready.columns
    counts = resampled(ready.count, resamples=resamples, generator=generator)
    values = correlations(kind, counts, left, right)
    return with_interval(kind, _by_scipy(kind, left, right), values, ready, level)


def without_value(kind: str, ready: Sides, level: float, reason: str = "") -> Correlation:
    """A correlation that cannot be taken, marked with the reason."""
    nan = math.nan
    return Correlation(
        kind, nan, nan, nan, level, ready.count, ready.notes, reason=reason or ready.reason
    )


def with_interval(
    kind: str, value: float, values: Array, ready: Sides, level: float
) -> Correlation:
    """Put a value, its resamples and what must be known about them together.

    Args:
        kind: Which coefficient.
        value: Of the networks as they are.
        values: Of every resample; nan where there is none.
        ready: The columns with their notes.
        level: How often the interval shall hold the true value.

    Returns:
        The correlation with its interval.
    """
    low, high = interval(values, level=level, units=ready.count)
    notes = ready.notes + doubts(values, low, high, units=ready.count, unit="networks")
    return Correlation(kind, value, low, high, level, ready.count, notes)


def doubts(values: Array, low: float, high: float, *, units: int, unit: str) -> tuple[str, ...]:
    """Sentences on what makes an interval less than it seems.

    Args:
        values: The statistic on every resample; nan where there is none.
        low: Lower end of the interval.
        high: Upper end.
        units: How many units were resampled.
        unit: What they are, in the plural.

    Returns:
        The sentences.
    """
    notes = []
    if undefined := int(np.isnan(values).sum()):
        notes.append(f"{undefined} of {len(values)} resamples had no value and were left out")
    if units < FEW_UNITS:
        notes.append(f"the interval rests on {units} {unit} and is rough")
    if high - low < _NO_WIDTH:
        notes.append("all resamples agree; the interval has no width, which is not certainty")
    return tuple(notes)


def _by_scipy(kind: str, x: Array, y: Array) -> float:
    """The coefficient of the networks as they are."""
    from scipy import stats

    if kind == "kendall":
        return float(stats.kendalltau(levels(x), levels(y)).statistic)
    if kind == "spearman":
        return float(stats.spearmanr(levels(x), levels(y)).statistic)
    # Scaled and centred, so that neither large nor far values lose digits.
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    return float(stats.pearsonr(x - x.mean(), y - y.mean()).statistic)
