"""Finding and opening the user's files: what is wrong with one is said before it is read.

Paths come in as the user wrote them; `open_data_file` yields the decompressed bytes of a file,
whatever its ending.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import pickle
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ENDINGS = ("", ".gz", ".xz")
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)

#: Bytes that are read at once.
_PIECE = 2**24

#: Names of the files that the built-in data sets are read from.
_NAMES = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte|(data_batch_[1-5]|test_batch)")


def expand(path: str | PathLike[str]) -> Path:
    """The path with the home folder in the place of ``~``, where there is such a home."""
    return Path(os.path.expanduser(path))


def check_readable(path: Path) -> None:
    """Refuse a file that exists and may not be read, or that is a pipe or a device."""
    if os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path):
        raise ValueError(f"`{path}` is a pipe or a device; needed is a file; save it to one first.")
    if os.path.exists(path) and not os.access(path, os.R_OK):
        raise PermissionError(
            f"`{path}` cannot be read: you may not; change its permissions (`chmod u+r`), or name "
            "another file."
        )


def is_data_file(path: Path) -> bool:
    """Whether a file has a name that the files of a built-in data set have, with any ending."""
    return _NAMES.match(path.name) is not None


def find_folder(folder: str, subfolders: Sequence[str]) -> list[Path]:
    """The folder a user named, and after it those of its usual subfolders that exist."""
    root = expand(folder)
    if not os.path.isdir(root):
        found = "is a file" if os.path.exists(root) else "does not exist"
        raise FileNotFoundError(
            f"`{folder}` {found}, seen from `{Path.cwd()}`; needed is the folder that holds "
            f"the data files; flatgauge does not download them."
        )
    return [root, *(root / sub for sub in subfolders if (root / sub).is_dir())]


def find_file(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first file of one of these names, plain or compressed."""
    places = (folder / f"{name}{end}" for folder in folders for name in names for end in _ENDINGS)
    return next((path for path in places if path.is_file()), None)


def missing_files_error(folders: Sequence[Path], names: Sequence[str]) -> FileNotFoundError:
    """The error for files that are in none of the folders."""
    packed = sorted(file.name for folder in folders for file in folder.glob("*.tar*"))
    advice = f"unpack `{packed[0]}` there first" if packed else "check the folder"
    return FileNotFoundError(
        f"none of {', '.join(f'`{name}`' for name in names)} (plain, `.gz` or `.xz`) is in "
        f"{', '.join(f'`{folder}`' for folder in folders)}; {advice}."
    )


@contextlib.contextmanager
def open_data_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressing as its first bytes (not its name) demand."""
    check_readable(path)
    with path.open("rb") as raw:
        start = raw.read(6)
    opener: Callable[[Path], Any] = partial(open, mode="rb")
    if start.startswith(b"\x1f\x8b"):
        opener = gzip.open
    elif start == b"\xfd7zXZ\x00":
        opener = lzma.open
    try:
        with opener(path) as stream:
            yield stream
    except _DAMAGE as error:
        raise ValueError(
            f"`{path}` is cut short or damaged ({error}); needed is the whole file; download "
            f"it again."
        ) from error


def read_exactly(stream: IO[bytes], count: int, path: Path) -> bytes:
    """Read a number of bytes, or say that the file ends too early."""
    content = bytearray()
    while len(content) < count:  # In pieces: what a damaged header asks for may fit nowhere.
        piece = stream.read(min(count - len(content), _PIECE))
        if not piece:
            raise ValueError(
                f"`{path}` is cut short: {count - len(content)} of {count} expected bytes are "
                f"missing; needed is the whole file; download it again."
            )
        content += piece
    return bytes(content)


Bytes = NDArray[np.uint8]

#: Magic numbers of IDX files: unsigned bytes with three axes, with one.
_IMAGES, _LABELS = 0x803, 0x801

#: Pixels along each side of an image of MNIST.
_SIDE = 28

#: Bytes of one image of CIFAR-10, and where its batches may lie inside the folder.
_PIXELS = 3 * 32 * 32
_CIFAR_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10", "cifar-10")


def load_idx(
    folder: str, *, split: str, limit: int | None, subfolders: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Read images (N, 1, 28, 28) in [0, 1] and labels (N,) of one split from IDX files."""
    folders = find_folder(folder, subfolders)
    prefix = "train" if split == "train" else "t10k"
    image_file = _find_idx(folders, f"{prefix}-images", "idx3-ubyte")
    label_file = _find_idx(folders, f"{prefix}-labels", "idx1-ubyte")
    images, image_count = _read_idx(image_file, _IMAGES, limit)
    labels, label_count = _read_idx(label_file, _LABELS, limit)
    if image_count != label_count:
        raise ValueError(
            f"`{image_file}` holds {image_count} images and `{label_file}` {label_count} "
            f"labels; needed is one label per image; take both files from one download."
        )
    _check_labels(labels.tolist(), label_file)
    return from_bytes(images)[:, None], torch.from_numpy(labels.astype(np.int64))


