"""One unit of length per parameter tensor: its norm (Rangamani et al. 2019)."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from flatgauge.geometry.diagonal import Diagonal, norm


class PerTensor(Diagonal):
    """θ + D u with D = ‖θ_i‖ for every tensor i; a tensor of zeros does not move.

    Noise of size σ on a tensor has the expected squared length σ² ‖θ_i‖².
    """

    geometry = "per tensor"
    epsilon = 0.05
    sigma = 0.05

    def units(self, value: Tensor) -> Tensor:
        """The tensor's norm."""
        return torch.full_like(value, norm(value))

    def share(self, value: Tensor) -> float:
        """The squared norm."""
        return norm(value) ** 2

    def noise(self, sigma: float, generator: Generator) -> Tensor:
        """Noise that moves every tensor by a share of its norm, however many weights it has."""
        drawn = self.surface.split(super().noise(sigma, generator))
        return self.surface.flatten({n: u / math.sqrt(u.numel()) for n, u in drawn.items()})
