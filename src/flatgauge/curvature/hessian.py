"""The Hessian of a loss surface."""

from __future__ import annotations

from torch import Tensor

from flatgauge.curvature.operator import Operator
from flatgauge.surface import LossSurface


class Hessian(Operator):
    """All second derivatives of the loss by the trainable parameters.

    Args:
        surface: Where to differentiate.

    Example:
        >>> from flatgauge.examples import two_weights
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
