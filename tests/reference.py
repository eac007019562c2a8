"""The definitions, literally: sample by sample, dense, in float64, without tricks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Case
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel


def theta(case: Case) -> Tensor:
    """All trainable parameters in a row."""
    return torch.cat([p.detach().reshape(-1) for p in case.model.parameters()])


def loss_function(case: Case) -> Callable[[Tensor], Tensor]:
    """The mean of the samples' own losses as a function of the flat parameters."""
    case.model.eval()
    shapes = [(name, p.shape) for name, p in case.model.named_parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for _, shape in shapes])
        state = {name: part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):
            losses = [
                case.torch_loss(functional_call(case.model, state, (x[None],)), y[None])
                for x, y in zip(case.inputs, case.targets, strict=True)
            ]
        return torch.stack(losses).mean()

    return loss


def dense_gradient(case: Case) -> Tensor:
    """The gradient, one entry per parameter."""
    return torch.autograd.functional.jacobian(loss_function(case), theta(case))


def dense_hessian(case: Case) -> Tensor:
    """The Hessian, one entry per pair of parameters."""
    return torch.autograd.functional.hessian(loss_function(case), theta(case))


def error(got: Tensor, expected: Tensor) -> float:
    """How far off a vector or matrix is, relative to its size."""
    return ((got - expected).norm() / expected.norm()).item()


def directions(size: int, count: int = 3) -> Tensor:
    """Random columns to multiply by."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, count, generator=generator, dtype=torch.float64)
