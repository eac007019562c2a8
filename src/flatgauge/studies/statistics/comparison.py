"""Whether one measure follows the target better than another, on the same networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatgauge.studies.statistics.correlation import doubts
from flatgauge.studies.statistics.resampling import check_drawing, interval, resampled
from flatgauge.studies.statistics.sides import check_kind, sides
from flatgauge.studies.statistics.weighted import correlations


@dataclass(frozen=True)
class CorrelationDifference:
    """The difference of two correlations with one target, or the reason why there is none.

    Attributes:
        kind: Which coefficient.
        first: The correlation of the first measure.
        second: The correlation of the second.
        value: The first less the second; nan if there is none.
        low: Lower end of the interval. Above 0, the first follows the target better.
        high: Upper end of the interval. Below 0, the second does.
        level: How often such an interval holds the true value.
        better: In what share of resamples the first correlation is the higher one.
        count: How many networks it rests on.
        notes: What was left out, and how far the interval can be trusted.
        reason: Why there is no value, in a few words; empty if there is one.
    """

    kind: str
    first: float
    second: float
    value: float
    low: float
    high: float
    level: float
    better: float
    count: int
    notes: tuple[str, ...] = ()
    reason: str = ""


def correlation_difference(
    first: Any,
    second: Any,
    target: Any,
    *,
    kind: str = "spearman",
    names: tuple[str, str, str] = ("first", "second", "target"),
    level: float = 0.95,
    resamples: int = 2000,
    generator: np.random.Generator,
) -> CorrelationDifference:
    """Take the difference of two measures' correlations with a target.

    Both correlations are taken on the same resamples, so what the networks have in common
    cancels. Two separate intervals may overlap where this one is clear of 0. Networks that lack
    one of the three numbers are left out of both. Signs count: a measure that follows the target
    the wrong way round is the worse one.

    Args:
        first: The one measure, one number for each network.
        second: The other measure.
        target: What both shall foretell.
        kind: `"pearson"`, `"spearman"` or `"kendall"`.
        names: How the columns are called in notes.
        level: How often the interval shall hold the true value.
        resamples: How many times to resample.
        generator: Source of randomness.

    Returns:
        The difference with its interval.
    """
    check_kind(kind)
    check_drawing(level=level, resamples=resamples, generator=generator)
    ready = sides(names, (first, second, target), finite=kind == "pearson")
    nan = math.nan
    if ready.reason:
        return CorrelationDifference(
            kind, nan, nan, nan, nan, nan, level, nan, ready.count, ready.notes, ready.reason
        )
    one, other, aim = ready.columns
    whole = np.ones((1, ready.count))
    a, b = (float(correlations(kind, whole, side, aim)[0]) for side in (one, other))
    counts = resampled(ready.count, resamples=resamples, generator=generator)
    values = correlations(kind, counts, one, aim) - correlations(kind, counts, other, aim)
    low, high = interval(values, level=level, units=ready.count)
    known = values[~np.isnan(values)]
    # A tie is half a win for each, so that a measure against itself gets one half.
    better = float((known > 0).mean() + (known == 0).mean() / 2) if len(known) else nan
    notes = ready.notes + doubts(values, low, high, units=ready.count, unit="networks")
    if len(known) and not known.any():
        notes = (*ready.notes, "no resample tells the two apart")
    return CorrelationDifference(kind, a, b, a - b, low, high, level, better, ready.count, notes)
