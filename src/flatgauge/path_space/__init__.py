"""Path space: a network by the values of its paths, which no rescaling changes."""

from flatgauge.path_space.basis import BasisPaths
from flatgauge.path_space.finding import basis_paths, paths_of

__all__ = ["BasisPaths", "basis_paths", "paths_of"]
