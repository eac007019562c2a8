"""Between flat vectors and tensors of the parameters' shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def split(vector: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector as tensors of the parameters' shapes."""
    parts = torch.split(vector, [param.numel() for param in params])
    return [part.view_as(param) for part, param in zip(parts, params, strict=True)]


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Tensors of the parameters' shapes as a flat vector."""
    return torch.cat([part.detach().reshape(-1) for part in parts])
