"""A user's own arrays, from an `.npz` file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatgauge.datasets.samples import from_bytes, within
from flatgauge.reading import check_readable, expand

PAIRS = (("inputs", "targets"), ("x", "y"))


def load_npz(path: str, *, split: str, limit: int | None) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Read inputs and targets from an `.npz` file.

    Looked for are `inputs_SPLIT` and `targets_SPLIT`, or `x_SPLIT` and `y_SPLIT`, then, for
    the split ``"train"``, the same names without it. Shapes are left as they are. Inputs of
    dtype uint8 are taken for images and divided by 255, as the built-in sets are; other whole
    numbers (token ids) become int64, floats become float32. Targets become int64, or float32 if
    they are floats. What this changes about the numbers is noted, or refused where they do not fit.

    Args:
        path: The file.
        split: Which part of it.
        limit: Take only the first so many.

    Returns:
        Inputs and targets, and notes on how their numbers were changed.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it does not hold such arrays, or numbers that cannot be converted.
    """
    file = expand(path)
    check_readable(file)
    if not os.path.isfile(file):
        raise FileNotFoundError(
            f"`{path}` is not a file, seen from `{Path.cwd()}`; needed is an `.npz`, as "
            f"`numpy.savez` writes it; check the path."
        )
    inputs, targets = _read(file, split)
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets) or not len(inputs):
        raise ValueError(
            f"`{path}` has inputs of shape {inputs.shape}, targets of shape {targets.shape}; "
            f"needed is one target per input along the first axis, and at least one."
        )
    taken = within(limit, len(inputs), f"`{path}`")
    notes = [*_notes("inputs", inputs, images=True), *_notes("targets", targets)]
    return _inputs(inputs[:taken], path), _targets(targets[:taken], path), tuple(notes)


def _read(path: Path, split: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Read the two arrays, whatever they are called."""
    with path.open("rb") as stream:  # numpy leaves a file it opened itself open on an error
        try:
            archive = np.load(stream, allow_pickle=False)
        except Exception as error:  # Damaged files end in nearly every kind of error.
            raise ValueError(_damaged(path, error)) from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(
                f"`{path}` holds one array without a name; needed are inputs and targets; write "
                f"it with `numpy.savez(path, inputs=..., targets=...)`."
            )
        left, right = _names(list(archive), split, path)
        return _array(archive, left, path), _array(archive, right, path)


def _array(archive: Mapping[str, Any], name: str, path: Path) -> np.ndarray[Any, Any]:
    """Read one array of numbers."""
    try:
        array = np.asarray(archive[name])
    except Exception as error:
        if "Object arrays" in str(error):
            raise ValueError(_not_numbers(path, name, "object")) from error
        raise ValueError(_damaged(path, error)) from error
    if array.dtype.kind not in "biuf":
        raise ValueError(_not_numbers(path, name, str(array.dtype)))
    return array


def _names(found: list[str], split: str, path: Path) -> tuple[str, str]:
    """Choose the names of the pair for a split."""
    pairs = [(f"{left}_{split}", f"{right}_{split}") for left, right in PAIRS]
    plain = [pair for pair in PAIRS if set(pair) <= set(found)]
    usable = [pair for pair in pairs if set(pair) <= set(found)]
    usable += plain if split == "train" else []
    if usable:
        return usable[0]
    looked = ", ".join(f"`{left}`/`{right}`" for left, right in [*pairs, *PAIRS])
    there = ", ".join(f"`{name}`" for name in found) or "nothing"
    if plain:
        raise ValueError(
            f"`{path}` holds {there} and no split {split!r}; leave `split` out to take what "
            f"there is, or store the split under one of {looked}."
        )
    raise ValueError(
        f"`{path}` holds {there}; needed is one of the pairs {looked}; rename the arrays."
    )


def _inputs(array: np.ndarray[Any, Any], path: str) -> Tensor:
    """Turn an array into inputs of a model."""
    if array.dtype == np.uint8:
        return from_bytes(array)
    kind = np.int64 if array.dtype.kind in "iu" else np.float32
    return _converted("inputs", array, kind, path)


def _targets(array: np.ndarray[Any, Any], path: str) -> Tensor:
    """Turn an array into targets of a loss."""
    kind = np.float32 if array.dtype.kind == "f" else np.int64
    return _converted("targets", array, kind, path)


def _converted(role: str, array: np.ndarray[Any, Any], kind: Any, path: str) -> Tensor:
    """An array in another kind of numbers, refused where they do not fit."""
    if np.can_cast(array.dtype, kind):
        return torch.from_numpy(array.astype(kind))
    limits: Any = np.iinfo(kind) if kind is np.int64 else np.finfo(kind)
    numbers = array[np.isfinite(array)]
    low, high = (numbers.min(), numbers.max()) if numbers.size else (0, 0)
    if low < limits.min or high > limits.max:
        raise ValueError(
            f"the {role} in `{path}` are {array.dtype} and go from {low:g} to {high:g}, which does "
            f"not fit {np.dtype(kind)}, as which they are read; scale them, or give data from a "
            "function of your own (`--data file.py:factory`)."
        )
    return torch.from_numpy(array.astype(kind))


def _notes(role: str, array: np.ndarray[Any, Any], *, images: bool = False) -> list[str]:
    """What reading changes about the numbers of an array."""
    if images and array.dtype == np.uint8:
        return [f"the {role} are uint8, taken for images and divided by 255"]
    if images and array.dtype.kind == "b":
        return [f"the {role} are bool, read as 0 and 1 in float32"]
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        return [f"the {role} are {array.dtype}, rounded to float32"]
    return []


def _damaged(path: Path, error: Exception) -> str:
    """Say that a file is not a whole `.npz`."""
    return (
        f"`{path}` is cut short or not an `.npz` ({type(error).__name__}: {error}); needed is "
        f"what `numpy.savez` writes; save it again."
    )


def _not_numbers(path: Path, name: str, dtype: str) -> str:
    """Say that an array cannot be data."""
    return (
        f"`{name}` in `{path}` is an array of dtype {dtype}; needed are numbers; convert it, "
        f"for example with `.astype('float32')`, and save it again."
    )
