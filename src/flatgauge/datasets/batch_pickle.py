"""CIFAR-10's pickles, read without running anything a pickle could ask for.

A pickle is a program. These files need few of its calls, all to rebuild one array of bytes;
they are answered here by stand-ins that only keep what they are given, so that not even NumPy
sees the data before they are checked. Any other call is refused by name.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from flatgauge.datasets.files import reading
from flatgauge.datasets.samples import check_labels

PIXELS = 3 * 32 * 32


def read_batch(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Read one batch of CIFAR-10 in its layout for Python.

    Args:
        path: The file, plain or compressed.

    Returns:
        Pixels (N, 3072) as uint8 and labels (N,) as int64.

    Raises:
        ValueError: If the file is no such batch.
    """
    batch = _unpickle(path)
    entries: dict[str, Any] = {}
    if isinstance(batch, dict):
        for key, value in batch.items():
            entries[key.decode("latin1") if isinstance(key, bytes) else str(key)] = value
    if not {"data", "labels"} <= set(entries):
        found = ", ".join(f"`{key}`" for key in entries) or f"`{type(batch).__name__}`"
        raise ValueError(
            f"`{path}` holds {found}; needed are `data` and `labels`, as in `data_batch_1` of "
            f"CIFAR-10; check which file it is."
        )
    pixels, labels = _bytes(entries["data"]), entries["labels"]
    if pixels is None or pixels.shape[1:] != (PIXELS,) or not len(pixels):
        raise ValueError(
            f"`{path}` has `data` that is not an array of bytes with {PIXELS} columns; needed "
            f"is a batch of CIFAR-10; download it again."
        )
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError(
            f"`{path}` has `labels` that are no list of whole numbers; needed is a batch of "
            f"CIFAR-10; download it again."
        )
    check_labels(labels, path)
    if len(labels) != len(pixels):
        raise ValueError(
            f"`{path}` holds {len(pixels)} images and {len(labels)} labels; needed is one "
            f"label per image; download it again."
        )
    return pixels, np.array(labels, np.int64)


class _Refused(ValueError):
    """A pickle asks for something beyond an array of bytes."""


class _Kept:
    """Stands in for an object a pickle builds, and only keeps what it is built from."""

    def __init__(self, *parts: object) -> None:
        self.parts: Any = parts
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Array(_Kept):
    """For `_reconstruct`: an array whose state is (version, shape, dtype, fortran, bytes)."""


class _Buffer(_Kept):
    """For `_frombuffer`, since protocol 5: an array made of (bytes, dtype, shape, order)."""


def _encode(text: str, encoding: object) -> bytes:
    """For `_codecs.encode`, by which Python 3 writes bytes to old protocols."""
    return text.encode("latin1")


_STAND_INS = {
    "_codecs.encode": _encode,
    "numpy.dtype": _Kept,
    "numpy.ndarray": _Kept,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.core.numeric._frombuffer": _Buffer,
    "numpy._core.numeric._frombuffer": _Buffer,
}


class _Reader(pickle.Unpickler):
    """An unpickler that knows the stand-ins and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in _STAND_INS:
            raise _Refused(name)
        return _STAND_INS[name]


def _unpickle(path: Path) -> Any:
    """Read a pickle of containers, numbers, text and arrays of bytes."""
    with reading(path) as stream:
        content = stream.read()
    try:
        return _Reader(io.BytesIO(content), encoding="bytes").load()
    except _Refused as refused:
        raise ValueError(
            f"`{path}` asks to run `{refused}`, which no batch of CIFAR-10 does; needed is the "
            f"original file: do not open this one with `pickle`, download it again."
        ) from None
    except Exception as error:  # a damaged pickle ends in nearly every kind of error
        raise ValueError(
            f"`{path}` is cut short or not a pickle ({type(error).__name__}: {error}); needed "
            f"is a batch of CIFAR-10; download it again."
        ) from error


def _bytes(kept: object) -> np.ndarray[Any, Any] | None:
    """Make the array a stand-in describes, if it is one of unsigned bytes."""
    try:
        if isinstance(kept, _Buffer):
            content, dtype, shape, order = kept.parts
        elif isinstance(kept, _Array):
            _, shape, dtype, fortran, content = kept.state
            order = "F" if fortran else "C"
        else:
            return None
        if dtype.parts[0] not in ("u1", b"u1"):
            return None
        return np.frombuffer(bytes(content), np.uint8).reshape(shape, order=order)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None
