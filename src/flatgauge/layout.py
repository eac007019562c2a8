"""Where each parameter lies in a flat vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Layout:
    """The order and shapes of the parameters in a flat vector.

    Attributes:
        names: The parameters' names, in order.
        size: The number of entries p.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self.names = tuple(names)
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._sizes = [tensor.numel() for tensor in tensors]
        self.size = sum(self._sizes)

    def pieces(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector (p,), or of the columns of a matrix (p, k), as views."""
        parts = torch.split(vector, self._sizes)
        columns = tuple(vector.shape[1:])
        return [
            part.reshape(shape + columns) for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def flat(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join parts in order: the inverse of `pieces`."""
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector by name."""
        return dict(zip(self.names, self.pieces(vector), strict=True))

    def from_named(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Join named parts into one vector.

        Args:
            parts: A tensor for every name.

        Returns:
            The vector (p,).

        Raises:
            ValueError: If names are missing or unknown, or a shape differs.
        """
        if parts.keys() != set(self.names):
            odd = sorted(parts.keys() ^ set(self.names))
            raise ValueError(
                f"`parts` and the trainable parameters differ in {', '.join(odd[:5])}; give one "
                "tensor for each of `surface.names`."
            )
        for name, shape in zip(self.names, self._shapes, strict=True):
            if tuple(parts[name].shape) != shape:
                raise ValueError(
                    f"`{name}` is given with shape {tuple(parts[name].shape)}, but the parameter "
                    f"has shape {shape}."
                )
        return self.flat([parts[name] for name in self.names])

    def add(self, sums: Tensor, pieces: Sequence[Tensor | None]) -> None:
        """Add parts to a vector in place; None adds nothing."""
        for part, piece in zip(self.pieces(sums), pieces, strict=True):
            if piece is not None:
                part += piece.detach()