def _find_idx(folders: Sequence[Path], stem: str, kind: str) -> Path:
    """Find a file under either of its two usual names."""
    names = [f"{stem}-{kind}", f"{stem}.{kind}"]
    path = find_file(folders, names)
    if path is None:
        raise missing_files_error(folders, names)
    return path


def _read_idx(path: Path, magic: int, limit: int | None) -> tuple[Bytes, int]:
    """Read the first items of an IDX file, and how many the header counts."""
    with open_data_file(path) as stream:
        start = read_exactly(stream, 4, path)
        if start != struct.pack(">I", magic):
            raise ValueError(
                f"`{path}` begins with {start!r}, which is no IDX file of "
                f"{'images' if magic == _IMAGES else 'labels'} (magic number {magic}); check "
                f"which file it is, or download it again."
            )
        axes = magic & 0xFF
        count, *sides = struct.unpack(f">{axes}I", read_exactly(stream, 4 * axes, path))
        if any(side != _SIDE for side in sides) or not count:
            raise ValueError(
                f"`{path}` holds {count} items of size {sides}; needed are images of "
                f"{_SIDE}×{_SIDE} pixels; to use others, store them in an `.npz`."
            )
        taken = sample_count(limit, count, f"`{path}`")
        content = read_exactly(stream, taken * _SIDE ** len(sides), path)
        if limit is None and stream.read(1):  # to the end, where gzip checks its sum
            raise ValueError(
                f"`{path}` goes on after the {count} items its header counts; it is damaged; "
                f"download it again."
            )
    return np.frombuffer(content, np.uint8).reshape(taken, *sides), count


def load_cifar10(folder: str, *, split: str, limit: int | None) -> tuple[Tensor, Tensor]:
    """Read images (N, 3, 32, 32) in [0, 1] and labels (N,); opens no more files than needed."""
    folders = find_folder(folder, _CIFAR_FOLDERS)
    stems = [f"data_batch_{number}" for number in range(1, 6)]
    pixels, labels, size = [], [], 0
    for stem in stems if split == "train" else ["test_batch"]:
        left = None if limit is None else limit - size
        batch_pixels, batch_labels = _read_cifar10(folders, stem, left)
        pixels.append(batch_pixels)
        labels.append(batch_labels)
        size += len(batch_labels)
        if size == limit:
            break
    sample_count(limit, size, f"`{folder}` ({split})")
    images = from_bytes(np.concatenate(pixels).reshape(size, 3, 32, 32))
    return images, torch.from_numpy(np.concatenate(labels).astype(np.int64))


def _read_cifar10(folders: Sequence[Path], stem: str, limit: int | None) -> tuple[Bytes, Any]:
    """Read the first images and labels of one batch, in whichever layout it is there."""
    path = find_file(folders, [f"{stem}.bin"])
    if path is not None:
        pixels, labels = _read_binary(path, limit)
    else:
        path = find_file(folders, [stem])
        if path is None:
            raise missing_files_error(folders, [f"{stem}.bin", stem])
        pixels, labels = (array[:limit] for array in _read_python(path))
    _check_labels(labels.tolist(), path)
    return pixels, labels


def _read_binary(path: Path, limit: int | None) -> tuple[Bytes, Any]:
    """Read the first records of a file of label bytes and pixel bytes."""
    record = 1 + _PIXELS
    with open_data_file(path) as stream:
        content = stream.read(-1 if limit is None else limit * record)
    if len(content) % record or not content:
        raise ValueError(
            f"`{path}` has {len(content)} bytes, which is no multiple of {record} (a label and "
            f"{_PIXELS} pixels per image); it is cut short or not CIFAR-10; download it again."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, 1:], records[:, 0]


