"""A number in a page: what is shown, and the number itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatgauge.analysis.text_table import kind, two_digits
from flatgauge.estimators.estimate import Estimate


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
    """Prepare a number.

    Args:
        value: The number.
        shown: How it is written; None for six digits.

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


#: What the marks of numbers mean.
MARKS = {
    "exact": "the definition itself, up to rounding, on the samples given",
    "computed": "by an iterative solver that has met its tolerance",
    "estimated": "from random numbers; the standard error follows the value",
    "lower bound": "the best that a search has found; the true value may lie above",
    "not converged": "the solver stopped before its tolerance was met: do not rely on it",
    "failed": "could not be measured; the note says why",
}


def mark_of(estimate: Estimate) -> str:
    """How a number came about: one of `MARKS`."""
    return kind(estimate)
