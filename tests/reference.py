"""The definitions, literally: sample by sample, dense, in float64, without tricks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Case
from torch import Tensor, nn
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


# -- blocks, as the papers define them ---------------------------------------------------------


def dense_blocks(case: Case) -> dict[str, Tensor]:
    """The Hessian's diagonal block of every parameter."""
    hessian = dense_hessian(case)
    blocks, start = {}, 0
    for name, parameter in case.model.named_parameters():
        stop = start + parameter.numel()
        blocks[name] = hessian[start:stop, start:stop]
        start = stop
    return blocks


def rows_and_columns(module: nn.Module | None, weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """For every output unit and every input unit of a layer, a mask of its weights."""
    groups = getattr(module, "groups", 1)
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        inputs, outputs = weight.shape[0], weight.shape[1] * groups
        place = lambda o, i: (i, o % weight.shape[1])  # noqa: E731
    elif module is None:  # a matrix on the right: (in, out)
        inputs, outputs = weight.shape
        place = lambda o, i: (i, o)  # noqa: E731
    else:
        inputs, outputs = weight.shape[1] * groups, weight.shape[0]
        place = lambda o, i: (o, i % weight.shape[1])  # noqa: E731
    rows = [torch.zeros_like(weight, dtype=torch.bool) for _ in range(outputs)]
    columns = [torch.zeros_like(weight, dtype=torch.bool) for _ in range(inputs)]
    for o in range(outputs):
        for i in range(inputs):
            if o // (outputs // groups) == i // (inputs // groups):
                rows[o][place(o, i)] = True
                columns[i][place(o, i)] = True
    return rows, columns


def form(weight: Tensor, mask: Tensor, block: Tensor) -> float:
    """wᵀ H w along the weights of one unit."""
    direction = (weight * mask).reshape(-1)
    return float(direction @ block @ direction)


def relative(weight: Tensor, rows: list[Tensor], block: Tensor, groups: int) -> float:
    """Σ ⟨w_s, w_s'⟩ tr H_ss' over the units of every group."""
    total = 0.0
    size = len(rows) // groups
    for s, one in enumerate(rows):
        for t, other in enumerate(rows):
            if s // size == t // size:
                here, there = one.reshape(-1).nonzero()[:, 0], other.reshape(-1).nonzero()[:, 0]
                trace = block[here, there].sum()
                total += float((weight[one] * weight[other]).sum() * trace)
    return total
