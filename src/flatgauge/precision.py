"""Double precision for sums, on every device."""

from __future__ import annotations

from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """The tensor in double precision; on the CPU where its device has none (Apple's MPS)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()
