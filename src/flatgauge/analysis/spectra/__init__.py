"""Spectra: how the eigenvalues of the curvature are spread, in any geometry."""

from flatgauge.analysis.spectra.computing import spectrum
from flatgauge.analysis.spectra.overlay import Spectra
from flatgauge.analysis.spectra.single import Spectrum

__all__ = ["Spectra", "Spectrum", "spectrum"]
