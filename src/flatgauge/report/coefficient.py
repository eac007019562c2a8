"""A coefficient with its interval: as numbers, as text, and as a dot with whiskers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

#: How the columns of an interval end.
ENDS = ("_low", "_high")


@dataclass(frozen=True)
class Number:
    """A number as a page shows it.

    Attributes:
        shown: The text, rounded.
        full: The number as JSON has it, to the last digit.
        words: What is odd about it ("negative", "infinite", "not a number").
    """

    shown: str
    full: str
    words: tuple[str, ...] = ()


def number(value: float, shown: str | None = None) -> Number:
    """Prepare a number, written as `shown` or else with six digits.

    Returns:
        The number with its words.

    Example:
        >>> number(-0.25).words, number(float("inf")).words, number(2.0).full
        (('negative',), ('infinite',), '2.0')
    """
    text = f"{value:.6g}" if shown is None else shown
    if math.isnan(value):
        return Number(text, str(value), ("not a number",))
    words = (["negative"] if value < 0 else []) + (["infinite"] if math.isinf(value) else [])
    return Number(text, repr(value), tuple(words))


@dataclass(frozen=True)
class Coefficient:
    """A coefficient between -1 and 1, or a difference of two.

    Attributes:
        value: What it is; nan where it could not be computed.
        low: The lower end of its interval, None where there is none.
        high: The upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def number(self) -> Number:
        """The coefficient itself, to two digits after the point."""
        return number(self.value, with_sign(self.value))

    @property
    def interval(self) -> str:
        """The interval, empty where there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"[{with_sign(self.low)}, {with_sign(self.high)}]"

    @property
    def text(self) -> str:
        """The coefficient with its interval."""
        return f"{with_sign(self.value)} {self.interval}".strip()

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
    def is_known(self) -> bool:
        """Whether there is a number."""
        return not math.isnan(self.value)

    @property
    def follows(self) -> bool | None:
        """Whether the interval lies above zero; None where nothing can be said."""
        return None if self.low is None or not self.is_known else self.low > 0


def with_sign(value: float) -> str:
    """A coefficient as text, with a real minus sign.

    Args:
        value: The coefficient.

    Returns:
        The text.

    Example:
        >>> with_sign(0.913), with_sign(-0.2), with_sign(-0.001), with_sign(float("nan"))
        ('0.91', '−0.20', '0.00', 'none')
    """
    if math.isnan(value):
        return "none"
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text.replace("-", "−")


def coefficient(frame: pd.DataFrame, row: Any, column: str) -> Coefficient | None:
    """One coefficient of a frame with columns such as ``pearson``, ``pearson_low``.

    Args:
        frame: One row per measure.
        row: Which row.
        column: Which coefficient.

    Returns:
        The coefficient, None where the frame has none.
    """
    if column not in frame.columns or row not in frame.index:
        return None
    low, high = (_end(frame, row, column + end) for end in ENDS)
    return Coefficient(number_at(frame, row, column), low, high)


def _end(frame: pd.DataFrame, row: Any, column: str) -> float | None:
    found = number_at(frame, row, column) if column in frame.columns else math.nan
    return None if math.isnan(found) else found


def number_at(frame: pd.DataFrame, row: Any, column: str) -> float:
    """One number of a frame; nan where it has nothing there.

    Args:
        frame: The frame.
        row: Its row.
        column: Its column.

    Returns:
        The number.
    """
    found: Any = frame.at[row, column]
    return math.nan if found is None else float(found)


def fold_intervals(frame: pd.DataFrame) -> list[str]:
    """The columns of a frame, without those that are the ends of another's interval.

    Args:
        frame: The frame.

    Returns:
        Their names, in order.
    """
    columns = [str(column) for column in frame.columns]
    whole = [c for c in columns if all(c + end in columns for end in ENDS)]
    ends = {c + end for c in whole for end in ENDS}
    return [c for c in columns if c not in ends]
