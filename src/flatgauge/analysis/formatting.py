"""How values and names are written: numbers with their digits, times, names, safe text.

Results and pages share these, so that one number reads the same everywhere. Nothing here loads
torch: the command line uses it before anything is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatgauge.estimators.estimate import Estimate

# Control characters but for tabs and ends of lines, separators, marks that turn the direction of
# writing, and halves of characters (from file names that are not UTF-8).
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

#: How a number came about, and what that means.
MARKS = {
    "exact": "the definition itself, up to rounding, on the samples given",
    "computed": "by an iterative solver that has met its tolerance",
    "estimated": "from random numbers; the standard error follows the value",
    "lower bound": "the best that a search has found; the true value may lie above",
    "not converged": "the solver stopped before its tolerance was met: do not rely on it",
    "failed": "could not be measured; the note says why",
}


def printable(text: str) -> str:
    r"""Write characters that a terminal would act on, or could not show, as ``\uXXXX``.

    In JSON this is the same text; tabs and ends of lines are left.

    Returns:
        The text.

    Example:
        >>> print(printable("net \x1b[31m"))
        net \u001b[31m
    """
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    r"""The same on a single line, for names.

    Returns:
        The text without tabs and ends of lines.

    Example:
        >>> print(one_line("net\n1"))
        net\u000a1
    """
    return printable(text).replace("\n", "\\u000a").replace("\t", "\\u0009")


def short_labels(names: Sequence[str]) -> dict[str, str]:
    """Names without what all of them begin and end with, cut between words.

    Returns:
        By name; the names themselves where nothing can be cut.

    Example:
        >>> short_labels(["runs/lenet_sgd_1.pt", "runs/lenet_adam_1.pt"])
        {'runs/lenet_sgd_1.pt': 'sgd', 'runs/lenet_adam_1.pt': 'adam'}
        >>> short_labels(["small", "large"])
        {'small': 'small', 'large': 'large'}
    """
    if len(names) < 2:
        return {name: name for name in names}
    parts = {name: re.findall(r"[^\W_]+|[\W_]", name) for name in names}
    least = min(map(len, parts.values()))
    front = next((i for i in range(least) if len({p[i] for p in parts.values()}) > 1), least)
    room = least - front
    back = next((i for i in range(room) if len({p[-1 - i] for p in parts.values()}) > 1), room)
    found = {n: "".join(p[front : len(p) - back]).strip("_-./ ") for n, p in parts.items()}
    # What is left must still say which is which.
    return (
        found
        if all(found.values()) and len(set(found.values())) == len(names)
        else {name: name for name in names}
    )


def two_digits(number: float) -> str:
    """Write a number to two digits.

    Returns:
        The text.

    Example:
        >>> two_digits(94.3), two_digits(0.0213), two_digits(12345.0)
        ('94', '0.021', '12000')
    """
    return f"{float(f'{number:.2g}'):g}"


def kind(estimate: Estimate) -> str:
    """How a number came about: one of `MARKS`."""
    if math.isnan(estimate.value):
        return "failed"
    if not estimate.converged:
        return "not converged"
    if estimate.lower_bound:
        return "lower bound"
    if estimate.exact:
        return "exact"
    return "estimated" if estimate.stderr > 0 else "computed"


def align_columns(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines in which the columns of a table stand under each other."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


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


def value_of(estimate: Estimate) -> Number:
    """The value of an estimate, written as in all tables."""
    return number(estimate.value, str(estimate))


def data_error_of(estimate: Estimate) -> Number | None:
    """The error from the choice of samples, where it is known."""
    error = estimate.data_stderr
    return None if error is None else number(error, f"± {two_digits(error)}")
