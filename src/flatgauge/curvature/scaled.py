"""A curvature operator in units of the geometry: D A D."""

from __future__ import annotations

from torch import Tensor

from flatgauge.curvature.operator import Operator


class Scaled(Operator):
    """A symmetric operator with its rows and columns multiplied by the same numbers.

    Args:
        operator: The operator A.
        by: The diagonal of D (p,).

    Example:
        >>> import torch
        >>> from flatgauge.curvature import Hessian
        >>> from flatgauge.examples import two_weights
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
