"""The definitions, literally: sample by sample, dense, in float64, without tricks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from unittest import mock

import torch
from cases import Case
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatgauge import LossSurface
from flatgauge.curvature.sweep.accumulate import ChunkContext, SweepChunk
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.curvature.sweep.plan import place_ops


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
    places = torch.stack([row.flatten().nonzero()[:, 0] for row in rows])  # (units, weights)
    vectors = weight.flatten()[places]
    traces = block[places[:, None], places].sum(-1)
    group = torch.arange(len(rows)) // (len(rows) // groups)
    return float((vectors @ vectors.T * traces)[group[:, None] == group].sum())


def module_of(model: nn.Module, name: str) -> nn.Module | None:
    """The linear map or convolution that owns a weight; None for a matrix of its own."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return owner if isinstance(owner, (nn.Linear, nn.modules.conv._ConvNd)) else None


def block_parts(
    model: nn.Module, name: str, block: Tensor, std: Tensor | None = None, *, layer: bool = True
) -> dict[str, Tensor]:
    """Every part of a parameter's block; of a layer also what its units give, and with the
    standard deviation of its input units also what they give when divided by it."""
    weight, diagonal = model.get_parameter(name).detach(), block.diagonal()
    found = {
        "trace": diagonal.sum(),
        "diagonal": diagonal.reshape(weight.shape),
        "weighted_diagonal": weight.flatten().square() @ diagonal,
    }
    if not layer:
        return found
    module = module_of(model, name)
    groups = getattr(module, "groups", 1)
    rows, columns = rows_and_columns(module, weight)
    for part, masks in (("incoming", rows), ("outgoing", columns)):
        found[part] = weight.new_tensor([form(weight, mask, block) for mask in masks])
    found["relative"] = weight.new_tensor(relative(weight, rows, block, groups))
    if std is not None:
        scales = sum(mask * one for mask, one in zip(columns, std, strict=True))
        inverse = torch.where(scales > 0, 1 / scales, 0.0).flatten()
        turned = block * inverse * inverse[:, None]
        found["normalized"] = weight.new_tensor(relative(weight * scales, rows, turned, groups))
    return found


# -- the sweep, looked at from outside -----------------------------------------------------------


def placed_handlers(surface: LossSurface, *parts: str, record: bool = False) -> list[object]:
    """What computes each op of a sweep of all parameters for these parts, op by op."""
    chunk = SweepChunk(ChunkContext(surface.samples, frozenset(parts)))
    plan, values = sweep_of(surface).plan, surface.functional_model.state
    handlers = place_ops(plan, chunk, values, frozenset(surface.names), record=record)
    return [getattr(handler, "func", handler).__self__ for handler in handlers.values()]


# -- the gauge, as the null space that defines it ----------------------------------------------


def gauge_rows(
    model: nn.Module, draw: Callable[[torch.Generator], tuple[Tensor, ...]], *, seed: int = 0
) -> tuple[Tensor, list[str]]:
    """Rows [θ_k ∂f_c(x; θ)/∂θ_k] over many inputs x and many random θ.

    The coordinates k are the entries of all parameters and stored batch-norm means. Both θ and x
    are drawn anew until the rank of the rows does not grow any more.

    Args:
        model: In double precision; not changed.
        draw: Draws inputs, a few samples at once.
        seed: Of the draws.

    Returns:
        A matrix with as many rows as coordinates that has the same null space, and for every
        coordinate the name of its tensor.
    """
    model = copy.deepcopy(model).double().eval()
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("running_mean")
    }
    names = [name for name, tensor in tensors.items() for _ in range(tensor.numel())]
    rows, stable, ranks = torch.zeros(0, len(names), dtype=torch.float64), 0, [-1]
    while stable < 10:
        state = {
            name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            for name, tensor in tensors.items()
        }
        inputs = draw(generator)

        def outputs(
            state: dict[str, Tensor], inputs: tuple[Tensor, ...] = inputs
        ) -> tuple[Tensor, ...]:
            with (
                sdpa_kernel(SDPBackend.MATH),
                mock.patch("torch.nn.functional.batch_norm", _batch_norm),
            ):
                result = functional_call(model, state, inputs)
            return tuple(result) if isinstance(result, (tuple, list)) else (result,)

        for jacobian in jacrev(outputs)(state):
            flat = [
                (jacobian[name].detach() * theta).reshape(-1, theta.numel())
                for name, theta in state.items()
            ]
            new = torch.cat(flat, 1)
            size = new.norm(dim=1, keepdim=True)
            rows = torch.cat([rows, (new / size)[size[:, 0] > 1e-9]])
        rows = torch.linalg.qr(rows, mode="r").R  # The same null space in fewer rows.
        ranks.append(len(names) - nullity(rows))
        stable = stable + 1 if ranks[-1] == ranks[-2] else 0
    return rows, names


def _batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """A batch-norm in eval mode: torch's own cannot be differentiated by the stored mean."""
    mean, var, weight, bias = (
        t if t is None else t.reshape(1, -1, *(1,) * (x.dim() - 2))
        for t in (mean, var, weight, bias)
    )
    x = (x - mean) / (var + eps).sqrt()
    x = x if weight is None else weight * x
    return x if bias is None else x + bias


def nullity(rows: Tensor) -> int:
    """The dimension of a null space: how many singular values are zero."""
    values = torch.linalg.svdvals(rows)
    return rows.shape[1] - int((values > 1e-9 * values[0]).sum())


def gauge_dimension(
    model: nn.Module, draw: Callable[[torch.Generator], tuple[Tensor, ...]], *, seed: int = 0
) -> int:
    """The dimension of the common null space, with a clear gap between it and the rest."""
    rows, _ = gauge_rows(model, draw, seed=seed)
    values = torch.linalg.svdvals(rows)
    free = nullity(rows)
    kept, zeros = values[: rows.shape[1] - free], values[rows.shape[1] - free :]
    assert kept.min() > 1e-6 * values[0]
    assert not len(zeros) or zeros.max() < 1e-11 * values[0]
    return free


def holds_smallest(details: Mapping[str, float], smallest: float, slack: float = 1e-9) -> bool:
    """Whether what a search for the largest eigenvalue says of the smallest one is true."""
    if "smallest" in details:
        value, bound = details["smallest"], details["smallest bound"]
        right_sign = value == 0 or value * smallest > 0
        return right_sign and abs(value - smallest) <= bound + slack
    low, high = details["smallest at least"], details["smallest at most"]
    return low - slack <= smallest <= high + slack
