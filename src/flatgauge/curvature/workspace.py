"""Memory that a sweep uses again and again."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


class Workspace:
    """Tensors that are written anew from chunk to chunk, in the memory of those before.

    What the C library hands out in large pieces it takes back from the system page by page, and
    the first touch of a page costs as much as several passes over it.
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, Tensor] = {}

    def tensor(self, key: Hashable, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor whose values are whatever was there before.

        Args:
            key: What it is for; who asks under the same key writes over it.
            shape: Its shape.
            like: Of its precision, on its device.

        Returns:
            The tensor, contiguous.
        """
        size = math.prod(shape)
        held = self._held.get(key)
        if held is None or held.numel() < size or held.dtype != like.dtype:
            held = self._held[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return held[:size].view(*shape)
