"""Columns of numbers made ready for a statistic: what is left out, and what cannot be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatgauge.studies.statistics.resampling import Array

#: Correlations by name.
KINDS = ("pearson", "spearman", "kendall")

#: Fewer points than this always lie on a line.
FEWEST_POINTS = 3

#: Below this many units an interval is only a rough guide.
FEW_UNITS = 10

#: A spread below this part of the size is rounding, not a difference between networks.
ROUNDING = 1e-12


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
    """Read a column of numbers.

    Args:
        values: A sequence, an array or a pandas column.
        name: How the column is called.

    Returns:
        A flat array in double precision.

    Raises:
        TypeError: If the values are not numbers.
        ValueError: If they are not in one row.
    """
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
    return high / 2 - low / 2 <= ROUNDING * max(abs(low), abs(high)) / 2


def sides(names: Sequence[str], columns: Sequence[Any], *, finite: bool, log: str = "") -> Sides:
    """Make columns ready: networks with a missing number are left out of all of them.

    Args:
        names: How the columns are called.
        columns: The numbers.
        finite: Whether infinite values are left out too; ranks can keep them.
        log: The name of the column to take the logarithm of; none if empty.

    Returns:
        The columns that are left with notes, and a reason if no statistic can be taken.

    Raises:
        ValueError: If the columns have different lengths.
    """
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
    if len(columns[0]) < FEWEST_POINTS:
        return f"fewer than {FEWEST_POINTS} networks"
    for name, column in zip(names, columns, strict=True):
        if all_the_same(column):
            return f"{name}: all the same"
    return ""
