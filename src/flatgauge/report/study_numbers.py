"""The statistics of a study as the tables of its page show them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from flatgauge.analysis.formatting import Number, number
from flatgauge.report.coefficient import ENDS, Coefficient, coefficient, folded, number_at
from flatgauge.report.frame_table import cell

if TYPE_CHECKING:
    import pandas as pd

Cell: TypeAlias = Coefficient | Number | str | None

#: Correlations in the order of their columns, with their names in sentences.
COEFFICIENTS = {
    "pearson": "Pearson",
    "pearson_log": "Pearson (log)",
    "spearman": "Spearman",
    "kendall": "Kendall",
}

#: Which of them sentences speak of, the first that is there: ranks do not depend on the axis.
_SPOKEN = ("spearman", "kendall", "pearson")

#: Where the next note begins in a text of several: with the columns that it is about.
_NEXT = re.compile(r"; (?=[\w\[\]]+(?:, [\w\[\]]+)*: )")

#: Correlations that differ by less than this are called the same.
SAME = 0.005


def spoken(correlations: pd.DataFrame) -> str | None:
    """The coefficient that sentences speak of, None where the frame has none.

    Args:
        correlations: One row per measure.

    Returns:
        Its column.
    """
    return next((name for name in _SPOKEN if name in correlations.columns), None)


def correlation_text(correlations: pd.DataFrame | None, row: Any, *, log: bool) -> str:
    """The correlations of a row, one per line, as the title of a panel.

    Args:
        correlations: One row per measure, or per measure and layer.
        row: Which.
        log: Whether the panel shows the measure on a logarithmic axis.

    Returns:
        Pearson's on the shown scale, and Spearman's; empty where there is none.
    """
    if correlations is None:
        return ""
    straight = ("pearson_log", "pearson") if log else ("pearson",)
    names = [next((n for n in straight if n in correlations.columns), ""), "spearman"]
    if not any(name in correlations.columns for name in names):
        names = ["kendall"]
    found = [(COEFFICIENTS[n], coefficient(correlations, row, n)) for n in names if n]
    return "\n".join(f"{name} {item.text}" for name, item in found if item is not None)


@dataclass(frozen=True)
class MeasureRow:
    """One measure and its statistics.

    Attributes:
        measure: Its name.
        cells: By column.
        count: How many networks they come from, None where that is not told.
        footnotes: Numbers of the notes on it.
    """

    measure: str
    cells: dict[str, Cell]
    count: Number | None
    footnotes: list[int]


def correlation_rows(correlations: pd.DataFrame, notes: Sequence[str]) -> list[MeasureRow]:
    """The rows of the table of correlations.

    Args:
        correlations: One row per measure.
        notes: The notes that rows refer to, in the order of their numbers.

    Returns:
        The rows.
    """
    shown = [name for name in COEFFICIENTS if name in correlations.columns]
    return [_row(correlations, measure, shown, notes) for measure in correlations.index]


def other_rows(correlations: pd.DataFrame) -> list[MeasureRow]:
    """What else is known: within cells, information, with confounders held still.

    Args:
        correlations: One row per measure.

    Returns:
        The rows, none where there are no other columns.
    """
    known = {*COEFFICIENTS, "count", "notes"}
    known |= {name + end for name in COEFFICIENTS for end in ENDS}
    shown = [name for name in folded(correlations) if name not in known]
    if not shown:
        return []
    return [_row(correlations, measure, shown, ()) for measure in correlations.index]


def _row(
    frame: pd.DataFrame, measure: Any, columns: Sequence[str], notes: Sequence[str]
) -> MeasureRow:
    cells = {name: _cell(frame, measure, name) for name in columns}
    count = None
    if "count" in frame.columns:
        value = number_at(frame, measure, "count")
        count = number(value, "—" if value != value else f"{value:.0f}")
    return MeasureRow(str(measure), cells, count, _footnotes(frame, measure, notes))


def _footnotes(frame: pd.DataFrame, row: Any, notes: Sequence[str]) -> list[int]:
    """The numbers of the notes on a row, from 1."""
    return [1 + notes.index(told) for told in notes_of(frame, row) if told in notes]


def _cell(frame: pd.DataFrame, row: Any, column: str) -> Cell:
    """A coefficient where it is one or has an interval, else what stands there."""
    if column in COEFFICIENTS or all(column + end in frame.columns for end in ENDS):
        return coefficient(frame, row, column)
    found = cell(frame.at[row, column])
    if isinstance(found, str):
        return found or None
    value = float(found.full)
    return number(value, f"{value:.3g}")


def notes_of(frame: pd.DataFrame, row: Any) -> list[str]:
    """The notes on a row, one by one.

    Args:
        frame: Any frame of statistics, perhaps with a column ``notes``: texts, each after the
            column it is about, joined by semicolons; or lists of texts.
        row: Which row.

    Returns:
        The notes.
    """
    told: Any = frame.at[row, "notes"] if "notes" in frame.columns else ""
    if isinstance(told, (list, tuple)):
        return [str(part) for part in told]
    return [part for part in _NEXT.split(told.strip()) if part] if isinstance(told, str) else []


@dataclass(frozen=True)
class ChangeRow:
    """One measure before and after all networks were rescaled.

    Attributes:
        measure: Its name.
        before: Its correlation with the target.
        after: The same, after the rescaling.
        how: "same", "apart", "moved" or "unknown".
        word: What became of it, in a word or two.
        others: Further columns, by name.
        footnotes: Numbers of the notes on it.
    """

    measure: str
    before: Coefficient | None
    after: Coefficient | None
    how: str
    word: str
    others: dict[str, Cell]
    footnotes: list[int]


def change_rows(before_after: pd.DataFrame, notes: Sequence[str] = ()) -> list[ChangeRow]:
    """The rows of the table of what a rescaling does.

    Args:
        before_after: One row per measure; columns ``before``, ``after`` with their intervals,
            and others.
        notes: The notes that rows refer to, in the order of their numbers.

    Returns:
        The rows.
    """
    shown = [c for c in folded(before_after) if c not in ("before", "after", "count", "notes")]
    found = []
    for measure in before_after.index:
        before, after = (coefficient(before_after, measure, time) for time in ("before", "after"))
        rest = {c: _cell(before_after, measure, c) for c in shown}
        told = _footnotes(before_after, measure, notes)
        became = _became(before, after)
        found.append(ChangeRow(str(measure), before, after, *became, rest, told))
    return found


def _became(before: Coefficient | None, after: Coefficient | None) -> tuple[str, str]:
    """What became of a correlation: how, and in words."""
    if before is None or after is None or not (before.known and after.known):
        return "unknown", "cannot be told"
    change = after.value - before.value
    if abs(change) < SAME:
        return "same", "the same"
    if before.follows and after.follows is False:
        return "apart", "falls apart"
    return "moved", f"{'lower' if change < 0 else 'higher'} by {abs(change):.2f}"


def change_kind(before_after: pd.DataFrame | None, correlations: pd.DataFrame) -> str:
    """Which coefficient was compared before and after, found by its values.

    Args:
        before_after: One row per measure.
        correlations: One row per measure.

    Returns:
        Its name, or "correlation" where none of those that are known has these values.
    """
    if before_after is None or "before" not in before_after.columns:
        return "correlation"
    both = [name for name in before_after.index if name in correlations.index]
    first = before_after.loc[both, "before"].astype(float)
    for name in COEFFICIENTS if first.notna().any() else ():
        if name in correlations.columns:
            other = correlations.loc[both, name].astype(float)
            if (((first - other).abs() < 1e-9) | (first.isna() & other.isna())).all():
                return COEFFICIENTS[name]
    return "correlation"
