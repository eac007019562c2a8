"""Standard output and standard error: what is written arrives, or the command says that it did not.

Python itself loses results here: where a character has no place in the encoding, where the reader
of a pipe has ended, where the disk is full when the program ends, and where a stream is closed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from flatgauge.analysis.files import file_error
from flatgauge.analysis.formatting import printable


def show(text: str) -> None:
    """Print a result.

    Args:
        text: The result; what could steer a terminal is shown, and has no effect.
    """
    print(printable(text), flush=True)  # noqa: T201


def log(text: str) -> None:
    """Print a line about a result, on standard error.

    Args:
        text: As for `show`.
    """
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201


def writes_unicode() -> bool:
    """Whether standard output can hold every character."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return encoding.lower().replace("-", "").replace("_", "").startswith("utf")


class Stream:
    """A stream that a reader may leave, and that says what to do where it cannot be written to.

    Everything else is that of the stream itself.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        with suppress(AttributeError, ValueError):
            # Nothing is lost to an encoding that lacks a character.
            cast(Any, stream).reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does."""
        with self._explain_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write as the stream does."""
        with self._explain_errors():
            self._stream.flush()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """A reader that has ended (`| head`) is no error; a full disk is one, that is explained."""
        try:
            yield
        except OSError as error:
            self._discard()
            if isinstance(error, BrokenPipeError):
                return
            raise file_error(error, self._name) from error

    def _discard(self) -> None:
        """Let what is still to be written, now and when Python ends, go nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Run a command within this.

    Yields:
        Nothing.
    """
    before = sys.stdout, sys.stderr
    # A file that is opened later must not be taken for a closed standard stream, by a library that
    # writes its complaints there.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        try:
            sys.stdout = cast(TextIO, Stream(sys.stdout or nowhere, "standard output"))
            sys.stderr = cast(TextIO, Stream(sys.stderr or nowhere, "standard error"))
            yield
        finally:
            sys.stdout, sys.stderr = before
