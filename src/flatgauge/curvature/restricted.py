"""Some rows and columns of a curvature operator."""

from __future__ import annotations

from torch import Tensor

from flatgauge.curvature.operator import Operator


class Restricted(Operator):
    """A symmetric operator between some of its coordinates.

    Args:
        operator: The operator.
        chosen: The coordinates.
    """

    def __init__(self, operator: Operator, chosen: Tensor) -> None:
        super().__init__(len(chosen), operator.dtype, operator.device)
        self._operator, self._chosen = operator, chosen.to(operator.device)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(self.shape[0], -1)
        whole = columns.new_zeros(self._operator.shape[0], columns.shape[1])
        whole[self._chosen] = columns
        return (self._operator @ whole)[self._chosen].reshape(vectors.shape)
