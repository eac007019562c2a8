"""Feature robustness (Petzka et al. 2019, App. D): how the loss responds to noise on features.

A surface, a layer and matrices A enter; the changes of the loss when the layer's input φ becomes
φ + δAφ leave, next to what gradient and curvature bound. The input is never touched: the weights
W become W + δWA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

import torch
from torch import Generator, Tensor

from flatgauge.curvature.block_eigenvalues import block_eigenvalues
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.estimators.linalg import as_tensor, child_generator, root_seed, to_float64
from flatgauge.graph.layers import Layer
from flatgauge.surface.surface import LossSurface

#: Accuracy of the top eigenvalue, relative to it, and the products that may be spent on it.
_TOLERANCE, _MAX_MATVECS = 1e-3, 300

#: A layer's weights times a matrix over its input units (groups, out, in, taps), and its norm.
_Move = tuple[Tensor, float]


@dataclass(frozen=True)
class FeatureRobustness:
    """How the mean loss changes when a layer's input φ becomes φ + δAφ, for several matrices A.

    Attributes:
        layer: The layer.
        delta: The strength δ.
        changes: The change of the loss, by matrix (k,).
        first_order: Of that, what the gradient says, zero at a minimum (k,).
        bounds: What the curvature adds at most to second order, ½ δ² ‖A‖² κ, by matrix (k,).
        kappa: ‖W‖² λ_max of the layer's block of the Hessian.
        drawn: Whether the matrices were drawn at random.
    """

    layer: str
    delta: float
    changes: Tensor
    first_order: Tensor
    bounds: Tensor
    kappa: float
    drawn: bool

    @property
    def mean(self) -> float:
        """The mean change over the matrices."""
        return float(self.changes.mean())

    @property
    def stderr(self) -> float:
        """The mean's standard error, other matrices being drawn; zero if none were."""
        if not self.drawn or len(self.changes) < 2:
            return math.nan if self.drawn else 0.0
        return float(self.changes.std()) / math.sqrt(len(self.changes))

    @property
    def excess(self) -> Tensor:
        """By how much changes exceed gradient and bound (k,): positive by terms of δ³ at most."""
        return self.changes - self.first_order - self.bounds


def feature_robustness(
    surface: LossSurface,
    layer: str,
    *,
    delta: float = 1e-3,
    matrices: str | Tensor = "projections",
    draws: int = 64,
    generator: Generator | None = None,
) -> FeatureRobustness:
    r"""Measure how the loss responds to noise on a layer's input, next to what flatness bounds.

    The input φ(x) of every sample becomes φ(x) + δAφ(x). That is the same as weights W + δWA, so
    that no sample is touched. To second order the loss then changes by no more than

    .. math:: \delta \langle WA, \nabla_W L \rangle + \tfrac12 \delta^2 \|A\|^2 \kappa,
              \qquad \kappa = \|W\|_F^2 \, \lambda_{\max}(H_{ll})

    with the spectral norm of A. Losses are compared in double precision; weight decay, which is
    no function of the features, does not count. See [petzka2019reparameterization], App. D.

    Args:
        surface: Where to measure.
        layer: The layer, as in ``model.named_parameters()``.
        delta: The strength δ.
        matrices: ``"projections"`` on single input units (as in the authors' experiments),
            ``"orthogonal"`` for random rotations, or matrices (m, m) or (k, m, m) over the m input
            units: the columns of a linear layer, the input channels of a convolution. Those of a
            grouped convolution must not mix groups.
        draws: How many matrices to draw; of projections at most as many as there are units, and
            then all of them.
        generator: Source of randomness, for matrices and for the eigenvalue.

    Returns:
        Changes and bounds, by matrix.

    Raises:
        TypeError: If `surface` is not a surface.
        ValueError: If the layer or the kind of matrices is unknown, matrices do not fit, an option
            is out of range, or the generator is missing.
        UnsupportedGraphError: If the model cannot be read as a graph.

    Example:
        The loss ``(3w − 1)²`` at w = 2, where doubling the input is doubling w:

        >>> from flatgauge.surface.examples import linear_regression
        >>> seeded = torch.Generator().manual_seed(0)
        >>> found = feature_robustness(
        ...     linear_regression(2.0), "weight", delta=1.0, generator=seeded
        ... )
        >>> found.mean, found.first_order.item(), round(found.bounds.item(), 6)  # 11² − 5²
        (96.0, 60.0, 36.0)
    """
    if not isinstance(surface, LossSurface):
        raise TypeError(
            f"`feature_robustness` measures a LossSurface, but got a {type(surface).__name__}; "
            "make one with LossSurface(model, loss, data)."
        )
    if generator is None:
        raise ValueError(
            "`feature_robustness(surface, layer)` draws matrices, and a vector to start the search "
            "for the eigenvalue from, and needs a generator; pass "
            "`generator=torch.Generator().manual_seed(0)`."
        )
    if not (math.isfinite(delta) and delta > 0):
        raise ValueError(f"`delta={delta!r}` must be a finite number above 0, such as 1e-3.")
    if draws < 1:
        raise ValueError(f"`draws={draws!r}` must be at least 1.")
    found = _layer(surface, layer)
    sources = partial(child_generator, root_seed(generator), device=generator.device)
    top = block_eigenvalues(
        surface,
        [layer],
        tolerance=_TOLERANCE,
        max_matvecs=_MAX_MATVECS,
        generator=sources("eigenvalue"),
    )[layer]
    double = surface.dtype is torch.float64 or surface.device.type == "mps"
    fine = surface if double else surface.copy(torch.float64)
    weight = fine.params[layer]
    moves, drawn = _moves(found.canonical(weight), matrices, draws, sources("matrices"))
    decay = surface.weight_decay
    gradient = to_float64(fine.split(fine.gradient())[layer] - decay * weight)
    before = _loss(fine, {})
    changes, slopes, norms = [], [], []
    for move, norm in moves:
        step = delta * found.original(move)
        changes.append(_loss(fine, {layer: weight + step}) - before)
        slopes.append(float((to_float64(step) * gradient).sum()))
        norms.append(norm)
    size = float(to_float64(weight).square().sum())
    curvature = max(top.value + top.bound - decay, 0.0)
    bounds = to_float64(torch.tensor(norms)).square() * (0.5 * delta**2 * size * curvature)
    return FeatureRobustness(
        layer,
        float(delta),
        torch.tensor(changes, dtype=torch.float64),
        torch.tensor(slopes, dtype=torch.float64),
        bounds,
        size * (top.value - decay),
        drawn,
    )


