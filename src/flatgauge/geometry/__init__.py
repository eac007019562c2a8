"""Geometries: how far is "one unit" at this point of weight space?

A geometry is a chart: it gives the loss around the point as a function of coordinates u, with
the point at u = 0. Functionals (`flatgauge.geometry.functionals`) are functions of a chart.
"""

from flatgauge.geometry.chart import (
    GEOMETRIES,
    Chart,
    Diagonal,
    ExactTrace,
    PerTensor,
    PerWeight,
    Weights,
    chart,
)
from flatgauge.geometry.orbits import Balanced, horizontal_projection, vertical_basis
from flatgauge.geometry.path_values import PathValues

__all__ = [
    "GEOMETRIES",
    "Balanced",
    "Chart",
    "Diagonal",
    "ExactTrace",
    "PathValues",
    "PerTensor",
    "PerWeight",
    "Weights",
    "chart",
    "horizontal_projection",
    "vertical_basis",
]
