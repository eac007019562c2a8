"""Path space: a network by the values of its paths, which no rescaling changes."""

from flatgauge.symmetry.paths.basis import BasisPaths, basis_paths, surface_paths

__all__ = ["BasisPaths", "basis_paths", "surface_paths"]
