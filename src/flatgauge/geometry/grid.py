"""The grid: any functional of the loss in any geometry, under one scheme."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Generator

from flatgauge.estimators.estimate import Estimate
from flatgauge.geometry import chart
from flatgauge.geometry.chart import GEOMETRIES
from flatgauge.geometry.functionals import FUNCTIONALS
from flatgauge.surface.surface import LossSurface


def cell(
    surface: LossSurface,
    *,
    geometry: str,
    functional: str,
    parameters: str = "all",
    caller: str = "cell",
    generator: Generator | None = None,
    **options: Any,
) -> Estimate:
    """Ask a functional of the loss in a geometry: one cell of the grid.

    Measures with names of their own are cells with their defaults; see `flatgauge catalogue`.

    Args:
        surface: Where to measure.
        geometry: ``"weights"``, ``"per tensor"``, ``"per weight"``, ``"basis paths"`` or
            ``"balanced"``.
        functional: ``"top eigenvalue"``, ``"trace"``, ``"worst case in a ball"`` or
            ``"expectation"``.
        parameters: Which tensors take part: ``"all"`` trainable ones, or the weights of
            ``"layers"`` only.
        caller: The name of the caller, for messages.
        generator: Source of randomness, required where anything is drawn.
        **options: Of the functional and of the geometry.

    Returns:
        The estimate.

    Raises:
        TypeError: If `surface` is not a surface.
        ValueError: If there is no such geometry or functional, or an option is out of range.

    Example:
        >>> from flatgauge.surface.examples import two_weights
        >>> for a, b in ((2.0, 3.0), (20.0, 0.3)):  # the same function
        ...     found = cell(two_weights(a, b), geometry="balanced", functional="trace")
        ...     print(round(found.value, 9))
        24.0
        24.0
    """
    if not isinstance(surface, LossSurface):
        raise TypeError(
            f"`cell` measures a LossSurface, but got a {type(surface).__name__}; make one with "
            "LossSurface(model, loss, data)."
        )
    if functional not in FUNCTIONALS:
        raise ValueError(
            f"there is no functional {functional!r}; the functionals are {', '.join(FUNCTIONALS)}."
        )
    own = GEOMETRIES[geometry].options if geometry in GEOMETRIES else ()
    chosen = {key: options.pop(key) for key in own if key in options}
    where = chart(surface, geometry, parameters, **chosen)
    spent = where.surface.matvecs
    found = FUNCTIONALS[functional](where, caller=caller, generator=generator, **options)
    if where.surface is not surface:
        surface.matvecs += where.surface.matvecs - spent
    settings = where.settings | ({} if parameters == "all" else {"parameters": parameters})
    return replace(
        found,
        options={**found.options, **settings},
        details={**found.details, **where.details},
    )
