"""How values and names are written: numbers with their digits, kinds of numbers, safe text.

Results and pages share these, so that one number reads the same everywhere. Nothing here loads
torch: the command line uses it before anything is computed.
"""

from __future__ import annotations

import math
import re
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
