"""Errors of the user's own code, with the file and line they come from.

An exception comes in, text goes out: the innermost line of its traceback that is not Python's, an
installed package's or flatgauge's. `locate_errors` adds that line to whatever a block of the
user's code raises.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Folders of code that is not the user's: Python's own, installed packages, and flatgauge.
_FOREIGN = tuple(
    str(Path(folder)) + os.sep
    for folder in (
        *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
    )
)

#: Packages whose own types of errors are caught by type, and are left as they are.
_INTERNAL = ("flatgauge", "torch")


def error_location(error: BaseException) -> str:
    """File and line of the innermost call in the user's code; "" where there is none."""
    return _last_line(error, _FOREIGN)


def describe_error(error: BaseException, *, anywhere: bool = False) -> str:
    """Type, message and user's line of an error; with `anywhere`, else the line of a package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place = error_location(error) or (anywhere and _last_line(error, _FOREIGN[-1:]))
    return f"{text} ({place})" if place else text


def _last_line(error: BaseException, foreign: tuple[str, ...]) -> str:
    """File and line of the innermost call outside some folders; "" where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", *foreign)):
            return f"{frame.filename}:{frame.lineno}"
    return ""


class ProgramExitError(RuntimeError):
    """The user's code has ended the program, where a result was needed."""

    def __init__(self, what: str, error: SystemExit) -> None:
        place = error_location(error)
        super().__init__(
            f"{what} ends the program by `sys.exit({error.code!r})`"
            f"{f' ({place})' if place else ''}; it must return a result, or raise an error."
        )


@contextmanager
def locate_errors(what: str) -> Iterator[None]:
    """Run the user's code; an error in it says where, and `sys.exit` is an error.

    Raises:
        ProgramExitError: If the code ends the program; `what` is the subject of its message.
        Exception: What the code raises, of the same type where that takes a message.
    """  # noqa: DOC501
    try:
        yield
    except SystemExit as error:
        raise ProgramExitError(what, error) from error
    except Exception as error:
        place = error_location(error)
        internal = type(error).__module__.split(".")[0] in _INTERNAL
        if internal or not place or place in str(error):
            raise
        raise _with_message(error, f"{error} ({place})") from error


def _with_message(error: Exception, text: str) -> Exception:
    """An error of the same type with another message; `RuntimeError` where that cannot be made."""
    try:
        other = type(error)(text)
    except Exception:  # It wants other arguments.
        other = None
    if other is not None and str(other) == text:
        return other
    return RuntimeError(f"{type(error).__name__}: {text}")
