"""The functional "trace": how sharp is it in all directions together?"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Generator

from flatgauge.estimators import Estimate
from flatgauge.estimators import trace as estimated_trace
from flatgauge.estimators.trace import BLOCK
from flatgauge.functionals.functional import functional
from flatgauge.geometry import Chart, Swept

#: Products that an estimate of the trace spends where nothing is asked of it.
DEFAULT_PROBES = 48


@functional("trace")
def trace(
    chart: Chart,
    *,
    method: str = "sweep",
    probes: int | None = None,
    tolerance: float | None = None,
    max_matvecs: int = 500,
    all_columns: bool = False,
    caller: str = "trace",
    generator: Generator | None = None,
) -> Estimate:
    """The trace of the loss's curvature in a geometry.

    Args:
        chart: The loss around the point.
        method: ``"sweep"`` for the exact sweep and Hutch++ for the rest; ``"hutch++"`` or
            ``"hutchinson"`` for all.
        probes: Products to spend, as a fixed budget; 48 if no ``tolerance`` is given.
        tolerance: Error to reach instead, relative to the value, with 95 % confidence.
        max_matvecs: Most products to spend on reaching the tolerance.
        all_columns: Whether the sweep is to be exact also with 64 or more outputs.
        caller: Who asks.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with its standard error; in `details`, the part that vanishes with the
        gradient, where weights are no linear functions of the coordinates.

    Raises:
        ValueError: If an option is out of range, or a generator is needed and missing.
    """
    if probes is None and tolerance is None:
        probes = DEFAULT_PROBES
    if method == "sweep":
        swept = chart.swept(all_columns=all_columns, generator=generator)
    else:
        swept = Swept(Estimate(0.0, exact=True), chart.curvature())
    known, notes = swept.known, (*chart.notes, *swept.notes)
    first = chart.first_order()
    details = {} if first is None else {"first order": first}
    if swept.rest is None:
        return replace(known, layers={}, notes=notes, details=details)
    budget, length = chart.surface.budget, swept.rest.shape[0]
    estimate = estimated_trace(
        swept.rest,
        probes=probes,
        tolerance=tolerance,
        max_matvecs=max_matvecs,
        method="hutch++" if method == "sweep" else method,
        # A quarter as much is taken by the signs that the basis comes from.
        basis=max(1, 4 * budget.basis(length) // 5),
        together=budget.columns(BLOCK),
        generator=generator,
    )
    exact = estimate.exact and known.exact and chart.surface.exact_products
    return replace(
        estimate,
        value=estimate.value + known.value,
        stderr=math.hypot(estimate.stderr, known.stderr),
        exact=exact,
        # Nothing was estimated where so few weights are left that all their columns were taken.
        notes=(*(chart.notes if exact else notes), *estimate.notes),
        details={**estimate.details, **details},
    )
