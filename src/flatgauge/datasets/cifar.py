"""CIFAR-10, in the binary layout or the layout for Python, as its authors publish them.

Binary: per image one label byte and 3,072 bytes of planar red, green, blue. Python: a pickle
with the same bytes as an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatgauge.datasets.batch_pickle import read_batch
from flatgauge.datasets.files import find_file, find_folder, missing, reading
from flatgauge.datasets.samples import check_labels, from_bytes, within

SUBFOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10", "cifar-10")
PIXELS = 3 * 32 * 32


def load_cifar10(folder: str, *, split: str, limit: int | None) -> tuple[Tensor, Tensor]:
    """Read the images and labels of one split, opening no more batches than needed.

    Args:
        folder: Holds the batches, or a subfolder that does.
        split: ``"train"`` or ``"test"``.
        limit: Read only the first so many.

    Returns:
        Inputs (N, 3, 32, 32) in [0, 1] and targets (N,).
    """
    folders = find_folder(folder, SUBFOLDERS)
    stems = [f"data_batch_{number}" for number in range(1, 6)]
    pixels, labels, size = [], [], 0
    for stem in stems if split == "train" else ["test_batch"]:
        batch_pixels, batch_labels = _read(folders, stem, None if limit is None else limit - size)
        pixels.append(batch_pixels)
        labels.append(batch_labels)
        size += len(batch_labels)
        if size == limit:
            break
    within(limit, size, f"`{folder}` ({split})")
    images = from_bytes(np.concatenate(pixels).reshape(size, 3, 32, 32))
    return images, torch.from_numpy(np.concatenate(labels).astype(np.int64))


def _read(
    folders: Sequence[Path], stem: str, limit: int | None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Read the first images of one batch, in whichever layout it is there."""
    path = find_file(folders, [f"{stem}.bin"])
    if path is not None:
        pixels, labels = _read_binary(path, limit)
    else:
        path = find_file(folders, [stem])
        if path is None:
            raise missing(folders, [f"{stem}.bin", stem])
        pixels, labels = (array[:limit] for array in read_batch(path))
    check_labels(labels.tolist(), path)
    return pixels, labels


def _read_binary(
    path: Path, limit: int | None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Read the first records of a file of label bytes and pixel bytes."""
    record = 1 + PIXELS
    with reading(path) as stream:
        content = stream.read(-1 if limit is None else limit * record)
    if len(content) % record or not content:
        raise ValueError(
            f"`{path}` has {len(content)} bytes, which is no multiple of {record} (a label and "
            f"{PIXELS} pixels per image); it is cut short or not CIFAR-10; download it again."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, 1:], records[:, 0]
