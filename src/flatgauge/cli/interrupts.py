"""Ctrl-C while modules are imported: one line and no traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: What shells report for a program that Ctrl-C ended.
INTERRUPTED = 130

_SAID = "interrupted\n"

#: Whatever is computed is computed with this; before it is imported there is nothing to keep.
_COMPUTING = "flatgauge.surface.surface"


@contextmanager
def quiet_interrupts() -> Iterator[None]:
    """Run the command line within this: Ctrl-C ends it with one line, also while it imports.

    Yields:
        Nothing.

    Raises:
        SystemExit: If it is interrupted.
    """
    here = threading.current_thread() is threading.main_thread()
    own = here and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if own:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(_SAID)
        raise SystemExit(INTERRUPTED) from None
    finally:
        if own:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End at once while modules are imported and nothing is computed; else as ever."""
    # Raised in an import, the exception can come out as another one, or be lost with a traceback.
    if _COMPUTING not in sys.modules and _imports(frame):
        os.write(2, _SAID.encode())
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
