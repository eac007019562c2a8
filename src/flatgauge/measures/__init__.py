"""The measures of flatness, one function each; lower is flatter, always."""

from flatgauge.measures.hessian import hessian_max_eigenvalue, hessian_trace
from flatgauge.measures.registry import GROUPS, Measure, catalogue, measure, registry
from flatgauge.measures.sharpness import epsilon_sharpness, expected_sharpness

__all__ = [
    "GROUPS",
    "Measure",
    "catalogue",
    "epsilon_sharpness",
    "expected_sharpness",
    "hessian_max_eigenvalue",
    "hessian_trace",
    "measure",
    "registry",
]
