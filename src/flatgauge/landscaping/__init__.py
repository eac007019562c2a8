"""The loss on lines and planes of weights, computed and drawn."""

from flatgauge.landscaping.computing import landscape
from flatgauge.landscaping.several import Landscapes
from flatgauge.landscaping.single import Landscape
from flatgauge.landscaping.spaces import SPACES

__all__ = ["SPACES", "Landscape", "Landscapes", "landscape"]
