"""Estimates from matrix-vector products: traces, extreme eigenvalues, spectral densities."""

from flatgauge.estimators.density import SpectralDensity, spectral_density
from flatgauge.estimators.eigenvalues import Eigenpairs, top_eigenvalues
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.trace import trace

__all__ = [
    "Eigenpairs",
    "Estimate",
    "SpectralDensity",
    "spectral_density",
    "top_eigenvalues",
    "trace",
]
