"""Double precision for sums, on every device; and what rounding may change in each precision."""

from __future__ import annotations

from torch import Tensor

#: What reordered sums and arbitrary factors may change, relatively, in single and in double
#: precision.
SINGLE, DOUBLE = 1e-5, 1e-10


def wide(tensor: Tensor) -> Tensor:
    """The tensor in double precision; on the CPU where its device has none (Apple's MPS)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()
