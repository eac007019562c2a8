# The public names, each once: types for checkers, and what `flatgauge/__init__.py` looks up.
from . import analysis as analysis
from . import curvature as curvature
from . import estimators as estimators
from . import geometry as geometry
from . import measures as measures
from . import symmetry as symmetry
from .analysis.bounds import bounds as bounds
from .analysis.certificate import certify as certify
from .analysis.comparison import Comparison as Comparison
from .analysis.comparison import compare as compare
from .analysis.landscapes import landscape as landscape
from .analysis.measurement import Report as Report
from .analysis.measurement import measure as measure
from .analysis.memory import memory_estimate as memory_estimate
from .analysis.monitor import Monitor as Monitor
from .analysis.robustness import feature_robustness as feature_robustness
from .analysis.spectra import spectrum as spectrum
from .estimators.estimate import Estimate as Estimate
from .geometry import functionals as functionals
from .geometry.functionals import cell as cell
from .loading.datasets import load_dataset as load_dataset
from .measures import catalogue as catalogue
from .studies import Pool as Pool
from .studies import Recipe as Recipe
from .studies import Study as Study
from .surface.surface import LossSurface as LossSurface
from .symmetry import balance as balance
from .symmetry import find_gauge as find_gauge
from .symmetry.basis_paths import basis_paths as basis_paths

__version__: str
