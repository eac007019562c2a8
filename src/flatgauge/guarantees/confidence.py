"""Confidence intervals for the mean of numbers between 0 and 1, by the binary divergence."""

from __future__ import annotations

import math
from collections.abc import Callable

#: Halvings of an interval of length one: to the last bit of a number near one.
_HALVINGS = 60


def binary_divergence(found: float, true: float) -> float:
    """The divergence kl(p‖q) of a coin that falls with probability p from one with q.

    Args:
        found: p.
        true: q.

    Returns:
        The divergence in nats, infinite where q leaves no room for p.

    Example:
        >>> round(binary_divergence(0.5, 0.25), 4)
        0.1438
    """
    terms = 0.0
    for p, q in ((found, true), (1 - found, 1 - true)):
        if p > 0:
            terms += p * math.log(p / q) if q > 0 else math.inf
    return max(terms, 0.0)


def upper_mean(found: float, count: int, delta: float) -> float:
    r"""What a mean is at most, with confidence 1 − δ.

    Definition:
        .. math:: \max \{ q : \operatorname{kl}(\hat p \| q) \le \ln(1/\delta) / n \}

    By Chernoff's bound, which holds for independent numbers anywhere in [0, 1] (Hoeffding 1963).

    Args:
        found: The mean of the numbers that were drawn.
        count: How many.
        delta: The probability with which it may fail.

    Returns:
        The bound.

    Example:
        None of 100 draws failed; (1 − q)^100 = 0.05 has the solution:

        >>> round(upper_mean(0.0, 100, 0.05), 6), round(1 - 0.05**0.01, 6)
        (0.029513, 0.029513)
    """
    return _edge(found, 1.0, lambda q: binary_divergence(found, q) <= -math.log(delta) / count)


def lower_mean(found: float, count: int, delta: float) -> float:
    """What a mean is at least, with confidence 1 − δ; see `upper_mean`.

    Args:
        found: The mean of the numbers that were drawn.
        count: How many.
        delta: The probability with which it may fail.

    Returns:
        The bound.
    """
    return _edge(found, 0.0, lambda q: binary_divergence(found, q) <= -math.log(delta) / count)


def _edge(inside: float, outside: float, holds: Callable[[float], bool]) -> float:
    """Where something ceases to hold, from the side where it does not: never too tight."""
    if holds(outside):
        return outside
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return outside
