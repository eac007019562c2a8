"""Finding and opening the user's files: what is wrong with one is said before it is read.

Paths come in as the user wrote them; `open_data_file` yields the decompressed bytes of a file,
whatever its ending.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import IO, Any

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
