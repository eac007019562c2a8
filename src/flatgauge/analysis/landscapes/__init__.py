"""The loss on lines and planes of weights, computed and drawn."""

from flatgauge.analysis.landscapes.computing import landscape
from flatgauge.analysis.landscapes.several import Landscapes
from flatgauge.analysis.landscapes.single import Landscape
from flatgauge.analysis.landscapes.spaces import SPACES

__all__ = ["SPACES", "Landscape", "Landscapes", "landscape"]
