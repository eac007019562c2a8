"""How closely a measure goes with a target, with an interval, and whether another goes closer.

In: columns of numbers, one per network. Out: `Statistic`, the one record of this package: a value
with its interval, or the reason why there is none. Networks without a number are left out, and a
note says how many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flatgauge.studies.statistics.bootstrap import (
    Array,
    check_drawing,
    correlations,
    draw_resamples,
    interval,
    levels,
)

#: Correlations by name.
KINDS = ("pearson", "spearman", "kendall")

#: Fewer points than this always lie on a line.
_FEWEST_POINTS = 3

#: Below this many units an interval is only a rough guide.
_FEW_UNITS = 10

#: A spread below this part of the size is rounding, not a difference between networks.
_ROUNDING = 1e-12

#: An interval narrower than this is rounding.
_NO_WIDTH = 1e-9


@dataclass(frozen=True)
class Statistic:
    """A statistic over networks with its interval, or the reason why there is none.

    Attributes:
        value: The statistic; nan if there is none, and then `reason` says why.
        low: Lower end of the interval; nan where there is none.
        high: Upper end of the interval.
        count: How many networks it rests on.
        notes: What was left out, and how far the interval can be trusted.
        reason: Why there is no value, in a few words; empty if there is one.
        details: What else is known, by name: see the function that made it.

    Example:
        >>> print(Statistic(0.8, 0.55, 0.93, 40))
        0.80 [0.55, 0.93]
        >>> print(Statistic(math.nan, reason="all the same"))
        —: all the same
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    count: int = 0
    notes: tuple[str, ...] = ()
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

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
) -> Statistic:
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
    ready = make_sides(names, (x, y), finite=finite, log=names[0] if log else "")
    if ready.reason:
        return without_value(ready)
    left, right = ready.columns
    counts = draw_resamples(ready.count, resamples=resamples, generator=generator)
    values = correlations(kind, counts, left, right)
    return with_interval(_by_scipy(kind, left, right), values, ready, level)


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
) -> Statistic:
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
        The first less the second: above 0, the first follows the target better. In `details` both
        correlations, `first` and `second`, and `better`: in what share of resamples the first one
        is the higher.
    """
    check_kind(kind)
    check_drawing(level=level, resamples=resamples, generator=generator)
    ready = make_sides(names, (first, second, target), finite=kind == "pearson")
    if ready.reason:
        return without_value(ready)
    one, other, aim = ready.columns
    whole = np.ones((1, ready.count))
    a, b = (float(correlations(kind, whole, side, aim)[0]) for side in (one, other))
    counts = draw_resamples(ready.count, resamples=resamples, generator=generator)
    values = correlations(kind, counts, one, aim) - correlations(kind, counts, other, aim)
    low, high = interval(values, level=level, units=ready.count)
    known = values[~np.isnan(values)]
    # A tie is half a win for each, so that a measure against itself gets one half.
    better = float((known > 0).mean() + (known == 0).mean() / 2) if len(known) else math.nan
    notes = ready.notes + doubts(values, low, high, units=ready.count, unit="networks")
    if len(known) and not known.any():
        notes = (*ready.notes, "no resample tells the two apart")
    details = {"first": a, "second": b, "better": better}
    return Statistic(a - b, low, high, ready.count, notes, details=details)


def without_value(ready: Sides, reason: str = "", **details: Any) -> Statistic:
    """A statistic that cannot be taken, with the reason."""
    notes, reason = ready.notes, reason or ready.reason
    return Statistic(math.nan, count=ready.count, notes=notes, reason=reason, details=details)


def with_interval(value: float, values: Array, ready: Sides, level: float) -> Statistic:
    """A value with the interval of its resamples, and what must be known about it."""
    low, high = interval(values, level=level, units=ready.count)
    notes = ready.notes + doubts(values, low, high, units=ready.count, unit="networks")
    return Statistic(value, low, high, ready.count, notes)


def doubts(values: Array, low: float, high: float, *, units: int, unit: str) -> tuple[str, ...]:
    """What makes an interval less than it seems; `unit` is what was resampled, in the plural."""
    notes = []
    if undefined := int(np.isnan(values).sum()):
        notes.append(f"{undefined} of {len(values)} resamples had no value and were left out")
    if units < _FEW_UNITS:
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


# -- columns made ready for a statistic ---------------------------------------------------------


@dataclass(frozen=True)
class Sides:
    """Columns of the same length with what was left out of them.

    Attributes:
        columns: The columns that are left, all of one length.
        notes: What was left out, in sentences.
        reason: Why no statistic can be taken, in a few words; empty if one can.
    """

    columns: tuple[Array, ...]
    notes: tuple[str, ...]
    reason: str = ""

    @property
    def count(self) -> int:
        """How many networks are left."""
        return len(self.columns[0])


def check_kind(kind: str) -> None:
    """Refuse a correlation that does not exist, and name those that do."""
    if kind not in KINDS:
        raise ValueError(f"`kind={kind!r}` is not known; choose one of {', '.join(KINDS)}.")


def as_column(values: Any, name: str) -> Array:
    """A column of numbers as a flat array in double precision."""
    try:
        if hasattr(values, "to_numpy"):  # pandas has gaps that are no floating-point numbers
            values = values.to_numpy(dtype=np.float64, na_value=np.nan)
        column = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` holds values that are not numbers; only numbers can be correlated."
        ) from error
    if column.ndim != 1:
        raise ValueError(f"`{name}` has shape {column.shape}; give one number for each network.")
    return column


def all_the_same(values: Array) -> bool:
    """Whether a column tells no two networks apart by more than rounding."""
    if len(values) == 0 or (values == values[0]).all():
        return True
    if not np.isfinite(values).all():
        return False
    low, high = float(values.min()), float(values.max())
    # Halves, because the difference of two large numbers may overflow.
    return high / 2 - low / 2 <= _ROUNDING * max(abs(low), abs(high)) / 2


def make_sides(
    names: Sequence[str], columns: Sequence[Any], *, finite: bool, log: str = ""
) -> Sides:
    """Columns without the networks that lack a number; `log` names one to take the logarithm of."""
    read = [as_column(column, name) for name, column in zip(names, columns, strict=True)]
    if len({len(column) for column in read}) > 1:
        lengths = ", ".join(f"`{n}` has {len(c)}" for n, c in zip(names, read, strict=True))
        raise ValueError(f"the columns differ in length: {lengths}; give one value per network.")
    usable = np.ones(len(read[0]), dtype=bool)
    notes: list[str] = []
    for name, column in zip(names, read, strict=True):
        notes += _missing(name, column, finite=finite)
        usable &= np.isfinite(column) if finite else ~np.isnan(column)
    left = [column[usable] for column in read]
    reason = _reason(names, left)
    if not reason and log:
        place = list(names).index(log)
        if left[place].min() <= 0:
            reason = f"{log}: not all positive"
        else:
            left[place] = np.log(left[place])
            reason = _reason(names, left)
    return Sides(tuple(left), tuple(notes), reason)


def _missing(name: str, column: Array, *, finite: bool) -> list[str]:
    """Sentences on the values that cannot be used."""
    notes = []
    if missing := int(np.isnan(column).sum()):
        notes.append(f"{missing} without a value of `{name}` left out")
    if finite and (infinite := int(np.isinf(column).sum())):
        notes.append(f"{infinite} with an infinite `{name}` left out")
    return notes


def _reason(names: Sequence[str], columns: Sequence[Array]) -> str:
    """Why these columns have no statistic."""
    if len(columns[0]) < _FEWEST_POINTS:
        return f"fewer than {_FEWEST_POINTS} networks"
    for name, column in zip(names, columns, strict=True):
        if all_the_same(column):
            return f"{name}: all the same"
    return ""
