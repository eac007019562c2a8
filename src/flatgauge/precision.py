"""Double precision for sums, on every device; and what rounding may change in each precision."""

from __future__ import annotations

from torch import Tensor

#: What reordered sums and arbitrary factors may change, relatively, in single and in double
#: precision.
SINGLE, DOUBLE = 1e-5, 1e-10


#: How many chunks are added up in their own precision.
EVERY = 16


def wide(tensor: Tensor) -> Tensor:
    """The tensor in double precision; on the CPU where its device has none (Apple's MPS)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


class Sums:
    """Vectors summed over chunks: a few in their own precision, and those sums in double.

    Single precision alone loses digits with every chunk; double precision alone can cost a
    third of a small chunk's product, as torch adds numbers of two precisions slowly.

    Attributes:
        near: Where the next chunks are added.
    """

    def __init__(self, near: Tensor) -> None:
        self.near = near
        self._far: Tensor | None = None
        self._chunks = 0

    def settle(self) -> None:
        """A chunk has been added."""
        self._chunks += 1
        if self._chunks % EVERY == 0:
            far = self.near if self.near.device.type == "mps" else self.near.double()
            self._far = far.clone() if self._far is None else self._far.add_(far)
            self.near.zero_()

    def clear(self) -> None:
        """Begin anew."""
        self.near.zero_()
        self._far, self._chunks = None, 0

    def total(self) -> Tensor:
        """The sum, to be asked for once; of a few chunks in their own precision."""
        return self.near if self._far is None else self._far.add_(self.near)
