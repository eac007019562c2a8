"""Geometries: how far is "one unit" at this point of weight space? One file each.

A geometry is a chart: it gives the loss around the point as a function of coordinates u, with
the point at u = 0. Whatever is asked of the loss (`flatgauge.functionals`) is asked of a chart.
"""

from flatgauge.geometry.chart import GEOMETRIES, Chart, Swept, chart
from flatgauge.geometry.diagonal import Diagonal
from flatgauge.geometry.horizontal import horizontal_projection, vertical_basis

# Each of these enters itself in GEOMETRIES, in this order.
from flatgauge.geometry.weights import Weights  # isort: skip
from flatgauge.geometry.per_tensor import PerTensor  # isort: skip
from flatgauge.geometry.per_weight import PerWeight  # isort: skip
from flatgauge.geometry.paths import PathValues  # isort: skip
from flatgauge.geometry.balanced import Balanced  # isort: skip

__all__ = [
    "GEOMETRIES",
    "Balanced",
    "Chart",
    "Diagonal",
    "PathValues",
    "PerTensor",
    "PerWeight",
    "Swept",
    "Weights",
    "chart",
    "horizontal_projection",
    "vertical_basis",
]
