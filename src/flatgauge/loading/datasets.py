"""Data sets by name: built-in ones, `.npz` files, and what a user's own function returns.

`load_dataset` takes what the user wrote and returns `Samples`, inputs and targets as tensors; what
a user's own function returns is passed on untouched. Readers return a pair of tensors each.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.loading import models
from flatgauge.loading.files import check_readable, expand, load_cifar10, load_idx, sample_count

Array = NDArray[Any]


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
        """Make the pair and attach its description."""
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


def normalise(
    inputs: Tensor, mean: float | Sequence[float] | None, std: float | Sequence[float] | None
) -> Tensor:
    """Subtract a mean and divide by a standard deviation, per channel (axis 1), in place."""
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


def load_digits(*, split: str, limit: int | None) -> tuple[Array, Array]:
    """Read the images (N, 1, 8, 8) in [0, 1] and labels (N,) of scikit-learn's digits.

    They are the test set of "Optical Recognition of Handwritten Digits" by Alpaydin and Kaynak (UCI
    Machine Learning Repository, doi:10.24432/C50P49, licence CC BY 4.0); the file repeats this.

    Returns:
        Images and labels.
    """
    # The set is not split by its authors: every fifth sample of each class is for testing. That
    # needs no random numbers, and keeps the classes balanced and the order of the samples.
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        images, labels = file["images"], file["labels"].astype(np.int64)
    rank = np.zeros_like(labels)  # how many of its class came before each sample
    for label in range(10):
        rank[labels == label] = np.arange((labels == label).sum())
    chosen = np.flatnonzero((rank % 5 == 4) == (split == "test"))
    chosen = chosen[: sample_count(limit, len(chosen), f"`digits` ({split})")]
    return np.asarray(images, np.float32)[chosen, None] / np.float32(16.0), labels[chosen]


#: Names that the arrays of an `.npz` file may have.
_PAIRS = (("inputs", "targets"), ("x", "y"))


def load_npz(path: str, *, split: str, limit: int | None) -> tuple[Array, Array]:
    """Read the arrays of an `.npz` file that belong to a split, as they are stored.

    Looked for are `inputs_SPLIT` and `targets_SPLIT`, or `x_SPLIT` and `y_SPLIT`, then, for
    the split ``"train"``, the same names without it.

    Returns:
        Inputs and targets.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it does not hold such arrays.
    """
    file = expand(path)
    check_readable(file)
    if not os.path.isfile(file):
        raise FileNotFoundError(
            f"`{path}` is not a file, seen from `{Path.cwd()}`; needed is an `.npz`, as "
            f"`numpy.savez` writes it; check the path."
        )
    inputs, targets = _read_npz(file, split)
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets) or not len(inputs):
        raise ValueError(
            f"`{path}` has inputs of shape {inputs.shape}, targets of shape {targets.shape}; "
            f"needed is one target per input along the first axis, and at least one."
        )
    size = sample_count(limit, len(inputs), f"`{path}`")
    return inputs[:size], targets[:size]


@contextlib.contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Read an `.npz` in the block; any error in it means that the file is damaged."""
    try:
        yield
    except Exception as error:  # Damaged files end in nearly every kind of error.
        raise ValueError(
            f"`{path}` is cut short or not an `.npz` ({type(error).__name__}: {error}); needed is "
            f"what `numpy.savez` writes; save it again."
        ) from error


def _read_npz(path: Path, split: str) -> tuple[Array, Array]:
    """Read the two arrays, whatever they are called."""
    with path.open("rb") as stream:  # numpy leaves a file it opened itself open on an error
        with _explain_damage(path):
            archive = np.load(stream, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(
                f"`{path}` holds one array without a name; needed are inputs and targets; write "
                f"it with `numpy.savez(path, inputs=..., targets=...)`."
            )
        left, right = _choose_names(list(archive), split, path)
        return _read_array(archive, left, path), _read_array(archive, right, path)


def _read_array(archive: Mapping[str, Any], name: str, path: Path) -> Array:
    """Read one array of numbers."""
    with _explain_damage(path):
        try:
            array = np.asarray(archive[name])
        except ValueError as error:
            if "Object arrays" not in str(error):
                raise
            array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"`{name}` in `{path}` is an array of dtype {array.dtype}; needed are numbers; convert "
            f"it, for example with `.astype('float32')`, and save it again."
        )
    return array


