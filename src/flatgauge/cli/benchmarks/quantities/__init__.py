"""What is measured: one file per quantity, listed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flatgauge.cli.benchmarks.comparison import TimedComparison
from flatgauge.cli.benchmarks.quantities import (
    classes,
    eigenvalues,
    growth,
    layer_eigenvalues,
    paths,
    products,
    sweeps,
    together,
    traces,
)
from flatgauge.cli.benchmarks.row import TimingRow
from flatgauge.cli.benchmarks.workloads import MANY_CLASSES, STANDARD


@dataclass(frozen=True)
class Quantity:
    """Something that is measured on workloads.

    Attributes:
        measured: From the tools on a workload to rows.
        workloads: On which workloads it is.
    """

    measured: Callable[[TimedComparison], list[TimingRow]]
    workloads: tuple[str, ...] = STANDARD


#: By name; in this order.
QUANTITIES = {
    "product": Quantity(products.measured),
    "trace": Quantity(traces.measured),
    "sweep": Quantity(sweeps.measured),
    "units": Quantity(sweeps.unit_forms),
    "eigenvalue": Quantity(eigenvalues.measured),
    "layers": Quantity(layer_eigenvalues.measured),
    "classes": Quantity(classes.measured, (MANY_CLASSES,)),
    "together": Quantity(together.measured),
    "growth": Quantity(growth.measured, ("W1",)),
    "paths": Quantity(paths.measured, ("W1", "W2")),
}

#: On networks of their own, in units of their own.
OTHERS = ("discovery", "stacking")

#: What is measured unless something is named: what is compared with peers, and growth.
USUAL = tuple(name for name in QUANTITIES if name != "paths")

__all__ = ["OTHERS", "QUANTITIES", "USUAL", "Quantity"]
