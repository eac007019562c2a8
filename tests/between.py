"""A network with something between two linear layers, for tests of the gauge group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Net(nn.Module):
    """A linear layer, something, a linear layer."""

    def __init__(self, between: Any = torch.relu, width: int = 5) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, width), nn.Linear(width, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.first(x)))


X = torch.randn(3, 4, generator=generator())
