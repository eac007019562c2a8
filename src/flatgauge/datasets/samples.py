"""A labelled set of samples: the pair every loader returns, and how it is cut and scaled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class _Pair(NamedTuple):
    """Inputs and targets."""

    inputs: Tensor
    targets: Tensor


class Samples(_Pair):
    """Inputs and targets of a data set: a pair, so `inputs, targets = samples` works.

    Attributes:
        inputs: One sample per row: images (N, C, H, W) with values in [0, 1] unless
            normalised, or whatever shape the user's file has.
        targets: Class numbers as int64, or float32 for regression.
        name: The data set.
        split: Which part of it.
        classes: What the class numbers mean, where it is known.
        notes: How their numbers differ from those in the file.

    Example:
        >>> samples = Samples(torch.zeros(5, 2), torch.zeros(5), name="zeros", split="train")
        >>> samples
        Samples(zeros, train: inputs (5, 2) float32, targets (5,) float32)
        >>> inputs, targets = samples
    """

    name: str
    split: str
    classes: tuple[str, ...]
    notes: tuple[str, ...]

    def __new__(
        cls,
        inputs: Tensor,
        targets: Tensor,
        *,
        name: str = "",
        split: str = "",
        classes: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> Samples:
        """Make the pair and hang its description on it."""
        samples = super().__new__(cls, inputs, targets)
        samples.name, samples.split, samples.classes = name, split, classes
        samples.notes = notes
        return samples

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{field} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
            for field, tensor in zip(self._fields, self, strict=True)
        )
        return f"{type(self).__name__}({self.name}, {self.split}: {parts})"


def from_bytes(pixels: np.ndarray[Any, Any]) -> Tensor:
    """Turn pixel bytes into numbers in [0, 1].

    Args:
        pixels: Of dtype uint8.

    Returns:
        A float32 copy, divided by 255.
    """
    return torch.from_numpy(pixels.astype(np.float32)).div_(255.0)


def check_limit(limit: int | None) -> None:
    """Refuse a number of samples that is not a positive whole number.

    Args:
        limit: What the user asked for; None means all.

    Raises:
        ValueError: If it is not such a number.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(
            f"`limit={limit!r}` leaves no samples; needed is a whole number of at least 1; "
            f"leave it out to take all."
        )


def within(limit: int | None, size: int, source: str) -> int:
    """How many samples to take of a set.

    Args:
        limit: What the user asked for; None means all.
        size: How many there are.
        source: The set, for the message.

    Returns:
        The number to take.

    Raises:
        ValueError: If there are fewer than asked for.
    """
    if limit is not None and limit > size:
        raise ValueError(
            f"`limit={limit}` asks for more than {source} has, which is {size}; pass "
            f"`limit={size}` or less, or leave it out."
        )
    return size if limit is None else limit


def check_labels(labels: Sequence[int], path: Path) -> None:
    """Refuse labels of anything but ten classes.

    Args:
        labels: As read from a file.
        path: The file, for the message.

    Raises:
        ValueError: If one is not a digit.
    """
    for at, label in enumerate(labels):
        if not 0 <= label <= 9:
            raise ValueError(
                f"`{path}` has label {label} at position {at}; needed are 0 to 9; the file is "
                f"damaged or of another data set (CIFAR-100, EMNIST); check where it is from."
            )


def normalise(
    inputs: Tensor, mean: float | Sequence[float] | None, std: float | Sequence[float] | None
) -> Tensor:
    """Subtract a mean and divide by a standard deviation, per channel (axis 1).

    Args:
        inputs: Of shape (N, C, ...).
        mean: One number, or one per channel; None subtracts nothing.
        std: One number, or one per channel; None divides by nothing.

    Returns:
        The same tensor, changed in place.

    Raises:
        ValueError: If the numbers do not fit the inputs, or a `std` is not positive.
    """
    for name, given in (("mean", mean), ("std", std)):
        if given is None:
            continue
        if not inputs.is_floating_point():
            raise ValueError(
                f"`{name}` was given for inputs of dtype {str(inputs.dtype)[6:]}; needed are "
                f"floats; leave it out, or store the inputs as floats."
            )
        values = torch.as_tensor(given, dtype=inputs.dtype).flatten()
        channels = inputs.shape[1] if inputs.dim() > 1 else 1
        if len(values) not in (1, channels):
            raise ValueError(
                f"`{name}` has {len(values)} numbers for inputs {tuple(inputs.shape)}; needed "
                f"is one number, or one for each of {channels} channels."
            )
        floor = 0.0 if name == "std" else -math.inf
        if not all(floor < value < math.inf for value in values.tolist()):
            kind = "finite numbers above zero" if name == "std" else "finite numbers"
            raise ValueError(f"`{name}={given!r}` cannot be used; needed are {kind}.")
        values = values.view([1, -1] + [1] * (inputs.dim() - 2)) if inputs.dim() > 1 else values
        inputs = inputs.sub_(values) if name == "mean" else inputs.div_(values)
    return inputs
