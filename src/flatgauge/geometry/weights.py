"""The Euclidean geometry of the weights themselves: not invariant, the baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from flatgauge.geometry.diagonal import Diagonal


class Weights(Diagonal):
    """θ + u: one unit is 1 for every weight."""

    geometry = "weights"
    epsilon = 0.1
    sigma = 0.01

    def units(self, value: Tensor) -> Tensor:
        """Ones."""
        return torch.ones_like(value)

    def share(self, value: Tensor) -> float:
        """One."""
        return 1.0
