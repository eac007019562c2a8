"""Files that are whole or not there: a result is never left half written."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | Path, contents: str | bytes) -> Path:
    """Write a file so that its readers see the old contents or the new ones, never a part.

    Args:
        path: Where to. A link is followed; what is no file (a pipe, a terminal) is written to.
        contents: All of it: a text, or bytes.

    Returns:
        The path as given.
    """
    place = _place(path)
    data = contents if isinstance(contents, bytes) else contents.encode()
    if place.exists() and not place.is_file():
        place.write_bytes(data)
        return Path(path)
    part = place.with_name(_part_name())
    try:
        # Opened by hand: a file made by `tempfile` could not be read by others.
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            part.chmod(place.stat().st_mode & 0o7777)
        os.replace(part, place)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return Path(path)


def check_place(path: str | Path) -> Path:
    """Refuse a place that cannot be written to, before hours are spent on what belongs there.

    Args:
        path: Where something is to be written; an old file there is left as it is.

    Returns:
        The path as given.

    Raises:
        OSError: If there is a folder of that name, or none to write it in.
    """
    place = _place(path)
    if place.exists() and not place.is_file():
        return Path(path)
    part = place.with_name(_part_name())
    try:
        part.touch(exist_ok=False)
    except OSError as error:
        raise OSError(
            f"`{path}` cannot be written: {error.strerror or error}; name a file in a folder that "
            "you may write to."
        ) from error
    part.unlink()
    return Path(path)


def _place(path: str | Path) -> Path:
    """Where a path leads, or why a file cannot be there."""
    place = Path(os.path.realpath(Path(path).expanduser()))
    if place.is_dir():
        raise IsADirectoryError(f"`{path}` is a folder; name a file in it.")
    if not place.parent.is_dir():
        raise FileNotFoundError(
            f"`{path}` cannot be written: there is no folder `{place.parent}`; make it first."
        )
    return place


def _part_name() -> str:
    # Short, as the file's own name may be as long as names can be.
    return f".flatgauge-{secrets.token_hex(4)}"
