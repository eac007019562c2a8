"""Short texts that tell tensors apart by shapes and bits, the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor, uint8

from flatgauge.nested import tensors


def digest(values: Iterable[Tensor]) -> str:
    """A short text that tells tensors apart by shapes and bits."""
    found = hashlib.blake2b(digest_size=16)
    for value in values:
        found.update(f"{tuple(value.shape)} {value.dtype}".encode())
        found.update(_bits(value))
    return found.hexdigest()


def digest_of_samples(batches: Iterable[Any]) -> str:
    """A short text that tells samples apart, in their order, whatever batches they come in.

    Args:
        batches: Nested structures of tensors, alike but for the number of samples.

    Returns:
        One part for every tensor of a batch.
    """
    columns: list[Any] = []
    for batch in batches:
        for place, tensor in enumerate(tensors(batch)):
            if place == len(columns):
                columns.append(hashlib.blake2b(digest_size=16))
                columns[place].update(f"{tuple(tensor.shape[1:])} {tensor.dtype}".encode())
            columns[place].update(_bits(tensor))
    return "-".join(column.hexdigest() for column in columns)


def _bits(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().data
