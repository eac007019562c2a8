"""How flat is the minimum of a trained network, whatever way it is written?

import flatgauge as fg

surface = fg.LossSurface(model, "cross_entropy", loader)
print(fg.measure(surface))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatgauge.analysis.bounds import bounds
    from flatgauge.analysis.certificate import Certificate, certify
    from flatgauge.analysis.comparison import Comparison, compare
    from flatgauge.analysis.landscapes import Landscape, Landscapes, landscape
    from flatgauge.analysis.measurement import Report, measure
    from flatgauge.analysis.memory import memory_estimate
    from flatgauge.analysis.monitor import Monitor
    from flatgauge.analysis.robustness import feature_robustness
    from flatgauge.analysis.spectra import Spectra, Spectrum, spectrum
    from flatgauge.estimators.estimate import Estimate
    from flatgauge.geometry.grid import cell
    from flatgauge.loading.datasets import load_dataset
    from flatgauge.measures import catalogue
    from flatgauge.studies import Pool, Recipe, Study
    from flatgauge.surface.surface import LossSurface
    from flatgauge.symmetry import GaugeGroup, balance, find_gauge
    from flatgauge.symmetry.paths import BasisPaths, basis_paths

# Names are looked up at first use, so that the command line answers before torch is loaded.
_HOMES = {
    "BasisPaths": "symmetry.paths",
    "Certificate": "analysis.certificate",
    "Comparison": "analysis.comparison",
    "Estimate": "estimators",
    "GaugeGroup": "symmetry",
    "Landscape": "analysis.landscapes",
    "Landscapes": "analysis.landscapes",
    "LossSurface": "surface.surface",
    "Monitor": "analysis.monitor",
    "Pool": "studies",
    "Recipe": "studies",
    "Report": "analysis.measurement",
    "Spectra": "analysis.spectra",
    "Spectrum": "analysis.spectra",
    "Study": "studies",
    "balance": "symmetry",
    "basis_paths": "symmetry.paths",
    "bounds": "analysis.bounds",
    "catalogue": "measures",
    "cell": "geometry.grid",
    "certify": "analysis.certificate",
    "compare": "analysis.comparison",
    "feature_robustness": "analysis.robustness",
    "find_gauge": "symmetry",
    "landscape": "analysis.landscapes",
    "load_dataset": "loading.datasets",
    "measure": "analysis.measurement",
    "memory_estimate": "analysis.memory",
    "spectrum": "analysis.spectra",
}

#: Packages that are reached as `fg.measures.kappa_max`, without an import of their own.
_PACKAGES = {
    "curvature": "curvature",
    "estimators": "estimators",
    "functionals": "geometry.functionals",
    "geometry": "geometry",
    "measures": "measures",
    "symmetry": "symmetry",
}

__all__ = [
    "BasisPaths",
    "Certificate",
    "Comparison",
    "Estimate",
    "GaugeGroup",
    "Landscape",
    "Landscapes",
    "LossSurface",
    "Monitor",
    "Pool",
    "Recipe",
    "Report",
    "Spectra",
    "Spectrum",
    "Study",
    "balance",
    "basis_paths",
    "bounds",
    "catalogue",
    "cell",
    "certify",
    "compare",
    "feature_robustness",
    "find_gauge",
    "landscape",
    "load_dataset",
    "measure",
    "memory_estimate",
    "spectrum",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata  # Slow to load, and seldom needed.

        return metadata.version(__name__)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{_PACKAGES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES, "__version__"]
