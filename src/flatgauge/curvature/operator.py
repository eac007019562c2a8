"""The contract of a curvature operator."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Operator(ABC):
    """A symmetric matrix known by its products, to be used like a matrix.

    Attributes:
        shape: ``(p, p)``.
        dtype: Of its products.
        device: Of its products.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = (size, size)
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Multiply a vector (p,) or every column of a matrix (p, k)."""

    def dense(self) -> Tensor:
        """Write the matrix out: p products and p² numbers, for small problems."""
        return self @ torch.eye(self.shape[0], dtype=self.dtype, device=self.device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape[0]} x {self.shape[1]}, {self.dtype})"
