"""The second derivatives of a loss by the model's outputs, as sums of weight · u uᵀ.

For each sample B is a symmetric matrix over its outputs. It comes as factors u with weights, whose
sum is B: all of them, or those that carry most and random combinations of the rest. First
derivatives come in the same form, as one factor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from flatgauge.estimators.linalg import random_signs, to_float64

#: One vector u per sample, shaped like the outputs, and its weights (n,) if they are not all one.
Factor = tuple[Tensor, Tensor | None]


class LossHessian(ABC):
    """B for every sample of a chunk.

    Attributes:
        rank: How many factors give B exactly.
        axis: Of the outputs, along which classes lie.
        can_sample: Whether B also comes as its top factors and random combinations of the rest.
    """

    rank: int
    axis = 1
    can_sample = False

    @abstractmethod
    def factors(self) -> Iterator[Factor]:
        """All factors, so that B is exact."""

    def top_factors(self, count: int) -> Iterator[Factor]:
        """The factors that carry most; the others are left to `random_factors`."""
        raise NotImplementedError

    def random_factors(self, count: int, generator: Generator) -> Iterator[Factor]:
        """Combinations, with random signs, of what `top_factors` left; each is unbiased."""
        raise NotImplementedError


@dataclass
class SoftmaxHessian(LossHessian):
    """Weight · (diag p − p pᵀ) at every position: cross-entropy.

    Attributes:
        probabilities: The softmax p (n, positions, classes), in double precision.
        weights: Of every position (n, positions).
        restore: Brings (n, positions, classes) to the shape of the outputs.
    """

    probabilities: Tensor
    weights: Tensor
    restore: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    axis: int = 1

    def __post_init__(self) -> None:
        p = self.probabilities
        self.rank = p.shape[1] * (p.shape[2] - 1)
        self.can_sample = bool((self.weights >= 0).all())
        self._rest: Tensor | None = None
        # 1 − p is a sum of small terms where p is nearly one: no difference of near numbers.
        self._top = p.argmax(-1, keepdim=True)
        self._others = (1 - p).scatter(
            -1, self._top, p.scatter(-1, self._top, 0.0).sum(-1, keepdim=True)
        )

    def factors(self) -> Iterator[Factor]:
        """The columns of an LDLᵀ decomposition: sums of positive terms, no difference anywhere."""
        p = self.probabilities
        tails = p.flip(-1).cumsum(-1).flip(-1).clamp_min(torch.finfo(p.dtype).tiny)  # Σ_{j≥k} p_j
        for position in range(p.shape[1]):
            given = self.weights[:, position]
            weights = None if bool((given == 1).all()) else given
            for k in range(p.shape[2] - 1):
                after = tails[:, position, k + 1]
                root = (p[:, position, k] * after / tails[:, position, k]).sqrt()
                vector = torch.zeros_like(p)
                vector[:, position, k] = root
                vector[:, position, k + 1 :] = p[:, position, k + 1 :] * (-root / after)[:, None]
                yield self.restore(vector.to(self.dtype)), weights

    def top_factors(self, count: int) -> Iterator[Factor]:
        """The factors √p_k (e_k − p) of largest norm."""
        p = self.probabilities
        squares = p.square()
        apart = (squares.sum(-1, keepdim=True) - squares).clamp_min(0)
        norms = self.weights[..., None] * p * (self._others.square() + apart)
        picked = norms.flatten(1).topk(min(count, norms[0].numel()), dim=1).indices
        self._rest = torch.ones_like(p).flatten(1).scatter(1, picked, 0.0).view_as(p)
        single = -p.to(self.dtype)
        rows = torch.arange(len(p), device=p.device)
        for index in picked.T:
            position, k = index // p.shape[2], index % p.shape[2]
            root = (self.weights[rows, position] * p[rows, position, k]).sqrt()
            vector = torch.zeros_like(single)
            vector[rows, position] = single[rows, position] * root.to(self.dtype)[:, None]
            vector[rows, position, k] = (root * self._others[rows, position, k]).to(self.dtype)
            yield self.restore(vector), None

    def random_factors(self, count: int, generator: Generator) -> Iterator[Factor]:
        """Random combinations of the other factors √p_k (e_k − p)."""
        p = self.probabilities
        scale = (self.weights[..., None] * p / count).sqrt()
        if self._rest is not None:
            scale = scale * self._rest
        for _ in range(count):
            mixed = scale * random_signs(scale.shape, generator).to(scale)
            sums = mixed.sum(-1, keepdim=True)
            vector = mixed - p * sums
            own = mixed.gather(-1, self._top)
            # Where one class has nearly all, the difference is taken apart to keep its digits.
            most = own * self._others.gather(-1, self._top)
            most = most - p.gather(-1, self._top) * (sums - own)
            yield self.restore(vector.scatter(-1, self._top, most).to(self.dtype)), None


@dataclass
class DiagonalHessian(LossHessian):
    """A diagonal B ≥ 0, shaped like the outputs: losses that are sums over outputs."""

    values: Tensor

    can_sample = True

    def __post_init__(self) -> None:
        self.rank = self.values[0].numel()
        self._rest: Tensor | None = None

    def factors(self) -> Iterator[Factor]:
        """One unit vector per output."""
        values = _rows(self.values)
        for k in range(self.rank):
            vector = torch.zeros_like(values)
            vector[:, k] = 1
            yield vector.view_as(self.values), values[:, k]

    def top_factors(self, count: int) -> Iterator[Factor]:
        """The outputs of largest curvature."""
        values = _rows(self.values)
        picked = values.topk(min(count, self.rank), dim=1).indices
        self._rest = torch.ones_like(values).scatter(1, picked, 0.0)
        for index in picked.T:
            vector = torch.zeros_like(values).scatter(1, index[:, None], 1.0)
            yield vector.view_as(self.values), values.gather(1, index[:, None])[:, 0]

    def random_factors(self, count: int, generator: Generator) -> Iterator[Factor]:
        """Random combinations of the other outputs."""
        roots = _rows(self.values).sqrt() * (1.0 if self._rest is None else self._rest)
        for _ in range(count):
            signs = random_signs(roots.shape, generator).to(roots)
            yield (roots * signs / count**0.5).view_as(self.values), None


@dataclass
class DenseHessian(LossHessian):
    """Any symmetric B (n, outputs, outputs), by its eigenvectors and signed eigenvalues."""

    matrices: Tensor
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.rank = self.matrices.shape[1]

    def factors(self) -> Iterator[Factor]:
        """The eigenvectors."""
        values, vectors = torch.linalg.eigh(self.matrices)
        for k in range(self.rank):
            yield vectors[:, :, k].reshape(len(vectors), *self.shape), values[:, k]


@dataclass
class SquaredGradient(LossHessian):
    """The squared gradient in the place of B, as one factor: the empirical Fisher information."""

    slopes: Tensor
    weights: Tensor
    rank = 1

    def factors(self) -> Iterator[Factor]:
        """The gradient itself."""
        yield self.slopes, self.weights


def squared_gradient(
    total: Callable[[Tensor], Tensor], outputs: Tensor, counts: Tensor
) -> SquaredGradient:
    """Differentiate a sum of losses of single samples by the outputs."""
    point = to_float64(outputs.detach()).requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(total(point), point)
    return SquaredGradient(slope, counts.reciprocal().where(counts != 0, 0.0))


def dense_hessian(total: Callable[[Tensor], Tensor], outputs: Tensor) -> DenseHessian:
    """Differentiate a sum of losses of single samples twice by the outputs."""
    point = to_float64(outputs.detach()).requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(total(point), point, create_graph=True)
        flat = _rows(slope)
        rows = []
        for k in range(flat.shape[1]):
            if not flat.requires_grad:  # The loss is linear in the outputs.
                rows.append(torch.zeros_like(flat))
                continue
            (row,) = torch.autograd.grad(flat[:, k].sum(), point, retain_graph=True)
            rows.append(_rows(row.detach()))
    matrices = torch.stack(rows, dim=1)
    return DenseHessian((matrices + matrices.mT) / 2, tuple(outputs.shape[1:]))


def _rows(tensor: Tensor) -> Tensor:
    """One row per sample."""
    return tensor.reshape(len(tensor), -1)
