"""Which of several models is flatter, as far as their errors let one tell."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flatgauge.estimators import Estimate
from flatgauge.precision import DOUBLE, SINGLE
from flatgauge.report.pairs import DataError, difference

#: How many combined errors two values must lie apart to be told apart.
APART = 2.0

#: Relative differences that are rounding, by precision; half precisions keep three digits.
_ROUNDING = {"float64": DOUBLE, "float32": SINGLE}
_COARSE = 1e-2


def rounding_of(dtype: str) -> float:
    """The relative difference that rounding alone can make in a precision."""
    return _ROUNDING.get(dtype, _COARSE)


def flatter(
    first: Estimate,
    second: Estimate,
    *,
    error: DataError | None = None,
    rounding: float = SINGLE,
) -> bool:
    """Whether the first value is below the second by more than both may be off.

    Where the samples are paired, the interval of the difference must lie below zero. Else
    standard errors are independent and add as squares, and bounds of solvers add as they are;
    this then holds for the samples given.

    Args:
        first: One estimate.
        second: The other.
        error: From the choice of samples; plays a part if it is paired.
        rounding: The relative difference that rounding can make.

    Returns:
        True only if they lie more than twice their combined error apart, or the interval of the
        paired difference lies below zero. An error that is not known (nan) tells nothing apart.

    Example:
        >>> flatter(Estimate(1.0, stderr=0.1), Estimate(1.2, stderr=0.1))
        False
        >>> flatter(Estimate(1.0, stderr=0.1), Estimate(1.3, stderr=0.1))
        True
        >>> flatter(Estimate(1.0), Estimate(1.3), error=DataError(0.2, samples=100))
        False
    """
    if not first.value < second.value:
        return False
    if math.isinf(second.value - first.value):
        return True
    if error is not None and error.paired:
        return difference(first, second, error, rounding=rounding).high < 0
    off = math.hypot(first.stderr, second.stderr) + (first.bound or 0.0) + (second.bound or 0.0)
    size = max(abs(first.value), abs(second.value))
    return second.value - first.value > max(APART * off, rounding * size)


def ranked(
    estimates: Mapping[str, Estimate],
    *,
    errors: Mapping[tuple[str, str], DataError] | None = None,
    rounding: float = SINGLE,
) -> dict[str, int | None]:
    """Give every model its rank: one more than the number of models that are flatter.

    Args:
        estimates: Of one measure, by model.
        errors: From the choice of samples, by two models.
        rounding: The relative difference that rounding can make.

    Returns:
        By model, flattest first: 1 is flattest, models that cannot be told apart share a rank;
        None, and last, for one that could not be measured.

    Example:
        >>> values = {"a": 3.0, "b": 1.0, "c": 3.0, "d": math.nan}
        >>> ranked({name: Estimate(value) for name, value in values.items()})
        {'b': 1, 'a': 2, 'c': 2, 'd': None}
    """
    known = {name: e for name, e in estimates.items() if not math.isnan(e.value)}
    both = dict(errors or {})
    both |= {(second, first): error for (first, second), error in both.items()}
    ranks = {
        name: 1
        + sum(
            flatter(e, own, error=both.get((other, name)), rounding=rounding)
            for other, e in known.items()
        )
        for name, own in known.items()
    }
    order = sorted(known, key=lambda name: (ranks[name], known[name].value))
    failed = [name for name in estimates if name not in known]
    return {name: ranks[name] for name in order} | dict.fromkeys(failed)
