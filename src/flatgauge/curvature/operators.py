"""Curvature operators: symmetric matrices known by their products with vectors.

`Hessian` is that of a loss surface, by Hessian-vector products. `Scaled` writes an operator in
other units, `Restricted` and `ParameterBlock` take some of its rows and columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface


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


class Hessian(Operator):
    """All second derivatives of the loss by the trainable parameters.

    Args:
        surface: Where to differentiate.

    Example:
        >>> from flatgauge.surface.examples import two_weights
        >>> Hessian(two_weights(2.0, 3.0)).dense()  # L = (b relu(a))^2 at a = 2, b = 3
        tensor([[18., 24.],
                [24.,  8.]], dtype=torch.float64)
    """

    def __init__(self, surface: LossSurface) -> None:
        super().__init__(surface.size, surface.dtype, surface.device)
        self._surface = surface
        # How to multiply is tried out now: whoever asks for products will hold vectors then.
        surface.try_out_products()

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self._surface.hvp(vectors)


class Scaled(Operator):
    """A symmetric operator with its rows and columns multiplied by the same numbers.

    Args:
        operator: The operator A.
        by: The diagonal of D (p,).

    Example:
        >>> import torch
        >>> from flatgauge.curvature import Hessian
        >>> from flatgauge.surface.examples import two_weights
        >>> H = Hessian(two_weights(2.0, 3.0))
        >>> Scaled(H, by=torch.tensor([2.0, 3.0])).dense()  # [[18, 24], [24, 8]] in these units
        tensor([[ 72., 144.],
                [144.,  72.]], dtype=torch.float64)
    """

    def __init__(self, operator: Operator, by: Tensor) -> None:
        super().__init__(operator.shape[0], operator.dtype, operator.device)
        self._operator = operator
        self._by = by.to(operator.device, operator.dtype)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        factors = self._by if vectors.dim() == 1 else self._by[:, None]
        return factors * (self._operator @ (factors * vectors))


class Restricted(Operator):
    """A symmetric operator between some of its coordinates."""

    def __init__(self, operator: Operator, chosen: Tensor) -> None:
        super().__init__(len(chosen), operator.dtype, operator.device)
        self._operator, self._chosen = operator, chosen.to(operator.device)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(self.shape[0], -1)
        whole = columns.new_zeros(self._operator.shape[0], columns.shape[1])
        whole[self._chosen] = columns
        return (self._operator @ whole)[self._chosen].reshape(vectors.shape)


class ParameterBlock(Operator):
    """The Hessian's block of some parameters, by products with the whole Hessian."""

    def __init__(self, surface: LossSurface, names: tuple[str, ...]) -> None:
        shapes = {name: value.shape for name, value in surface.params.items()}
        size = sum(shapes[name].numel() for name in names)
        super().__init__(size, surface.dtype, surface.device)
        self._surface, self._names = surface, names
        self._sizes = {name: shape.numel() for name, shape in shapes.items()}

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns, sizes = vectors.reshape(self.shape[0], -1), list(self._sizes.values())
        whole = columns.new_zeros(sum(sizes), columns.shape[1])
        parts = dict(zip(self._sizes, whole.split(sizes), strict=True))  # Views of it.
        given = columns.split([self._sizes[name] for name in self._names])
        for name, part in zip(self._names, given, strict=True):
            parts[name].copy_(part)
        product = dict(zip(self._sizes, self._surface.hvp(whole).split(sizes), strict=True))
        return torch.cat([product[name] for name in self._names]).reshape(vectors.shape)