def _layer(surface: LossSurface, name: str) -> Layer:
    """Look a layer up."""
    plan = sweep_of(surface).plan
    if name not in plan.layers:
        close = get_close_matches(name, plan.layers, n=1) or [
            other for other in plan.layers if other.startswith(f"{name}.")
        ]
        hint = f"Did you mean `{close[0]}`? " if close else ""
        raise ValueError(
            f"`layer={name!r}` is not a layer of the model. {hint}The layers are "
            f"{', '.join(plan.layers) or 'none'}."
        )
    if plan.times_read(name) != 1:
        raise ValueError(
            f"the weight `{name}` is read {plan.times_read(name)} times, so that it has no one "
            "input to perturb; choose another layer."
        )
    return plan.layers[name]


def _loss(surface: LossSurface, changed: dict[str, Tensor]) -> float:
    """The mean loss with other values for some parameters, without the penalty of weight decay."""
    params = surface.params | changed
    value = surface.value(params) if changed else surface.value()
    squares = sum(float(to_float64(part).square().sum()) for part in params.values())
    return value - 0.5 * surface.weight_decay * squares


def _moves(
    weight: Tensor, matrices: str | Tensor, draws: int, generator: Generator
) -> tuple[Iterator[_Move], bool]:
    """WA for every matrix A with its norm, one after the other, and whether they are drawn."""
    units = weight.shape[0] * weight.shape[2]
    if not isinstance(matrices, str):
        return _user_matrices(weight, as_tensor(matrices, "matrices")), False
    if matrices == "projections":
        order = torch.randperm(units, generator=generator, device=generator.device)
        chosen = order[:draws].sort().values.tolist()
        return _projections(weight, chosen), len(chosen) < units
    if matrices == "orthogonal":
        return _rotations(weight, draws, generator), True
    raise ValueError(
        f"`matrices={matrices!r}` is unknown; use 'projections', 'orthogonal', or a tensor "
        f"(k, {units}, {units})."
    )


def _projections(weight: Tensor, chosen: list[int]) -> Iterator[_Move]:
    """Projections on single input units: the weights that leave them."""
    inner = weight.shape[2]
    for unit in chosen:
        move = torch.zeros_like(weight)
        move[unit // inner, :, unit % inner] = weight[unit // inner, :, unit % inner]
        yield move, 1.0


def _rotations(weight: Tensor, draws: int, generator: Generator) -> Iterator[_Move]:
    """Random orthogonal matrices, one in every group."""
    groups, _, inner, _ = weight.shape
    for _ in range(draws):
        drawn = torch.randn(groups, inner, inner, generator=generator, device=generator.device)
        found, triangle = torch.linalg.qr(drawn.double())
        # With the signs of the triangle, all rotations are equally likely.
        found = found * triangle.diagonal(dim1=1, dim2=2).sign()[:, None]
        yield _apply_matrices(weight, found.to(weight)), 1.0


def _user_matrices(weight: Tensor, matrices: Tensor) -> Iterator[_Move]:
    """Matrices of the user's."""
    groups, _, inner, _ = weight.shape
    units = groups * inner
    stacked = matrices[None] if matrices.dim() == 2 else matrices
    if stacked.dim() != 3 or stacked.shape[1:] != (units, units) or not len(stacked):
        raise ValueError(
            f"`matrices` has shape {tuple(matrices.shape)}, but the layer has {units} input units; "
            f"give ({units}, {units}) or (k, {units}, {units})."
        )
    if not bool(stacked.isfinite().all()):
        raise ValueError("`matrices` holds values that are nan or infinite; give finite ones.")
    blocks = stacked.reshape(-1, groups, inner, groups, inner)
    inside = torch.eye(groups, dtype=torch.bool, device=stacked.device)[:, None, :, None]
    if (blocks.masked_fill(inside, 0.0) != 0).any():
        raise ValueError(
            f"`matrices` mix input units of different groups, but each of the layer's {groups} "
            f"groups reads its own {inner}; entries between groups must be zero."
        )

    def moves() -> Iterator[_Move]:
        for matrix, block in zip(stacked, blocks, strict=True):
            own = block.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # (groups, in, in)
            yield (
                _apply_matrices(weight, own.to(weight)),
                float(torch.linalg.matrix_norm(to_float64(matrix), ord=2)),
            )

    return moves()


def _apply_matrices(weight: Tensor, blocks: Tensor) -> Tensor:
    """Weights (groups, out, in, taps) times matrices (groups, in, in) over their inputs."""
    return torch.einsum("goit,gij->gojt", weight, blocks)
