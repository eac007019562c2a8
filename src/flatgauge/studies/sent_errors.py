"""Errors of other processes, raised here as they would be raised by one process."""

from __future__ import annotations

import pickle
import traceback
from typing import NoReturn


def sendable(error: Exception) -> tuple[Exception, str]:
    """An error that is being handled, in a form that arrives whole.

    Args:
        error: Of any class.

    Returns:
        The error itself if it can be sent, or what it says; and its traceback.
    """
    try:
        whole = str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # Any class of error can have its own way to fail here.
        whole = False
    said = error if whole else RuntimeError(f"{type(error).__name__}: {error}")
    return said, traceback.format_exc()


def raise_here(error: Exception, text: str) -> NoReturn:
    """Raise an error of another process.

    Args:
        error: What `sendable` gave.
        text: And its traceback.

    Raises:
        Exception: The error, with its traceback there as cause.
    """
    raise error from RuntimeError(f"in another process:\n{text}")
