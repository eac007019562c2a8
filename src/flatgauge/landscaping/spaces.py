"""The spaces that directions can be drawn in."""

from __future__ import annotations

from flatgauge.landscaping.eigenvectors import AlongEigenvectors
from flatgauge.landscaping.path_directions import InBasisPaths
from flatgauge.landscaping.random_directions import InFilters, InLayers, InWeights
from flatgauge.landscaping.space import Space

#: By name.
SPACES: dict[str, type[Space]] = {
    space.name: space for space in (InBasisPaths, InWeights, InFilters, InLayers, AlongEigenvectors)
}