def _read_python(path: Path) -> tuple[Bytes, Any]:
    """Read pixels (N, 3072) and labels (N,) of a pickled batch."""
    batch = _unpickle(path)
    entries: dict[str, Any] = {}
    if isinstance(batch, dict):
        for key, value in batch.items():
            entries[key.decode("latin1") if isinstance(key, bytes) else str(key)] = value
    if not {"data", "labels"} <= set(entries):
        found = ", ".join(f"`{key}`" for key in entries) or f"`{type(batch).__name__}`"
        raise ValueError(
            f"`{path}` holds {found}; needed are `data` and `labels`, as in `data_batch_1` of "
            f"CIFAR-10; check which file it is."
        )
    pixels, labels = entries["data"], entries["labels"]
    is_bytes = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8
    if not is_bytes or pixels.shape[1:] != (_PIXELS,) or not len(pixels):
        raise ValueError(
            f"`{path}` has `data` that is not an array of bytes with {_PIXELS} columns; needed "
            f"is a batch of CIFAR-10; download it again."
        )
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError(
            f"`{path}` has `labels` that are no list of whole numbers; needed is a batch of "
            f"CIFAR-10; download it again."
        )
    _check_labels(labels, path)
    if len(labels) != len(pixels):
        raise ValueError(
            f"`{path}` holds {len(pixels)} images and {len(labels)} labels; needed is one "
            f"label per image; download it again."
        )
    return pixels, np.array(labels, np.int64)


class _RefusedCallError(ValueError):
    """A pickle asks for something beyond an array of bytes."""


def _encode(text: str, encoding: str) -> bytes:
    """For `_codecs.encode`, by which Python 3 writes bytes to old protocols."""
    return text.encode("latin1")


#: What the pickles may call, by the names that NumPy 1 and 2 give them.
_ALLOWED: dict[str, Any] = {
    "_codecs.encode": _encode,
    "numpy.dtype": np.dtype,
    "numpy.ndarray": np.ndarray,
}
for _core in ("core", "_core"):
    _ALLOWED[f"numpy.{_core}.multiarray._reconstruct"] = np.empty(0).__reduce__()[0]
    _ALLOWED[f"numpy.{_core}.numeric._frombuffer"] = np.empty(0).__reduce_ex__(5)[0]


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds containers, numbers, text and arrays, and calls nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in _ALLOWED:
            raise _RefusedCallError(name)
        return _ALLOWED[name]


def _unpickle(path: Path) -> Any:
    """Read a pickle of containers, numbers, text and arrays."""
    with open_data_file(path) as stream:
        content = stream.read()
    try:
        return _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except _RefusedCallError as refused:
        raise ValueError(
            f"`{path}` asks to run `{refused}`, which no batch of CIFAR-10 does; needed is the "
            f"original file: do not open this one with `pickle`, download it again."
        ) from None
    except Exception as error:  # a damaged pickle ends in nearly every kind of error
        raise ValueError(
            f"`{path}` is cut short or not a pickle ({type(error).__name__}: {error}); needed "
            f"is a batch of CIFAR-10; download it again."
        ) from error


def from_bytes(pixels: NDArray[Any]) -> Tensor:
    """Pixel bytes as float32 numbers in [0, 1]."""
    return torch.from_numpy(pixels.astype(np.float32)).div_(255.0)


def sample_count(limit: int | None, size: int, source: str) -> int:
    """How many samples to take of a set of some size; more than it has are refused."""
    if limit is not None and limit > size:
        raise ValueError(
            f"`limit={limit}` asks for more than {source} has, which is {size}; pass "
            f"`limit={size}` or less, or leave it out."
        )
    return size if limit is None else limit


def _check_labels(labels: Sequence[int], path: Path) -> None:
    """Refuse labels of anything but ten classes."""
    for at, label in enumerate(labels):
        if not 0 <= label <= 9:
            raise ValueError(
                f"`{path}` has label {label} at position {at}; needed are 0 to 9; the file is "
                f"damaged or of another data set (CIFAR-100, EMNIST); check where it is from."
            )
