"""One unit of length per weight: its size (Rangamani et al. 2019, §6; Kwon et al. 2021)."""

from __future__ import annotations

from torch import Tensor

from flatgauge.geometry.diagonal import Diagonal


class PerWeight(Diagonal):
    """θ + D u with D = |θ|: u is the relative change; weights of zero do not move."""

    geometry = "per weight"
    epsilon = 0.5
    sigma = 0.05
    per_loss = False
    part = "own"

    def units(self, value: Tensor) -> Tensor:
        """The weights' sizes."""
        return value.abs()

    def share(self, value: Tensor) -> float:
        """One: the part is weighted by the squared weights already."""
        return 1.0
