"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> Path:
    """Write a text file so that a reader never sees half of it.

    Args:
        path: Where; an existing file is replaced.
        text: The contents.

    Returns:
        The path.

    Raises:
        FileNotFoundError: If its directory does not exist.
        IsADirectoryError: If it is a directory.
    """
    place = Path(path)
    if place.is_dir():
        raise IsADirectoryError(f"`{place}` is a directory; name a file in it.")
    if not place.parent.is_dir():
        raise FileNotFoundError(
            f"`{place}` cannot be written: there is no directory `{place.parent}`; make it first."
        )
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)
    return place
