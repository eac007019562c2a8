"""The weights of the balanced form: of all ways to write the network, the one of smallest norm."""

from __future__ import annotations

from flatgauge.geometry.weights import Weights
from flatgauge.surface import LossSurface
from flatgauge.symmetry.balancing import balanced


class Balanced(Weights):
    """θ + u on a balanced copy of the model."""

    geometry = "balanced"

    def __init__(self, surface: LossSurface, parameters: str = "all") -> None:
        twin, notes = balanced_twin(surface)
        super().__init__(twin, parameters)
        self.notes = notes


def balanced_twin(surface: LossSurface) -> tuple[LossSurface, tuple[str, ...]]:
    """The surface of the balanced form, made once.

    Args:
        surface: The surface; not changed.

    Returns:
        The same loss and data on a balanced copy of the model, and what is to be said about it.
    """

    def make() -> tuple[LossSurface, tuple[str, ...]]:
        twin, notes = balanced(surface)
        return twin, tuple(notes)

    return surface.recall("balanced", make)
