"""The measures of flatness, one function each; lower is flatter, always."""

from flatgauge.measures.hessian import hessian_max_eigenvalue, hessian_trace
from flatgauge.measures.kappa import kappa_max, kappa_sum, kappa_trace_max, kappa_trace_sum
from flatgauge.measures.path_norm import path_norm
from flatgauge.measures.registry import GROUPS, Measure, catalogue, measure, registry
from flatgauge.measures.relative_flatness import relative_flatness
from flatgauge.measures.rho import rho_max, rho_sum
from flatgauge.measures.riemannian import (
    riemannian_max_eigenvalue,
    riemannian_max_eigenvalue_nodewise,
)
from flatgauge.measures.sharpness import epsilon_sharpness, expected_sharpness

__all__ = [
    "GROUPS",
    "Measure",
    "catalogue",
    "epsilon_sharpness",
    "expected_sharpness",
    "hessian_max_eigenvalue",
    "hessian_trace",
    "kappa_max",
    "kappa_sum",
    "kappa_trace_max",
    "kappa_trace_sum",
    "measure",
    "path_norm",
    "registry",
    "relative_flatness",
    "rho_max",
    "rho_sum",
    "riemannian_max_eigenvalue",
    "riemannian_max_eigenvalue_nodewise",
]
