"""Matrices with a prescribed spectrum, and a wrapper that counts the products really made."""

import numpy as np
import torch
from torch import Generator, Tensor

_RANDOM = np.random.default_rng(0)

SPECTRA = {
    "outliers": np.r_[100, 60, 40, 30, 20, 10, 8, np.abs(_RANDOM.standard_normal(193)) * 0.3],
    "network": np.r_[10, 9.5, 8, 4, 3, 2, 2, 1, -0.5, -0.3, _RANDOM.standard_normal(190) * 0.02],
    "negative dominant": np.r_[np.linspace(-100, -1, 49), 1.0],
    "repeated": np.r_[5, 5, 5, 3, 3, 1, np.linspace(-1, 0.5, 194)],
    "low rank": np.r_[3, 2, 1, np.zeros(197)],
    "power law": 1 / np.arange(1, 201),
    "zero": np.zeros(50),
    "identity": np.ones(50),
    "one": np.array([-7.0]),
    "two": np.array([-3.0, 2.0]),
    "three": np.array([1.0, 1.0, 4.0]),
}
CLUSTERED = np.r_[10, 9.999, 9.995, 9.99, 9.98, np.linspace(-1, 5, 195)]


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def matrix_with(spectrum: np.ndarray, dtype: torch.dtype = torch.float64) -> Tensor:
    """Symmetric matrix with these eigenvalues and random eigenvectors."""
    size = len(spectrum)
    rotation, _ = np.linalg.qr(np.random.default_rng(size).standard_normal((size, size)))
    dense = (rotation * spectrum) @ rotation.T
    return torch.from_numpy((dense + dense.T) / 2).to(dtype)


def eigenvalues(matrix: Tensor) -> np.ndarray:
    """All eigenvalues, falling, from a dense decomposition in float64."""
    return np.linalg.eigvalsh(matrix.double().numpy())[::-1].copy()


class Counted:
    """An operator of its own kind, which counts the columns it multiplies."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.shape = matrix.shape
        self.dtype = matrix.dtype
        self.device = matrix.device
        self.columns = 0

    def __matmul__(self, block: Tensor) -> Tensor:
        assert isinstance(block, Tensor)
        assert block.dtype == self.dtype
        self.columns += block.shape[1] if block.ndim == 2 else 1
        return self.matrix @ block
