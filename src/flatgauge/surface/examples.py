"""Tiny surfaces with answers that can be worked out by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatgauge.surface.surface import LossSurface


class _TwoWeights(nn.Module):
    """One hidden ReLU unit: x -> b relu(a x)."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(b, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.b * torch.relu(self.a * x)


def two_weights(a: float, b: float) -> LossSurface:
    """The loss ``(b relu(a))²``: one hidden unit, input 1, target 0, squared error.

    For a > 0 the gradient is ``(2ab², 2a²b)`` and the Hessian ``[[2b², 4ab], [4ab, 2a²]]``;
    ``(ca, b/c)`` is the same function for every c > 0.

    Args:
        a: The incoming weight.
        b: The outgoing weight.

    Returns:
        The surface.

    Example:
        >>> two_weights(2.0, 3.0).value(), two_weights(20.0, 0.3).value()
        (36.0, 36.0)
    """
    ones = torch.ones(1, 1, dtype=torch.float64)
    return LossSurface(_TwoWeights(a, b), "mse", (ones, torch.zeros_like(ones)))


def bowl(curvatures: list[float]) -> LossSurface:
    """The loss ``½ Σ h_i w_i²`` at its minimum w = 0: the Hessian is diag(h).

    Args:
        curvatures: The h_i, at least 0.

    Returns:
        The surface.

    Example:
        >>> bowl([1.0, 4.0]).hvp(torch.tensor([1.0, 2.0], dtype=torch.float64))
        tensor([1., 8.], dtype=torch.float64)
    """
    scales = torch.tensor(curvatures, dtype=torch.float64)
    model = nn.Linear(len(scales), 1, bias=False).double()
    nn.init.zeros_(model.weight)
    inputs = torch.diag((len(scales) * scales / 2).sqrt())
    return LossSurface(model, "mse", (inputs, torch.zeros(len(scales), 1, dtype=torch.float64)))


def linear_regression(weight: float) -> LossSurface:
    """The loss ``(3w − 1)²``: one linear layer of one weight; the second derivative is 18.

    Args:
        weight: The weight.

    Returns:
        The surface.

    Example:
        >>> linear_regression(2.0).value()
        25.0
    """
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, weight)
    inputs = torch.full((1, 1), 3.0, dtype=torch.float64)
    return LossSurface(model, "mse", (inputs, torch.ones_like(inputs)))
