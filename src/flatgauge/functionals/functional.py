"""How a functional enters itself in the list of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from torch import Generator

from flatgauge.estimators import Estimate
from flatgauge.estimators.probes import required as required_source

P = ParamSpec("P")

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
