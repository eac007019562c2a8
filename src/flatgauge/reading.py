"""Files of the user's that are read: what is wrong with one is said before it is opened."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path


def expand(path: str | PathLike[str]) -> Path:
    """A path with the home folder in the place of ``~``.

    Args:
        path: As the user wrote it.

    Returns:
        The path; as it was where there is no such home.

    Example:
        >>> expand("~no-such-user/a.pt")
        PosixPath('~no-such-user/a.pt')
    """
    return Path(os.path.expanduser(path))


def check_readable(path: Path) -> None:
    """Refuse a file that exists and may not be read, or that is a pipe or a device.

    Args:
        path: The file.

    Raises:
        PermissionError: If it may not be read.
        ValueError: If it is no regular file.
    """
    if os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path):
        raise ValueError(f"`{path}` is a pipe or a device; needed is a file; save it to one first.")
    if os.path.exists(path) and not os.access(path, os.R_OK):
        raise PermissionError(
            f"`{path}` cannot be read: you may not; change its permissions (`chmod u+r`), or name "
            "another file."
        )
