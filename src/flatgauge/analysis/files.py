"""Files of results: written whole or not at all, and JSON with every kind of number.

`atomic_write` replaces a file in one step and explains what keeps it from doing so;
`check_writable` finds that out before hours are spent. `to_plain` turns tensors, tuples and
infinite numbers into what JSON can hold, `from_plain` turns the numbers back.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flatgauge.loading.files import check_readable, expand

#: How numbers are written that JSON has not.
_ODD = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

#: Why a file could not be written, and what to do, by the number of the system's error.
_REASONS = {
    errno.ENOSPC: ("the disk is full", "free space on it, or name a file on another disk"),
    errno.EDQUOT: ("your quota is used up", "delete files of yours, or name a file elsewhere"),
    errno.EFBIG: (
        "it would be larger than files may be here",
        "raise the limit (`ulimit -f`), or name a file on another disk",
    ),
    errno.EROFS: ("the disk is read-only", "name a file on a disk that can be written to"),
    errno.EACCES: ("you may not write there", "name a file in a folder that you may write to"),
    errno.EPERM: ("you may not write there", "name a file in a folder that you may write to"),
    errno.ENAMETOOLONG: ("its name is too long", "give it a shorter one"),
    errno.EISDIR: ("it is a folder", "name a file in it"),
    errno.ENOTDIR: ("a part of its path is a file, not a folder", "name a file in a folder"),
    errno.ENOENT: ("a folder of its path does not exist", "make it first"),
    errno.ELOOP: ("its links lead in a circle", "name a file, not one of these links"),
    errno.EMFILE: ("too many files are open", "close some, or raise the limit (`ulimit -n`)"),
    errno.EIO: ("the disk reports an error", "check it, or name a file on another disk"),
}


def file_error(error: OSError, path: str | Path) -> OSError:
    """An error of the file system as what failed, why, and what to do.

    Args:
        error: What the system raised.
        path: What was to be written.

    Returns:
        An error of the same class and `errno` with that message. The given one if it has a message
        of its own, or says that the reader of a pipe has ended.
    """
    if error.errno is None or error.strerror is None or isinstance(error, BrokenPipeError):
        return error
    why, what = _REASONS.get(error.errno, (error.strerror, "name another file"))
    explained = type(error)(f"`{path}` cannot be written: {why}; {what}.")
    explained.errno = error.errno
    return explained


@contextmanager
def explain_file_errors(path: str | Path) -> Iterator[None]:
    """Write a file within this: an error of the file system says what to do.

    Args:
        path: What is written.

    Yields:
        Nothing.

    Raises:
        OSError: What the system raised, explained.
    """
    try:
        yield
    except OSError as error:
        explained = file_error(error, path)
        if explained is error:
            raise
        raise explained from error


def atomic_write(path: str | Path, contents: str | bytes) -> Path:
    r"""Write a file so that its readers see the old contents or the new ones, never a part.

    Args:
        path: Where to. A link is followed; what is no file (a pipe, a terminal) is written to.
        contents: All of it: a text, or bytes. Half characters of a text (from file names that are
            not UTF-8) are written as ``\uXXXX``.

    Returns:
        The path as given.

    Raises:
        OSError: If it cannot be written, with what to do; an old file there is as it was.
    """
    with explain_file_errors(path):
        return _write(path, contents)


def _write(path: str | Path, contents: str | bytes) -> Path:
    place = _place(path)
    data = contents if isinstance(contents, bytes) else contents.encode(errors="backslashreplace")
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


def check_writable(path: str | Path) -> Path:
    """Refuse a place that cannot be written to, before hours are spent on what belongs there.

    Args:
        path: Where something is to be written; an old file there is left as it is.

    Returns:
        The path as given.

    Raises:
        OSError: If there is a folder of that name, or none to write it in, or the system does not
            let it; says what to do.
    """
    with explain_file_errors(path):
        place = _place(path)
        if not place.exists() or place.is_file():
            part = place.with_name(_part_name())
            part.touch(exist_ok=False)
            part.unlink()
    return Path(path)


def _place(path: str | Path) -> Path:
    """Where a path leads, or why a file cannot be there."""
    place = Path(os.path.realpath(os.path.expanduser(path)))
    with suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(place)  # Raises if there can be no such name.
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


# -- JSON ---------------------------------------------------------------------------------------


def json_text(contents: dict[str, Any], path: str | Path | None) -> str:
    """Write plain contents as JSON.

    Args:
        contents: Made by `plain`.
        path: Where to write them, as a whole or not at all; None to return the text only.

    Returns:
        The text.
    """
    text = json.dumps(contents, indent=2, ensure_ascii=False, allow_nan=False)
    if path is not None:
        atomic_write(path, text + "\n")
    return text


def to_plain(value: Any) -> Any:
    """Turn a nested value into what JSON can hold.

    Args:
        value: Tensors, arrays, mappings, sequences, numbers and strings.

    Returns:
        Plain dicts, lists and numbers; "inf" and "nan" where JSON has no number.
    """
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def from_plain(value: Any) -> Any:
    """Turn "inf", "-inf" and "nan" in a nested value back into the numbers that `plain` met.

    Args:
        value: Plain dicts, lists, numbers and strings.

    Returns:
        The same with these strings as numbers.

    Example:
        >>> from_plain({"a": ["inf", 1.0]})
        {'a': [inf, 1.0]}
    """
    if isinstance(value, dict):
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    return _ODD.get(value, value) if isinstance(value, str) else value


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a file of JSON.

    Args:
        path: The file.

    Returns:
        Its contents.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds no JSON object.
    """
    place = expand(path)
    if not os.path.isfile(place):
        raise FileNotFoundError(
            f"`{path}` is not a file, seen from `{Path.cwd()}`; give a file that `to_json` or "
            "`--save` wrote."
        )
    check_readable(place)
    try:
        contents = json.loads(place.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"`{path}` holds no JSON ({error}); give a file that `to_json` or `--save` wrote."
        ) from error
    if not isinstance(contents, dict):
        raise ValueError(f"`{path}` holds no report; give a file that `to_json` wrote.")
    return contents
