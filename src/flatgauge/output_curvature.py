"""The second derivatives of a loss by the model's outputs, as sums of columns u uᵀ.

Every form here holds, for each sample, a matrix B over its outputs, and hands it out as columns
with B = Σ weight · u uᵀ: all of them, or the heaviest and random mixtures of the rest. First
derivatives come in the same form, as one column.
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
        axis: Of the outputs, along which classes lie.
    """

    rank: int
    axis = 1

    @abstractmethod
    def columns(self) -> Iterator[Column]:
        """All columns, so that B is exact."""


class Mixable(OutputCurvature):
    """B that also comes as its heaviest columns and random mixtures of the rest.

    Attributes:
        can_mix: Whether it does so for these samples: columns of different signs do not mix.
    """

    can_mix = True

    @abstractmethod
    def heavy(self, count: int) -> Iterator[Column]:
        """The columns that carry most, as many as asked for; the others are left to `mixtures`."""

    @abstractmethod
    def mixtures(self, count: int, generator: Generator) -> Iterator[Column]:
        """Mixtures with random signs of what `heavy` left, each by itself unbiased."""


@dataclass
class Softmax(Mixable):
    """Weight · (diag p − p pᵀ) at every position: cross-entropy.

    Attributes:
        probabilities: The softmax p (n, positions, classes), in double precision.
        weights: Of every position (n, positions).
        restore: Brings (n, positions, classes) to the shape of the outputs.
        dtype: Of the columns.
        axis: Of the outputs, along which classes lie.
    """

    probabilities: Tensor
    weights: Tensor
    restore: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    axis: int = 1

    def __post_init__(self) -> None:
        p = self.probabilities
        self.rank = p.shape[1] * (p.shape[2] - 1)
        self.can_mix = bool((self.weights >= 0).all())
        self._rest: Tensor | None = None
        # 1 − p is a sum of small terms where p is nearly one: no difference of near numbers.
        self._top = p.argmax(-1, keepdim=True)
        self._others = (1 - p).scatter(
            -1, self._top, p.scatter(-1, self._top, 0.0).sum(-1, keepdim=True)
        )

    def columns(self) -> Iterator[Column]:
        """The factors of an LDLᵀ decomposition: sums of positive terms, no difference anywhere."""
        p = self.probabilities
        tails = p.flip(-1).cumsum(-1).flip(-1).clamp_min(torch.finfo(p.dtype).tiny)  # Σ_{j≥k} p_j
        for position in range(p.shape[1]):
            weights = self.weights[:, position]
            factor = None if bool((weights == 1).all()) else weights
            for k in range(p.shape[2] - 1):
                after = tails[:, position, k + 1]
                root = (p[:, position, k] * after / tails[:, position, k]).sqrt()
                column = torch.zeros_like(p)
                column[:, position, k] = root
                column[:, position, k + 1 :] = p[:, position, k + 1 :] * (-root / after)[:, None]
                yield self.restore(column.to(self.dtype)), factor

    def heavy(self, count: int) -> Iterator[Column]:
        """The columns √p_k (e_k − p) of largest norm."""
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
            column = torch.zeros_like(single)
            column[rows, position] = single[rows, position] * root.to(self.dtype)[:, None]
            column[rows, position, k] = (root * self._others[rows, position, k]).to(self.dtype)
            yield self.restore(column), None

    def mixtures(self, count: int, generator: Generator) -> Iterator[Column]:
        """± mixtures of the other columns √p_k (e_k − p)."""
        p = self.probabilities
        scale = (self.weights[..., None] * p / count).sqrt()
        if self._rest is not None:
            scale = scale * self._rest
        for _ in range(count):
            mixed = scale * _signs(scale, generator)
            sums = mixed.sum(-1, keepdim=True)
            column = mixed - p * sums
            own = mixed.gather(-1, self._top)
            # Where one class has nearly all, the difference is taken apart to keep its digits.
            most = own * self._others.gather(-1, self._top)
            most = most - p.gather(-1, self._top) * (sums - own)
            yield self.restore(column.scatter(-1, self._top, most).to(self.dtype)), None


@dataclass
class Diagonal(Mixable):
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
        values = _rows(self.values)
        for k in range(self.rank):
            column = torch.zeros_like(values)
            column[:, k] = 1
            yield column.view_as(self.values), values[:, k]

    def heavy(self, count: int) -> Iterator[Column]:
        """The outputs of largest curvature."""
        values = _rows(self.values)
        picked = values.topk(min(count, self.rank), dim=1).indices
        self._rest = torch.ones_like(values).scatter(1, picked, 0.0)
        for index in picked.T:
            column = torch.zeros_like(values).scatter(1, index[:, None], 1.0)
            yield column.view_as(self.values), values.gather(1, index[:, None])[:, 0]

    def mixtures(self, count: int, generator: Generator) -> Iterator[Column]:
        """± mixtures of the other outputs."""
        roots = _rows(self.values).sqrt() * (1.0 if self._rest is None else self._rest)
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

    def __post_init__(self) -> None:
        self.rank = self.matrices.shape[1]

    def columns(self) -> Iterator[Column]:
        """The eigenvectors."""
        values, vectors = torch.linalg.eigh(self.matrices)
        for k in range(self.rank):
            yield vectors[:, :, k].reshape(len(vectors), *self.shape), values[:, k]


@dataclass
class Gradient(OutputCurvature):
    """The squared gradient in the place of B, as one column: the empirical Fisher information.

    Attributes:
        slopes: The gradient of the loss by the outputs, shaped like them.
        weights: Of every sample (n,).
    """

    slopes: Tensor
    weights: Tensor
    rank = 1

    def columns(self) -> Iterator[Column]:
        """The gradient itself."""
        yield self.slopes, self.weights


def gradient(total: Callable[[Tensor], Tensor], outputs: Tensor, counts: Tensor) -> Gradient:
    """Differentiate a sum of losses of single samples by the outputs.

    Args:
        total: The sum of the losses, as a function of the outputs.
        outputs: Where (n, ...).
        counts: What every sample adds to the denominator of the mean (n,): its own loss is its
            share in the total over its count.

    Returns:
        The gradient, weighted so that squares over the sum of counts are the mean square of the
        samples' own gradients.
    """
    point = wide(outputs.detach()).requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(total(point), point)
    return Gradient(slope, counts.reciprocal().where(counts != 0, 0.0))


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
        flat = _rows(slope)
        rows = []
        for k in range(flat.shape[1]):
            if not flat.requires_grad:  # The loss is linear in the outputs.
                rows.append(torch.zeros_like(flat))
                continue
            (row,) = torch.autograd.grad(flat[:, k].sum(), point, retain_graph=True)
            rows.append(_rows(row.detach()))
    matrices = torch.stack(rows, dim=1)
    return Dense((matrices + matrices.mT) / 2, tuple(outputs.shape[1:]))


def _rows(tensor: Tensor) -> Tensor:
    """One row per sample."""
    return tensor.reshape(len(tensor), -1)


def _signs(like: Tensor, generator: Generator) -> Tensor:
    """Random signs."""
    signs = torch.randint(0, 2, like.shape, generator=generator, device=generator.device)
    return (2 * signs - 1).to(like)
