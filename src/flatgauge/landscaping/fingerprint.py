"""What a landscape depends on, so that a file is never continued with something else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from flatgauge.isolation import isolated
from flatgauge.nested import tensors
from flatgauge.surface import LossSurface


def fingerprint(surface: LossSurface) -> dict[str, Any]:
    """What tells one surface from another: weights, data, loss, precision.

    Args:
        surface: The surface; its data are read once.

    Returns:
        Short texts and numbers, by what they describe.
    """
    state = surface.subject.state
    return {
        "weights": digest(value for _, value in sorted(state.items())),
        "data": _data(surface),
        "loss": surface.loss_name,
        "value": surface.value(),
        "dtype": str(surface.dtype),
        "weight_decay": surface.weight_decay,
    }


def digest(values: Iterable[Tensor]) -> str:
    """A short text that tells tensors apart by shapes and bits."""
    found = hashlib.blake2b(digest_size=16)
    for value in values:
        found.update(f"{tuple(value.shape)} {value.dtype}".encode())
        found.update(_bits(value))
    return found.hexdigest()


def _data(surface: LossSurface) -> str:
    """The samples in their order, whatever chunks they come in."""
    columns: list[Any] = []
    with isolated(surface.model, surface.device):
        for chunk in surface.objective.chunks(surface.chunk):
            for place, tensor in enumerate(tensors((chunk.inputs, chunk.target))):
                if place == len(columns):
                    columns.append(hashlib.blake2b(digest_size=16))
                    columns[place].update(f"{tuple(tensor.shape[1:])} {tensor.dtype}".encode())
                columns[place].update(_bits(tensor))
    return "-".join(column.hexdigest() for column in columns)


def _bits(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().numpy().tobytes()
