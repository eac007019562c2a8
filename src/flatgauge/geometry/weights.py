"""The Euclidean geometry of the weights themselves: not invariant, the baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from flatgauge.curvature import Hessian
from flatgauge.curvature.operator import Operator
from flatgauge.geometry.diagonal import Diagonal


class Weights(Diagonal):
    """θ + u: one unit is 1 for every weight."""

    geometry = "weights"
    epsilon = 0.1
    sigma = 0.01

    def units(self, value: Tensor) -> Tensor:
        """Ones."""
        return torch.ones_like(value)

    def curvature(self) -> Operator:
        """H, if all weights take part."""
        if self.names == frozenset(self.surface.names):
            return Hessian(self.surface)
        return super().curvature()

    def share(self, value: Tensor) -> float:
        """One."""
        return 1.0
