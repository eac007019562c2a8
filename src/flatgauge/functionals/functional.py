"""How a functional enters itself in the list of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from torch import Generator

from flatgauge.estimators import Estimate
from flatgauge.estimators.probes import required as required_source

P = ParamSpec("P")

#: Most pairs of displacements of one expectation.
_MOST_PAIRS = 10**6

#: The functionals by name: functions of a chart and keyword options.
FUNCTIONALS: dict[str, Callable[..., Estimate]] = {}


def functional(name: str) -> Callable[[Callable[P, Estimate]], Callable[P, Estimate]]:
    """Enter a function of a chart as a functional.

    Args:
        name: Its name.

    Returns:
        The decorator.
    """

    def enter(function: Callable[P, Estimate]) -> Callable[P, Estimate]:
        FUNCTIONALS[name] = function
        return function

    return enter


def required(generator: Generator | None, caller: str) -> Generator:
    """The generator, or what to do without one.

    Args:
        generator: What the user passed.
        caller: The measure that the user called.

    Returns:
        The same generator.
    """
    return required_source(
        generator, caller=f"{caller}(surface)", otherwise="call `fg.measure(surface, seed=0)`"
    )


def check_pairs(pairs: int) -> None:
    """Refuse a number of antithetic pairs that gives no error, or that would take for ever.

    Args:
        pairs: The number.

    Raises:
        ValueError: If it is below 2 or above a million.
    """
    if pairs < 2:
        raise ValueError(f"`pairs={pairs!r}` gives no standard error; draw at least 2 pairs.")
    if pairs > _MOST_PAIRS:
        raise ValueError(
            f"`pairs={pairs!r}` asks for {2 * pairs:,} passes over all samples; draw at most "
            f"{_MOST_PAIRS:,} pairs. The standard error falls with the square root of their "
            "number: 10,000 pairs give a hundredth of the spread."
        )
