"""Spectra: how the eigenvalues of the curvature are spread, in any geometry."""

from flatgauge.spectra.computing import spectrum
from flatgauge.spectra.overlay import Spectra
from flatgauge.spectra.single import Spectrum

__all__ = ["Spectra", "Spectrum", "spectrum"]
