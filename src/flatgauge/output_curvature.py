"""The second derivatives of a loss by the model's outputs, as sums of columns u uᵀ.

Every form here holds, for each sample, a matrix B over its outputs, and hands it out as columns
with B = Σ weight · u uᵀ: all of them, or the heaviest and random mixtures of the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from flatgauge.precision import wide

#: One column for every sample, shaped like the outputs, and its weights where not all are one.
Column = tuple[Tensor, Tensor | None]


class OutputCurvature(ABC):
    """B for every sample of a chunk.

    Attributes:
        rank: How many columns give B exactly.
        can_mix: Whether it also comes as heavy columns and mixtures.
    """

    rank: int
    can_mix = True

    @abstractmethod
    def columns(self) -> Iterator[Column]:
        """All columns, so that B is exact."""

    @abstractmethod
    def heavy(self, count: int) -> Iterator[Column]:
        """The columns that carry most, as many as asked for; the others are left to `mixtures`."""

    @abstractmethod
    def mixtures(self, count: int, generator: Generator) -> Iterator[Column]:
        """Mixtures with random signs of what `heavy` left, each by itself unbiased."""


@dataclass
class Softmax(OutputCurvature):
    """Weight · (diag p − p pᵀ) at every position: cross-entropy.

    Attributes:
        probabilities: The softmax p (n, positions, classes).
        weights: Of every position (n, positions).
        restore: Brings (n, positions, classes) to the shape of the outputs.
    """

    probabilities: Tensor
    weights: Tensor
    restore: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        _, positions, classes = self.probabilities.shape
        self.rank = positions * (classes - 1)
        self._rest: Tensor | None = None

    def columns(self) -> Iterator[Column]:
        """The factors of an LDLᵀ decomposition: sums of positive terms, no difference anywhere."""
        p = self.probabilities
        tails = p.flip(-1).cumsum(-1).flip(-1)  # q_k = Σ_{j ≥ k} p_j
        for position in range(p.shape[1]):
            for k in range(p.shape[2] - 1):
                after = tails[:, position, k + 1].clamp_min(torch.finfo(p.dtype).tiny)
                pivot = (
                    p[:, position, k]
                    * after
                    / tails[:, position, k].clamp_min(torch.finfo(p.dtype).tiny)
                )
                column = torch.zeros_like(p)
                column[:, position, k] = 1
                column[:, position, k + 1 :] = -p[:, position, k + 1 :] / after[:, None]
                column *= (self.weights[:, position] * pivot).sqrt()[:, None, None]
                yield self.restore(column), None

    def heavy(self, count: int) -> Iterator[Column]:
        """The columns √p_k (e_k − p) of largest norm."""
        p = self.probabilities
        squares = p.square()
        total = squares.sum(-1, keepdim=True)
        others = p.sum(-1, keepdim=True) - p  # 1 − p_k is a sum of small terms where p_k ≈ 1
        top = p.argmax(-1, keepdim=True)
        without = p.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        others = others.scatter(-1, top, without)
        norms = self.weights[..., None] * p * (others.square() + (total - squares).clamp_min(0))
        picked = norms.flatten(1).topk(min(count, norms[0].numel()), dim=1).indices
        self._rest = torch.ones_like(p).flatten(1).scatter(1, picked, 0.0).view_as(p)
        for index in picked.T:
            chosen = torch.zeros_like(p).flatten(1)
            chosen = chosen.scatter(1, index[:, None], 1.0).view_as(p)
            yield self._mixed(chosen), None

    def mixtures(self, count: int, generator: Generator) -> Iterator[Column]:
        """± mixtures of the other columns √p_k (e_k − p)."""
        rest = torch.ones_like(self.probabilities) if self._rest is None else self._rest
        for _ in range(count):
            yield self._mixed(rest * _signs(rest, generator) / count**0.5), None

    def _mixed(self, factors: Tensor) -> Tensor:
        """Σ_k factor_k √(weight p_k) (e_k − p)."""
        p = self.probabilities
        scaled = factors * (self.weights[..., None] * p).sqrt()
        sums = scaled.sum(-1, keepdim=True)
        column = scaled - p * sums
        # Where one class has nearly all, the difference is taken apart to keep its digits.
        top = p.argmax(-1, keepdim=True)
        rest = p.scatter(-1, top, 0.0).sum(-1, keepdim=True)
        own = scaled.gather(-1, top)
        exact = own * rest - p.gather(-1, top) * (sums - own)
        return self.restore(column.scatter(-1, top, exact))


@dataclass
class Diagonal(OutputCurvature):
    """A diagonal B: losses that are sums over outputs.

    Attributes:
        values: The diagonal, shaped like the outputs, nowhere negative.
    """

    values: Tensor

    def __post_init__(self) -> None:
        self.rank = self.values[0].numel()
        self._rest: Tensor | None = None

    def columns(self) -> Iterator[Column]:
        """One unit vector per output."""
        values = self.values.flatten(1)
        for k in range(self.rank):
            column = torch.zeros_like(values)
            column[:, k] = 1
            yield column.view_as(self.values), values[:, k]

    def heavy(self, count: int) -> Iterator[Column]:
        """The outputs of largest curvature."""
        values = self.values.flatten(1)
        picked = values.topk(min(count, self.rank), dim=1).indices
        self._rest = torch.ones_like(values).scatter(1, picked, 0.0)
        for index in picked.T:
            column = torch.zeros_like(values).scatter(1, index[:, None], 1.0)
            yield column.view_as(self.values), values.gather(1, index[:, None])[:, 0]

    def mixtures(self, count: int, generator: Generator) -> Iterator[Column]:
        """± mixtures of the other outputs."""
        roots = self.values.flatten(1).sqrt() * (1.0 if self._rest is None else self._rest)
        for _ in range(count):
            yield (roots * _signs(roots, generator) / count**0.5).view_as(self.values), None


@dataclass
class Dense(OutputCurvature):
    """Any symmetric B, by its eigenvectors, weighted by their eigenvalues with their signs.

    Attributes:
        matrices: B (n, outputs, outputs).
        shape: Of one sample's outputs.
    """

    matrices: Tensor
    shape: tuple[int, ...]

    can_mix = False

    def __post_init__(self) -> None:
        self.rank = self.matrices.shape[1]

    def columns(self) -> Iterator[Column]:
        """The eigenvectors."""
        values, vectors = torch.linalg.eigh(self.matrices)
        for k in range(self.rank):
            yield vectors[:, :, k].unflatten(1, self.shape), values[:, k]

    def heavy(self, count: int) -> Iterator[Column]:
        """Not for a matrix that is written out."""
        raise NotImplementedError

    def mixtures(self, count: int, generator: Generator) -> Iterator[Column]:
        """Not for a matrix that is written out."""
        raise NotImplementedError


def dense(total: Callable[[Tensor], Tensor], outputs: Tensor) -> Dense:
    """Differentiate a sum of losses of single samples twice by the outputs.

    Args:
        total: The sum of the losses, as a function of the outputs.
        outputs: Where (n, ...).

    Returns:
        B of every sample.
    """
    point = wide(outputs.detach()).requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(total(point), point, create_graph=True)
        flat = slope.flatten(1)
        rows = []
        for k in range(flat.shape[1]):
            if not flat.requires_grad:  # The loss is linear in the outputs.
                rows.append(torch.zeros_like(flat))
                continue
            (row,) = torch.autograd.grad(flat[:, k].sum(), point, retain_graph=True)
            rows.append(row.detach().flatten(1))
    matrices = torch.stack(rows, dim=1)
    return Dense((matrices + matrices.mT) / 2, tuple(outputs.shape[1:]))


def _signs(like: Tensor, generator: Generator) -> Tensor:
    """Random signs."""
    signs = torch.randint(0, 2, like.shape, generator=generator, device=generator.device)
    return (2 * signs - 1).to(like)
