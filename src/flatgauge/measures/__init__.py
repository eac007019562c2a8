"""The measures of flatness, one function each; lower is flatter, always."""

from flatgauge.measures.declaration import measure
from flatgauge.measures.registry import BALANCED, GROUPS, Measure, Needs, catalogue, registry

# In the order of the catalogue: the grid row by row, then what does not fit it.
# isort: off
from flatgauge.measures.grid import (
    adaptive_expected_sharpness,
    adaptive_sharpness,
    adaptive_trace,
    epsilon_sharpness,
    expected_sharpness,
    hessian_max_eigenvalue,
    hessian_trace,
    psi_epsilon_sharpness,
    psi_expected_sharpness,
    psi_max_eigenvalue,
    psi_trace,
    riemannian_epsilon_sharpness,
    riemannian_expected_sharpness,
    riemannian_max_eigenvalue,
    riemannian_max_eigenvalue_nodewise,
    riemannian_trace,
)
from flatgauge.measures.kappa import kappa_max, kappa_sum, kappa_trace_max, kappa_trace_sum
from flatgauge.measures.rho import rho_max, rho_sum
from flatgauge.measures.normalized_sharpness import (
    matrix_normalized_sharpness,
    normalized_sharpness,
    normalized_sharpness_direct,
)
from flatgauge.measures.relative_flatness import relative_flatness, relative_flatness_normalized
from flatgauge.measures.minimum_sharpness import minimum_sharpness, minimum_sharpness_nodewise
from flatgauge.measures.fisher_rao import fisher_rao_norm, fisher_rao_norm_liang
from flatgauge.measures.paths import basis_path_ratio, path_norm
# isort: on

__all__ = [
    "BALANCED",
    "GROUPS",
    "Measure",
    "Needs",
    "adaptive_expected_sharpness",
    "adaptive_sharpness",
    "adaptive_trace",
    "basis_path_ratio",
    "catalogue",
    "epsilon_sharpness",
    "expected_sharpness",
    "fisher_rao_norm",
    "fisher_rao_norm_liang",
    "hessian_max_eigenvalue",
    "hessian_trace",
    "kappa_max",
    "kappa_sum",
    "kappa_trace_max",
    "kappa_trace_sum",
    "matrix_normalized_sharpness",
    "measure",
    "minimum_sharpness",
    "minimum_sharpness_nodewise",
    "normalized_sharpness",
    "normalized_sharpness_direct",
    "path_norm",
    "psi_epsilon_sharpness",
    "psi_expected_sharpness",
    "psi_max_eigenvalue",
    "psi_trace",
    "registry",
    "relative_flatness",
    "relative_flatness_normalized",
    "rho_max",
    "rho_sum",
    "riemannian_epsilon_sharpness",
    "riemannian_expected_sharpness",
    "riemannian_max_eigenvalue",
    "riemannian_max_eigenvalue_nodewise",
    "riemannian_trace",
]