def _choose_names(found: list[str], split: str, path: Path) -> tuple[str, str]:
    """Choose the names of the pair for a split."""
    pairs = [(f"{left}_{split}", f"{right}_{split}") for left, right in _PAIRS]
    plain = [pair for pair in _PAIRS if set(pair) <= set(found)]
    usable = [pair for pair in pairs if set(pair) <= set(found)]
    usable += plain if split == "train" else []
    if usable:
        return usable[0]
    looked = ", ".join(f"`{left}`/`{right}`" for left, right in [*pairs, *_PAIRS])
    there = ", ".join(f"`{name}`" for name in found) or "nothing"
    if plain:
        raise ValueError(
            f"`{path}` holds {there} and no split {split!r}; leave `split` out to take what "
            f"there is, or store the split under one of {looked}."
        )
    raise ValueError(
        f"`{path}` holds {there}; needed is one of the pairs {looked}; rename the arrays."
    )


def _convert_inputs(array: Array, source: str) -> Tensor:
    """Inputs of a model: images as numbers in [0, 1], token ids as int64, the rest as float32."""
    if array.dtype == np.uint8:
        return torch.from_numpy(array.astype(np.float32)).div_(255.0)
    return _convert("inputs", array, np.int64 if array.dtype.kind in "iu" else np.float32, source)


def _convert(role: str, array: Array, kind: Any, source: str) -> Tensor:
    """Convert an array to another dtype; refuse numbers that do not fit."""
    if np.can_cast(array.dtype, kind):
        return torch.from_numpy(array.astype(kind))
    limits: Any = np.iinfo(kind) if kind is np.int64 else np.finfo(kind)
    numbers = array[np.isfinite(array)]
    low, high = (numbers.min(), numbers.max()) if numbers.size else (0, 0)
    if low < limits.min or high > limits.max:
        raise ValueError(
            f"the {role} in `{source}` are {array.dtype} and go from {low:g} to {high:g}, which "
            f"does not fit {np.dtype(kind)}, as which they are read; scale them, or give data from "
            "a function of your own (`--data file.py:factory`)."
        )
    return torch.from_numpy(array.astype(kind))


def _conversions(role: str, array: Array) -> list[str]:
    """Notes on what reading changes about the numbers of an array."""
    if role == "inputs" and array.dtype == np.uint8:
        return ["the inputs are uint8, taken for images and divided by 255"]
    if role == "inputs" and array.dtype.kind == "b":
        return ["the inputs are bool, read as 0 and 1 in float32"]
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        return [f"the {role} are {array.dtype}, rounded to float32"]
    return []


_DIGITS = tuple("0123456789")

_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

_CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


@dataclass(frozen=True)
class Builtin:
    """A data set flatgauge knows by name."""

    usage: str  # How it is written: its name, and ``:DIR`` if it is read from a folder.
    about: str
    classes: tuple[str, ...]  # What the class numbers mean.
    load: Callable[..., tuple[Array, Array]]


def _idx(name: str, about: str, classes: tuple[str, ...], *folders: str) -> Builtin:
    """MNIST or a set of the same layout, in the folder itself or where others put it."""
    load = partial(load_idx, subfolders=("raw", *folders))
    return Builtin(f"{name}:DIR", f"{about}, 28×28 pixels, IDX files in DIR", classes, load)


_ALL = (
    Builtin("digits", "1,797 digits of 8×8 pixels, from scikit-learn", _DIGITS, load_digits),
    _idx("mnist", "MNIST", _DIGITS, "MNIST/raw", "MNIST", "mnist"),
    _idx(
        "fashion-mnist",
        "Fashion-MNIST",
        _FASHION,
        "FashionMNIST/raw",
        "FashionMNIST",
        "fashion-mnist",
    ),
    Builtin(
        "cifar10:DIR",
        "CIFAR-10, 3×32×32 pixels, binary or Python batches in DIR",
        _CIFAR10,
        load_cifar10,
    ),
)


BUILTIN: Mapping[str, Builtin] = MappingProxyType(
    {builtin.usage.partition(":")[0]: builtin for builtin in _ALL}
)
"""The built-in data sets, by name."""


