"""The spaces that directions can be drawn in."""

from __future__ import annotations

from flatgauge.analysis.landscapes.eigenvectors import AlongEigenvectors
from flatgauge.analysis.landscapes.path_directions import InBasisPaths
from flatgauge.analysis.landscapes.random_directions import InFilters, InLayers, InWeights
from flatgauge.analysis.landscapes.space import Space

#: By name.
SPACES: dict[str, type[Space]] = {
    space.name: space for space in (InBasisPaths, InWeights, InFilters, InLayers, AlongEigenvectors)
}
