"""Errors of the user's own code, with the file and line they come from."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Code that is not the user's: Python's own, installed packages, and flatgauge.
_FOREIGN = tuple(
    str(Path(folder)) + os.sep
    for folder in (
        *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")),
        str(Path(__file__).parent),
    )
)

#: Packages whose own kinds of errors steer what is done next, and are left as they are.
_INTERNAL = ("flatgauge", "torch")


def located(error: BaseException) -> str:
    """Write an error with the line of the user's code that it comes from.

    Args:
        error: The error.

    Returns:
        Type and message; file and line of the innermost call in code that is not installed, where
        there is one.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    text = f"{type(error).__name__}: {error}"
    place = place_of(error)
    return f"{text} ({place})" if place else text


def place_of(error: BaseException) -> str:
    """File and line of the innermost call in the user's code; "" where there is none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *_FOREIGN))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


class ProgramExitError(RuntimeError):
    """Code of the user's has ended the program, where a result was needed.

    Args:
        what: What ran, as the subject of a sentence.
        error: What it raised.
    """

    def __init__(self, what: str, error: SystemExit) -> None:
        place = place_of(error)
        super().__init__(
            f"{what} ends the program by `sys.exit({error.code!r})`"
            f"{f' ({place})' if place else ''}; it must return a result, or raise an error."
        )


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run code of the user's; an error in it says where, and `sys.exit` is an error.

    Args:
        what: What runs, as the subject of a sentence.

    Yields:
        Nothing.

    Raises:
        ProgramExitError: If the code ends the program.
        Exception: What the code raises, of the same type where that takes a message.
    """  # noqa: DOC501
    try:
        yield
    except SystemExit as error:
        raise ProgramExitError(what, error) from error
    except Exception as error:
        place = place_of(error)
        internal = type(error).__module__.split(".")[0] in _INTERNAL
        if internal or not place or place in str(error):
            raise
        raise _of_same_type(error, f"{error} ({place})") from error


def _of_same_type(error: Exception, text: str) -> Exception:
    """An error of the same type with another message; `RuntimeError` where there is none."""
    try:
        other = type(error)(text)
    except Exception:  # It wants other arguments.
        other = None
    if other is not None and str(other) == text:
        return other
    return RuntimeError(f"{type(error).__name__}: {text}")