def load_dataset(
    spec: str,
    *,
    split: str = "train",
    limit: int | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> Any:
    """Read the data a specification names.

    Args:
        spec: A built-in name (``digits``, ``mnist:DIR``, ...: see `BUILTIN`), a path to an
            ``.npz``, or ``path/to/file.py:factory`` or ``package.module:factory``. A factory is
            called with ``split`` and, if given, ``limit``, as far as it has such arguments. Of an
            `.npz`, inputs of dtype uint8 are taken for images and divided by 255, as the built-in
            sets are; other whole numbers (token ids) become int64, floats become float32, targets
            int64, or float32 if they are floats.
        split: ``"train"`` or ``"test"``; an ``.npz`` and a factory may have others.
        limit: Take only that many samples, from the first one on.
        mean: Subtracted per channel, from values in [0, 1].
        std: Divided by per channel, after that.

    Returns:
        `Samples`, a pair of inputs and targets; from a factory, what it returns, untouched.

    Raises:
        ValueError: If nothing is known by that name, or what it names cannot be read.

    Example:
        >>> load_dataset("digits", split="test", limit=100)
        Samples(digits, test: inputs (100, 1, 8, 8) float32, targets (100,) int64)
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(
            f"`limit={limit!r}` leaves no samples; needed is a whole number of at least 1; "
            f"leave it out to take all."
        )
    name, colon, folder = spec.partition(":")
    classes: tuple[str, ...] = ()
    notes: list[str] = []
    if name in BUILTIN:
        _check_usage(spec, name, folder, split)
        classes, load = BUILTIN[name].classes, BUILTIN[name].load
        place = (folder,) if folder else ()
        inputs, targets = load(*place, split=split, limit=limit)
    elif spec.endswith(".npz"):
        name = spec
        inputs, targets = load_npz(spec, split=split, limit=limit)
        notes = [*_conversions("inputs", inputs), *_conversions("targets", targets)]
    elif colon or spec.endswith(".py"):
        _refuse_options(spec, mean=mean, std=std)
        return _from_factory(spec, split, limit)
    else:
        raise ValueError(_unknown_message(spec))
    kind = np.float32 if targets.dtype.kind == "f" else np.int64
    labels = _convert("targets", targets, kind, spec)
    images = normalise(_convert_inputs(inputs, spec), mean, std)
    return Samples(images, labels, name=name, split=split, classes=classes, notes=tuple(notes))


def _check_usage(spec: str, name: str, folder: str, split: str) -> None:
    """Refuse a built-in name written with too little or too much, and splits it lacks."""
    usage = BUILTIN[name].usage
    if not folder and usage != name:
        raise ValueError(
            f"`{spec}` lacks the folder its files are in; write `{usage}`, with DIR your own."
        )
    if spec != name and usage == name:
        raise ValueError(f"`{spec}` has {folder!r} too many; `{name}` needs no folder; drop it.")
    if split not in ("train", "test"):
        raise ValueError(f"`split={split!r}` is unknown; `{name}` has 'train' and 'test'.")


def _from_factory(spec: str, split: str, limit: int | None) -> Any:
    """Return what a user's function returns, or what a user's name stands for."""
    try:
        found = models.resolve(spec)
    except (ModuleNotFoundError, ValueError):
        if not spec.partition(":")[0].replace("-", "_").isidentifier():
            raise  # a path or a dotted module: its own message says more
        raise ValueError(_unknown_message(spec)) from None
    options: dict[str, object] = {"split": split} if split != "train" else {}
    options |= {} if limit is None else {"limit": limit}
    if not callable(found):
        _refuse_options(spec, **options)
        return found
    parameters = models.factory_parameters(found)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        _refuse_options(spec, **{key: value for key, value in options.items() if key not in named})
    if "split" in named:
        options["split"] = split
    data = models.call_factory(spec, found, **options)
    if data is None:
        raise TypeError(f"`{spec}` returned None; needed are data; let it `return` them.")
    return data


def _refuse_options(spec: str, **options: object) -> None:
    """Refuse options that cannot be applied to a user's own data."""
    for name, value in options.items():
        if value is not None:
            own = name in ("split", "limit")
            advice = f"give it an argument `{name}`" if own else "normalise there"
            raise ValueError(
                f"`{name}={value!r}` cannot be applied to the data of `{spec}`, which are used "
                f"as they come; {advice}, or leave it out."
            )


def _unknown_message(spec: str) -> str:
    """The message for an unknown name: what can be written, and what was probably meant."""
    name = spec.partition(":")[0].lower().replace("_", "-")
    close = difflib.get_close_matches(name, BUILTIN, n=1)
    hint = f"; did you mean `{BUILTIN[close[0]].usage}`?" if close else "."
    known = ", ".join(f"`{builtin.usage}`" for builtin in BUILTIN.values())
    return (
        f"`{spec}` is not known as data; needed is one of {known}, a path to an `.npz`, "
        f"`path/to/file.py:factory` or `package.module:factory`{hint}"
    )
