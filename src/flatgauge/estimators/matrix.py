"""Anything square with ``shape`` and ``@``, seen as one counted matrix on torch vectors."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class SupportsMatmul(Protocol):
    """A square matrix of any library: torch, numpy, scipy, or an operator of our own."""

    @property
    def shape(self) -> Any:
        """Rows and columns."""

    def __matmul__(self, other: Any, /) -> Any:
        """The product with a vector ``(p,)`` or with a block of columns ``(p, k)``."""


class Matrix:
    """A square matrix, whatever its library, that multiplies torch vectors and counts.

    Objects with a torch ``dtype``, or with none, are handed torch vectors; all others
    (numpy arrays, scipy matrices and operators) are handed numpy vectors. Integer matrices
    and objects without a ``dtype`` are worked on in float64. Products carry no autograd
    graph. Symmetry is taken for granted here and nowhere enforced.

    Attributes:
        size: Number of rows and of columns.
        dtype: Floating-point type of the vectors, torch.float32 or torch.float64.
        device: Where the vectors live.
        matvecs: Products made so far; a block of k columns counts as k.

    Example:
        >>> matrix = Matrix(np.array([[2, 1], [1, 2]]))
        >>> matrix @ torch.tensor([1.0, 0.0], dtype=matrix.dtype)
        tensor([2., 1.], dtype=torch.float64)
        >>> matrix.matvecs
        1
    """

    def __init__(self, operator: SupportsMatmul) -> None:
        self.size = _square(operator)
        given = getattr(operator, "dtype", None)
        self._numpy = given is not None and not isinstance(given, torch.dtype)
        self.dtype = _working_dtype(given)
        self.device = torch.device("cpu" if self._numpy else getattr(operator, "device", "cpu"))
        self._name = type(operator).__name__
        if isinstance(operator, Tensor):
            operator = operator.detach().to(self.dtype)
        elif isinstance(operator, np.ndarray):
            operator = np.asarray(operator)  # np.matrix would return rows for vectors
        self._operator = operator
        self.matvecs = 0

    def __matmul__(self, block: Tensor) -> Tensor:
        """Multiply a vector ``(p,)`` or a block of columns ``(p, k)``."""
        self.matvecs += block.shape[1] if block.ndim == 2 else 1
        product = self._operator @ (block.cpu().numpy() if self._numpy else block)
        if not isinstance(product, Tensor):
            product = torch.from_numpy(np.array(product))
        product = product.detach().to(device=self.device, dtype=self.dtype)
        if product.shape != block.shape:
            raise ValueError(
                f"the product of the {self.size} × {self.size} `{self._name}` with a block of "
                f"shape {tuple(block.shape)} has shape {tuple(product.shape)}; `@` must return "
                "the shape it is given, for vectors (p,) and for blocks (p, k)."
            )
        if not torch.isfinite(product).all():
            raise ValueError(self._not_finite(product))
        return product

    def _not_finite(self, product: Tensor) -> str:
        """Say how a product went wrong."""
        kind = "nan" if torch.isnan(product).any() else "inf"
        bad = int((~torch.isfinite(product)).sum())
        return (
            f"the product with the {self.size} × {self.size} `{self._name}` is not finite "
            f"({kind}; {bad} of {product.numel()} entries, product {self.matvecs}); nothing "
            "can be said about such a matrix. Check that the loss and its derivatives are "
            "finite at these parameters and on this data."
        )


def _square(operator: SupportsMatmul) -> int:
    """The number of rows, once it is sure that there are as many columns."""
    shape = tuple(int(n) for n in operator.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise ValueError(
            f"`operator` has shape {shape!r}; a square matrix (p, p) with p >= 1 is needed."
        )
    return shape[0]


def _working_dtype(given: Any) -> torch.dtype:
    """The torch type in which to hold the vectors for a matrix of type ``given``."""
    name = str(given).removeprefix("torch.") if given is not None else "none"
    if name == "float32":
        return torch.float32
    if name in ("float64", "none", "bool") or "int" in name:
        return torch.float64
    raise ValueError(
        f"`operator` has dtype {name}; float32 or float64 is needed, because spectra computed "
        "with fewer digits are mostly rounding (and complex ones are not supported). Convert "
        "the model or the matrix first, for example with `.float()`."
    )
