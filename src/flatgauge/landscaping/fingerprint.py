"""What a landscape depends on, so that a file is never continued with something else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.batch import digests
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
    """The samples in their order, whatever chunks they come in, and in whatever processes."""
    size = surface.chunk

    def read() -> NDArray[np.int64]:
        chunks = surface.objective.chunks(size)
        return np.array([one for chunk in chunks for one in digests(chunk)], dtype=np.int64)

    found = hashlib.blake2b(digest_size=16)
    for numbers in surface.processes.collected("the data", read):
        found.update(numbers.tobytes())
    return found.hexdigest()


def _bits(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().numpy().tobytes()
