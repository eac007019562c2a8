"""Double precision for sums, on every device; and what rounding may change in each precision."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

#: What reordered sums and arbitrary factors may change, relatively, in single and in double
#: precision.
SINGLE, DOUBLE = 1e-5, 1e-10


#: How many chunks are added up in their own precision.
EVERY = 16

#: Entries of long vectors that are worked on at a time, where a copy is needed.
_PIECE = 2**20


def wide(tensor: Tensor) -> Tensor:
    """The tensor in double precision; on the CPU where its device has none (Apple's MPS)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def wide_pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Long vectors in double precision, a piece at a time: whole, they would be twice as large.

    Args:
        vectors: Vectors of one length.

    Yields:
        Pieces of all of them.
    """
    for pieces in zip(*(vector.split(_PIECE) for vector in vectors), strict=True):
        yield tuple(wide(piece) for piece in pieces)


def length_of(vector: Tensor) -> float:
    """The length of a vector, summed in double precision."""
    return math.hypot(*(float(piece.norm()) for (piece,) in wide_pieces(vector)))


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
            if self._far is None:
                double = self.near.dtype if self.near.device.type == "mps" else torch.float64
                self._far = torch.zeros_like(self.near, dtype=double)
            flat = (vector.view(-1).split(_PIECE) for vector in (self._far, self.near))
            for far, near in zip(*flat, strict=True):
                far += near.to(far.dtype)
            self.near.zero_()

    def clear(self) -> None:
        """Begin anew."""
        self.near.zero_()
        self._far, self._chunks = None, 0

    def total(self) -> Tensor:
        """The sum, to be asked for once; of a few chunks in their own precision."""
        return self.near if self._far is None else self._far.add_(self.near)


class Coarse(TorchDispatchMode):
    """Notices what is computed with less than single precision (autocast, casts of a model's own).

    Attributes:
        kinds: The precisions.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: set[torch.dtype] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and look at what it gives."""
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
                self.kinds.add(value.dtype)
        return result


def names_of(kinds: set[torch.dtype]) -> str:
    """Precisions by their names, as in ``bfloat16``."""
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
