"""The user's files: found, opened and, for MNIST, its kin and CIFAR-10, read.

Paths come in as the user wrote them; bytes, or images (N, channels, height, width) and labels (N,)
as arrays leave. What is wrong with a file is said before it is read, and a compressed file is known
by its first bytes. An IDX file is a big-endian header (magic number, then one size per axis) and
raw bytes. A binary batch of CIFAR-10 has a label byte and 3,072 bytes of planar red, green, blue
per image; a Python batch is a pickle with the same bytes as an array. A pickle is a program: only
the functions that rebuild such an array may run.
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
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:  # The command line expands paths without numpy.
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_ENDINGS = ("", ".gz", ".xz")
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)

#: Bytes that are read at once.
_PIECE = 2**24

#: Names of the files that the built-in data sets are read from.
_NAMES = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte|(data_batch_[1-5]|test_batch)")

#: Magic numbers of IDX files: unsigned bytes with three axes, with one.
_IMAGES, _LABELS = 0x803, 0x801

#: Pixels along each side of an image of MNIST.
_SIDE = 28

#: Bytes of one image of CIFAR-10, and where its batches may lie inside the folder.
_PIXELS = 3 * 32 * 32
_CIFAR_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10", "cifar-10")


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


def _find_folders(folder: str, subfolders: Sequence[str]) -> list[Path]:
    """The folder a user named, and after it those of its usual subfolders that exist."""
    root = expand(folder)
    if not os.path.isdir(root):
        found = "is a file" if os.path.exists(root) else "does not exist"
        raise FileNotFoundError(
            f"`{folder}` {found}, seen from `{Path.cwd()}`; needed is the folder that holds "
            f"the data files; flatgauge does not download them."
        )
    return [root, *(root / sub for sub in subfolders if (root / sub).is_dir())]


def _find_file(folders: Sequence[Path], *names: str) -> Path:
    """The first file of one of these names, plain or compressed."""
    for name in names:
        for path in (folder / f"{name}{end}" for folder in folders for end in _ENDINGS):
            if path.is_file():
                return path
    packed = sorted(file.name for folder in folders for file in folder.glob("*.tar*"))
    advice = f"unpack `{packed[0]}` there first" if packed else "check the folder"
    raise FileNotFoundError(
        f"none of {', '.join(f'`{name}`' for name in names)} (plain, `.gz` or `.xz`) is in "
        f"{', '.join(f'`{folder}`' for folder in folders)}; {advice}."
    )


@contextlib.contextmanager
def open_data_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressing as its first bytes (not its name) demand."""
    check_readable(path)
    with path.open("rb") as raw:
        start = raw.read(6)
    opener: Callable[..., Any] = open
    if start.startswith(b"\x1f\x8b"):
        opener = gzip.open
    elif start == b"\xfd7zXZ\x00":
        opener = lzma.open
    try:
        with opener(path, "rb") as stream:
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


def load_idx(
    folder: str, *, split: str, limit: int | None, subfolders: Sequence[str]
) -> tuple[Bytes, Any]:
    """Read images (N, 1, 28, 28) of bytes and labels (N,) of one split from IDX files."""
    folders = _find_folders(folder, subfolders)
    found = []
    for kind, magic, ending in (("images", _IMAGES, "idx3"), ("labels", _LABELS, "idx1")):
        stem = f"{'train' if split == 'train' else 't10k'}-{kind}"
        path = _find_file(folders, f"{stem}-{ending}-ubyte", f"{stem}.{ending}-ubyte")
        found.append((path, *_read_idx(path, magic, limit)))
    (image_file, images, image_count), (label_file, labels, label_count) = found
    if image_count != label_count:
        raise ValueError(
            f"`{image_file}` holds {image_count} images and `{label_file}` {label_count} "
            f"labels; needed is one label per image; take both files from one download."
        )
    _check_labels(labels.tolist(), label_file)
    return images[:, None], labels


