"""The loss on lines and planes of weights, computed and drawn."""

from flatgauge.analysis.landscapes.directions import SPACES
from flatgauge.analysis.landscapes.grid import landscape
from flatgauge.analysis.landscapes.result import Landscape, Landscapes

__all__ = ["SPACES", "Landscape", "Landscapes", "landscape"]
