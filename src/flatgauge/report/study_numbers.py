"""The statistics of a study as a page shows them: coefficients with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatgauge.report.number import Number, number

if TYPE_CHECKING:
    import pandas as pd

#: Correlations in the order of their columns, with their names in sentences.
COEFFICIENTS = {"pearson": "Pearson", "spearman": "Spearman", "kendall": "Kendall"}

#: Which of them sentences speak of, the first that is there: ranks do not depend on the axis.
_SPOKEN = ("spearman", "kendall", "pearson")

#: Correlations that differ by less than this are called the same.
SAME = 0.005


@dataclass(frozen=True)
class Coefficient:
    """A coefficient between -1 and 1.

    Attributes:
        value: What it is.
        low: The lower end of its interval, None where there is none.
        high: The upper end.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def number(self) -> Number:
        """The coefficient itself, to two digits after the point."""
        return number(self.value, signed(self.value))

    @property
    def interval(self) -> str:
        """The interval, empty where there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"[{signed(self.low)}, {signed(self.high)}]"

    @property
    def text(self) -> str:
        """The coefficient with its interval."""
        return f"{signed(self.value)} {self.interval}".strip()

    @property
    def places(self) -> tuple[float, float, float]:
        """Where low end, coefficient and high end lie on a line from 0 to 100."""
        ends = (
            self.value if self.low is None else self.low,
            self.value,
            self.value if self.high is None else self.high,
        )
        low, middle, high = (50 + 50 * min(max(end, -1.0), 1.0) for end in ends)
        return low, middle, high

    @property
    def follows(self) -> bool | None:
        """Whether the interval lies above zero; None where nothing can be said."""
        if self.low is None or math.isnan(self.value):
            return None
        return self.low > 0


def signed(value: float) -> str:
    """A coefficient as text, with a real minus sign.

    Args:
        value: The coefficient.

    Returns:
        The text.

    Example:
        >>> signed(0.913), signed(-0.2), signed(-0.001), signed(float("nan"))
        ('0.91', '−0.20', '0.00', 'none')
    """
    if math.isnan(value):
        return "none"
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text.replace("-", "−")


def coefficient(frame: pd.DataFrame, measure: Any, column: str) -> Coefficient | None:
    """One coefficient of a frame with columns such as ``pearson``, ``pearson_low``.

    Args:
        frame: One row per measure.
        measure: Which row.
        column: Which coefficient.

    Returns:
        The coefficient, None where the frame has none.
    """
    if column not in frame.columns or measure not in frame.index:
        return None
    value = number_at(frame, measure, column)
    ends = [_end(frame, measure, f"{column}_{end}") for end in ("low", "high")]
    return Coefficient(value, *ends)


def number_at(frame: pd.DataFrame, row: Any, column: str) -> float:
    """One number of a frame; nan where it has nothing there."""
    found: Any = frame.at[row, column]
    return math.nan if found is None else float(found)


def _end(frame: pd.DataFrame, measure: Any, column: str) -> float | None:
    if column not in frame.columns:
        return None
    found = number_at(frame, measure, column)
    return None if math.isnan(found) else found


def spoken(correlations: pd.DataFrame) -> str | None:
    """The coefficient that sentences speak of, None where the frame has none.

    Args:
        correlations: One row per measure.

    Returns:
        Its column.
    """
    return next((name for name in _SPOKEN if name in correlations.columns), None)


def correlation_text(correlations: pd.DataFrame | None, row: Any) -> str:
    """The correlations of a row in one line, as the title of a panel.

    Args:
        correlations: One row per measure, or per measure and layer.
        row: Which.

    Returns:
        The text, empty where there is none.
    """
    if correlations is None:
        return ""
    names = [name for name in ("pearson", "spearman") if name in correlations.columns]
    names = names or [name for name in COEFFICIENTS if name in correlations.columns]
    found = [(COEFFICIENTS[name], coefficient(correlations, row, name)) for name in names]
    return "\n".join(f"{name} {item.text}" for name, item in found if item is not None)


@dataclass(frozen=True)
class CorrelationRow:
    """One measure and how it goes with the target.

    Attributes:
        measure: Its name.
        cells: By column of the coefficient.
        count: How many networks it comes from, None where that is not told.
        footnotes: Numbers of the notes on it.
    """

    measure: str
    cells: dict[str, Coefficient | None]
    count: Number | None
    footnotes: list[int]


def correlation_rows(correlations: pd.DataFrame, notes: Sequence[str]) -> list[CorrelationRow]:
    """The rows of the table of correlations.

    Args:
        correlations: One row per measure.
        notes: The notes that rows refer to, in the order of their numbers.

    Returns:
        The rows.
    """
    shown = [name for name in COEFFICIENTS if name in correlations.columns]
    found = []
    for measure in correlations.index:
        cells = {name: coefficient(correlations, measure, name) for name in shown}
        count = None
        if "count" in correlations.columns:
            value = number_at(correlations, measure, "count")
            count = number(value, f"{value:.0f}")
        told = note_of(correlations, measure)
        footnotes = [1 + notes.index(told)] if told else []
        found.append(CorrelationRow(str(measure), cells, count, footnotes))
    return found


def note_of(correlations: pd.DataFrame, measure: Any) -> str:
    """The note on a row, empty where there is none."""
    if "notes" not in correlations.columns:
        return ""
    told: Any = correlations.at[measure, "notes"]
    if isinstance(told, (list, tuple)):
        return "; ".join(str(part) for part in told)
    return told.strip() if isinstance(told, str) else ""


def other_columns(correlations: pd.DataFrame) -> list[str]:
    """What else the frame tells: within cells, information, with other things held still."""
    shown = {f"{name}{end}" for name in COEFFICIENTS for end in ("", "_low", "_high")}
    return [str(c) for c in correlations.columns if c not in shown | {"count", "notes"}]


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
    """

    measure: str
    before: Coefficient | None
    after: Coefficient | None
    how: str
    word: str
    others: dict[str, Number | None]


def change_rows(before_after: pd.DataFrame) -> list[ChangeRow]:
    """The rows of the table of what a rescaling does.

    Args:
        before_after: One row per measure; columns ``before``, ``after`` with their intervals,
            and others.

    Returns:
        The rows.
    """
    ends = {f"{time}{end}" for time in ("before", "after") for end in ("", "_low", "_high")}
    others = [str(c) for c in before_after.columns if c not in ends and _numeric(before_after[c])]
    found = []
    for measure in before_after.index:
        before, after = (coefficient(before_after, measure, time) for time in ("before", "after"))
        rest = {c: _other(number_at(before_after, measure, c)) for c in others}
        found.append(ChangeRow(str(measure), before, after, *_became(before, after), rest))
    return found


def _numeric(column: Any) -> bool:
    return column.dtype.kind in "fiu"


def _other(value: float) -> Number | None:
    return None if math.isnan(value) else number(value, f"{value:.3g}")


def _became(before: Coefficient | None, after: Coefficient | None) -> tuple[str, str]:
    """What became of a correlation: how, and in words."""
    if before is None or after is None or math.isnan(before.value) or math.isnan(after.value):
        return "unknown", "cannot be told"
    change = after.value - before.value
    if abs(change) < SAME:
        return "same", "the same"
    if before.follows and after.follows is False:
        return "apart", "falls apart"
    return "moved", f"{'lower' if change < 0 else 'higher'} by {abs(change):.2f}"
