"""How flat is the minimum of a trained network, whatever way it is written?

import flatgauge as fg

surface = fg.LossSurface(model, "cross_entropy", loader)
print(fg.measure(surface))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatgauge.certifying import certify
    from flatgauge.comparing import compare
    from flatgauge.datasets import load_dataset
    from flatgauge.estimators import Estimate
    from flatgauge.forecast import memory_estimate
    from flatgauge.grid import cell
    from flatgauge.guarantees import bounds
    from flatgauge.landscaping import Landscape, Landscapes, landscape
    from flatgauge.measures import catalogue
    from flatgauge.measuring import measure
    from flatgauge.path_space import BasisPaths, basis_paths
    from flatgauge.report import Certificate, Comparison, Report
    from flatgauge.robustness import feature_robustness
    from flatgauge.spectra import Spectra, Spectrum, spectrum
    from flatgauge.studies import Findings, Recipe, Study
    from flatgauge.surface import LossSurface
    from flatgauge.symmetry import GaugeGroup, balance, find_gauge
    from flatgauge.watching import Monitor

# Names are looked up at first use, so that the command line answers before torch is loaded.
_HOMES = {
    "BasisPaths": "path_space",
    "Certificate": "report",
    "Comparison": "report",
    "Estimate": "estimators",
    "Findings": "studies",
    "GaugeGroup": "symmetry",
    "Landscape": "landscaping",
    "Landscapes": "landscaping",
    "LossSurface": "surface",
    "Monitor": "watching",
    "Recipe": "studies",
    "Report": "report",
    "Spectra": "spectra",
    "Spectrum": "spectra",
    "Study": "studies",
    "balance": "symmetry",
    "basis_paths": "path_space",
    "bounds": "guarantees",
    "catalogue": "measures",
    "cell": "grid",
    "certify": "certifying",
    "compare": "comparing",
    "feature_robustness": "robustness",
    "find_gauge": "symmetry",
    "landscape": "landscaping",
    "load_dataset": "datasets",
    "measure": "measuring",
    "memory_estimate": "forecast",
    "spectrum": "spectra",
}

#: Packages that are reached as `fg.measures.kappa_max`, without an import of their own.
_PACKAGES = ("curvature", "estimators", "functionals", "geometry", "measures", "symmetry")

__all__ = [
    "BasisPaths",
    "Certificate",
    "Comparison",
    "Estimate",
    "Findings",
    "GaugeGroup",
    "Landscape",
    "Landscapes",
    "LossSurface",
    "Monitor",
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
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES, "__version__"]