def _read_idx(path: Path, magic: int, limit: int | None) -> tuple[Bytes, int]:
    """Read the first items of an IDX file, and how many the header counts."""
    import numpy as np

    with open_data_file(path) as stream:
        start = read_exactly(stream, 4, path)
        if start != struct.pack(">I", magic):
            raise ValueError(
                f"`{path}` begins with {start!r}, which is not an IDX file of "
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
        size = sample_count(limit, count, f"`{path}`")
        content = read_exactly(stream, size * _SIDE ** len(sides), path)
        if limit is None and stream.read(1):  # to the end, where gzip checks its sum
            raise ValueError(
                f"`{path}` goes on after the {count} items its header counts; it is damaged; "
                f"download it again."
            )
    return np.frombuffer(content, np.uint8).reshape(size, *sides), count


def load_cifar10(folder: str, *, split: str, limit: int | None) -> tuple[Bytes, Any]:
    """Read images (N, 3, 32, 32) of bytes and labels (N,); opens no more files than needed."""
    import numpy as np

    folders = _find_folders(folder, _CIFAR_FOLDERS)
    stems = [f"data_batch_{number}" for number in range(1, 6)]
    pixels, labels = [], list[int]()
    for stem in stems if split == "train" else ["test_batch"]:
        left = None if limit is None else limit - len(labels)
        path = _find_file(folders, f"{stem}.bin", stem)
        binary = path.name.startswith(f"{stem}.bin")
        batch, classes = _read_binary(path, left) if binary else _read_python(path)
        _check_labels(classes, path)
        pixels.append(batch[:left])
        labels += classes[:left]
        if len(labels) == limit:
            break
    sample_count(limit, len(labels), f"`{folder}` ({split})")
    return np.concatenate(pixels).reshape(-1, 3, 32, 32), np.array(labels)


def _read_binary(path: Path, limit: int | None) -> tuple[Bytes, list[int]]:
    """Read the first records of a file of label bytes and pixel bytes."""
    import numpy as np

    record = 1 + _PIXELS
    with open_data_file(path) as stream:
        content = stream.read(-1 if limit is None else limit * record)
    if len(content) % record or not content:
        raise ValueError(
            f"`{path}` has {len(content)} bytes, which is not a multiple of {record} (a label and "
            f"{_PIXELS} pixels per image); it is cut short or not CIFAR-10; download it again."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, 1:], records[:, 0].tolist()


def _read_python(path: Path) -> tuple[Bytes, list[int]]:
    """Read pixels (N, 3072) and labels (N,) of a pickled batch."""
    import numpy as np

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
    problem = None
    if not is_bytes or pixels.shape[1:] != (_PIXELS,) or not len(pixels):
        problem = f"has `data` that is not an array of bytes with {_PIXELS} columns"
    elif not isinstance(labels, list) or not all(type(label) is int for label in labels):
        problem = "has `labels` that are not a list of whole numbers"
    elif len(labels) != len(pixels):
        problem = f"holds {len(pixels)} images and {len(labels)} labels"
    if problem is not None:
        raise ValueError(
            f"`{path}` {problem}; needed is a batch of CIFAR-10, with one label per image; "
            "download it again."
        )
    return pixels, labels


class _RefusedCallError(ValueError):
    """A pickle asks for something beyond an array of bytes."""


def _encode(text: str, encoding: str) -> bytes:
    """For `_codecs.encode`, by which Python 3 writes bytes to old protocols."""
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds containers, numbers, text and arrays, and calls nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        import numpy as np

        home = module_name
        if home.partition(".")[0] == "numpy":  # NumPy 1 says `numpy.core`, NumPy 2 `numpy._core`.
            home = home[6:].removeprefix("_").removeprefix("core.") or "numpy"
        allowed = {
            ("_codecs", "encode"): _encode,
            ("numpy", "dtype"): np.dtype,
            ("numpy", "ndarray"): np.ndarray,
            ("multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numeric", "_frombuffer"): np.empty(0).__reduce_ex__(5)[0],
        }
        if (home, global_name) not in allowed:
            raise _RefusedCallError(f"{module_name}.{global_name}")
        return allowed[home, global_name]


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
