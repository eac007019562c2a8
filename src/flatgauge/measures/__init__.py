"""The measures of flatness, one function each; lower is flatter, always."""

from flatgauge.measures.declaration import measure as measure
from flatgauge.measures.registry import BALANCED as BALANCED
from flatgauge.measures.registry import GROUPS as GROUPS
from flatgauge.measures.registry import Measure as Measure
from flatgauge.measures.registry import Needs as Needs
from flatgauge.measures.registry import catalogue as catalogue
from flatgauge.measures.registry import registry as registry

# In the order of the catalogue: the grid row by row, then what does not fit it.
# isort: off
from flatgauge.measures.grid import hessian_trace as hessian_trace
from flatgauge.measures.grid import hessian_max_eigenvalue as hessian_max_eigenvalue
from flatgauge.measures.grid import epsilon_sharpness as epsilon_sharpness
from flatgauge.measures.grid import expected_sharpness as expected_sharpness
from flatgauge.measures.grid import riemannian_max_eigenvalue as riemannian_max_eigenvalue
from flatgauge.measures.grid import riemannian_trace as riemannian_trace
from flatgauge.measures.grid import riemannian_epsilon_sharpness as riemannian_epsilon_sharpness
from flatgauge.measures.grid import riemannian_expected_sharpness as riemannian_expected_sharpness
from flatgauge.measures.grid import (
    riemannian_max_eigenvalue_nodewise as riemannian_max_eigenvalue_nodewise,
)
from flatgauge.measures.grid import adaptive_trace as adaptive_trace
from flatgauge.measures.grid import adaptive_sharpness as adaptive_sharpness
from flatgauge.measures.grid import adaptive_expected_sharpness as adaptive_expected_sharpness
from flatgauge.measures.grid import psi_max_eigenvalue as psi_max_eigenvalue
from flatgauge.measures.grid import psi_trace as psi_trace
from flatgauge.measures.grid import psi_epsilon_sharpness as psi_epsilon_sharpness
from flatgauge.measures.grid import psi_expected_sharpness as psi_expected_sharpness
from flatgauge.measures.kappa import kappa_max as kappa_max
from flatgauge.measures.kappa import kappa_sum as kappa_sum
from flatgauge.measures.kappa import kappa_trace_max as kappa_trace_max
from flatgauge.measures.kappa import kappa_trace_sum as kappa_trace_sum
from flatgauge.measures.rho import rho_max as rho_max
from flatgauge.measures.rho import rho_sum as rho_sum
from flatgauge.measures.normalized_sharpness import (
    matrix_normalized_sharpness as matrix_normalized_sharpness,
)
from flatgauge.measures.normalized_sharpness import normalized_sharpness as normalized_sharpness
from flatgauge.measures.normalized_sharpness import (
    normalized_sharpness_direct as normalized_sharpness_direct,
)
from flatgauge.measures.relative_flatness import relative_flatness as relative_flatness
from flatgauge.measures.relative_flatness import (
    relative_flatness_normalized as relative_flatness_normalized,
)
from flatgauge.measures.minimum_sharpness import minimum_sharpness as minimum_sharpness
from flatgauge.measures.minimum_sharpness import (
    minimum_sharpness_nodewise as minimum_sharpness_nodewise,
)
from flatgauge.measures.fisher_rao import fisher_rao_norm as fisher_rao_norm
from flatgauge.measures.fisher_rao import fisher_rao_norm_liang as fisher_rao_norm_liang
from flatgauge.measures.paths import basis_path_ratio as basis_path_ratio
from flatgauge.measures.paths import path_norm as path_norm
# isort: on
