"""Finding and reading data files, compressed or not, with errors that say what to do."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from flatgauge.reading import check_readable, expand

ENDINGS = ("", ".gz", ".xz")
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


#: Bytes that are read at once.
_PIECE = 2**24

# What the files are called that the built-in data sets are read from.
_NAMES = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte|(data_batch_[1-5]|test_batch)")


def is_data_file(path: Path) -> bool:
    """Whether a file has a name that the files of a built-in data set have.

    Args:
        path: The file.

    Returns:
        Whether it has, with whatever ending.

    Example:
        >>> is_data_file(Path("raw/train-images-idx3-ubyte.gz")), is_data_file(Path("run.json"))
        (True, False)
    """
    return _NAMES.match(path.name) is not None


def find_folder(folder: str, subfolders: Sequence[str]) -> list[Path]:
    """The folder a user named and those of its usual subfolders that exist.

    Args:
        folder: As the user wrote it.
        subfolders: Where the files may lie inside.

    Returns:
        Existing folders, the named one first.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    root = expand(folder)
    if not os.path.isdir(root):
        found = "is a file" if os.path.exists(root) else "does not exist"
        raise FileNotFoundError(
            f"`{folder}` {found}, seen from `{Path.cwd()}`; needed is the folder that holds "
            f"the data files; flatgauge does not download them."
        )
    return [root, *(root / sub for sub in subfolders if (root / sub).is_dir())]


def find_file(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    """The first file of one of these names, plain or compressed.

    Args:
        folders: Where to look, in this order.
        names: Without the endings of compression.

    Returns:
        Its path, or None.
    """
    for folder in folders:
        for name in names:
            for ending in ENDINGS:
                if (folder / f"{name}{ending}").is_file():
                    return folder / f"{name}{ending}"
    return None


def missing(folders: Sequence[Path], names: Sequence[str]) -> FileNotFoundError:
    """The error for files that were looked for in vain.

    Args:
        folders: Where they were looked for.
        names: What they would be called.

    Returns:
        The error, to be raised.
    """
    packed = sorted(file.name for folder in folders for file in folder.glob("*.tar*"))
    advice = f"unpack `{packed[0]}` there first" if packed else "check the folder"
    return FileNotFoundError(
        f"none of {', '.join(f'`{name}`' for name in names)} (plain, `.gz` or `.xz`) is in "
        f"{', '.join(f'`{folder}`' for folder in folders)}; {advice}."
    )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressing as its first bytes (not its name) demand.

    Args:
        path: The file.

    Yields:
        Its decompressed content.

    Raises:
        ValueError: If the compressed data end early or are damaged.
    """
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
    """Read a number of bytes, or say that the file ends too early.

    Args:
        stream: From `reading`.
        count: How many.
        path: The file, for the message.

    Returns:
        That many bytes.

    Raises:
        ValueError: If there are fewer.
    """
    content = bytearray()
    while len(content) < count:  # In pieces: what a damaged header asks for may fit nowhere.
        piece = stream.read(min(count - len(content), _PIECE))
        if not piece:
            break
        content += piece
    if len(content) < count:
        raise ValueError(
            f"`{path}` is cut short: {count - len(content)} of {count} expected bytes are "
            f"missing; needed is the whole file; download it again."
        )
    return bytes(content)
