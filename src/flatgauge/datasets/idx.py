"""MNIST and its kin, in the IDX format of Yann LeCun's page.

An IDX file is a big-endian header (magic number, then one size per axis) and raw bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatgauge.datasets.files import find_file, find_folder, missing, read_exactly, reading
from flatgauge.datasets.samples import check_labels, from_bytes, within

IMAGES, LABELS = 0x803, 0x801  # magic numbers: unsigned bytes with three axes, with one
SIDE = 28


def load_idx(
    folder: str, *, split: str, limit: int | None, subfolders: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Read the images and labels of one split.

    Args:
        folder: Holds the four IDX files, or a subfolder that does.
        split: ``"train"`` or ``"test"``.
        limit: Read only the first so many.
        subfolders: Where else the files may lie, inside the folder.

    Returns:
        Inputs (N, 1, 28, 28) in [0, 1] and targets (N,).

    Raises:
        ValueError: If a file is not what it should be.
    """
    folders = find_folder(folder, subfolders)
    prefix = "train" if split == "train" else "t10k"
    image_file = _locate(folders, f"{prefix}-images", "idx3-ubyte")
    label_file = _locate(folders, f"{prefix}-labels", "idx1-ubyte")
    images, image_count = _read(image_file, IMAGES, limit)
    labels, label_count = _read(label_file, LABELS, limit)
    if image_count != label_count:
        raise ValueError(
            f"`{image_file}` holds {image_count} images and `{label_file}` {label_count} "
            f"labels; needed is one label per image; take both files from one download."
        )
    check_labels(labels.tolist(), label_file)
    return from_bytes(images)[:, None], torch.from_numpy(labels.astype(np.int64))


def _locate(folders: Sequence[Path], stem: str, kind: str) -> Path:
    """Find a file under either of its two usual names."""
    names = [f"{stem}-{kind}", f"{stem}.{kind}"]
    path = find_file(folders, names)
    if path is None:
        raise missing(folders, names)
    return path


def _read(path: Path, magic: int, limit: int | None) -> tuple[np.ndarray[Any, Any], int]:
    """Read the first items of an IDX file, and how many the header counts."""
    with reading(path) as stream:
        start = read_exactly(stream, 4, path)
        if start != struct.pack(">I", magic):
            raise ValueError(
                f"`{path}` begins with {start!r}, which is no IDX file of "
                f"{'images' if magic == IMAGES else 'labels'} (magic number {magic}); check "
                f"which file it is, or download it again."
            )
        axes = magic & 0xFF
        count, *sides = struct.unpack(f">{axes}I", read_exactly(stream, 4 * axes, path))
        if any(side != SIDE for side in sides) or not count:
            raise ValueError(
                f"`{path}` holds {count} items of size {sides}; needed are images of "
                f"{SIDE}×{SIDE} pixels; to use others, store them in an `.npz`."
            )
        taken = within(limit, count, f"`{path}`")
        content = read_exactly(stream, taken * SIDE ** len(sides), path)
        if limit is None and stream.read(1):  # to the end, where gzip checks its sum
            raise ValueError(
                f"`{path}` goes on after the {count} items its header counts; it is damaged; "
                f"download it again."
            )
    return np.frombuffer(content, np.uint8).reshape(taken, *sides), count
