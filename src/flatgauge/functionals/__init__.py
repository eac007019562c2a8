"""Functionals: what is asked of the loss around a point, in any geometry. One file each.

A functional takes a chart (`flatgauge.geometry`), knows neither model nor data, and returns an
`Estimate`. Each enters itself in `FUNCTIONALS`.
"""

from flatgauge.functionals.functional import FUNCTIONALS, functional

# Each of these enters itself in FUNCTIONALS, in this order.
from flatgauge.functionals.top_eigenvalue import top_eigenvalue  # isort: skip
from flatgauge.functionals.trace import trace  # isort: skip
from flatgauge.functionals.worst_case import worst_case  # isort: skip
from flatgauge.functionals.expectation import expectation  # isort: skip

__all__ = [
    "FUNCTIONALS",
    "expectation",
    "functional",
    "top_eigenvalue",
    "trace",
    "worst_case",
]
