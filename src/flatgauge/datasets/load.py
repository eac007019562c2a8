"""From what a user writes for data to the data: built-in names, files, and own functions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from flatgauge import user_code
from flatgauge.datasets.cifar import load_cifar10
from flatgauge.datasets.digits import load_digits
from flatgauge.datasets.idx import load_idx
from flatgauge.datasets.npz import load_npz
from flatgauge.datasets.samples import Samples, check_limit, normalise

DIGITS = tuple("0123456789")
FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
CIFAR10 = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


@dataclass(frozen=True)
class Builtin:
    """A data set flatgauge knows by name.

    Attributes:
        usage: How it is written: its name, and ``:DIR`` if it is read from a folder.
        about: What it is, in one line.
        classes: What the class numbers mean.
        load: Reads it.
    """

    usage: str
    about: str
    classes: tuple[str, ...]
    load: Callable[..., tuple[Tensor, Tensor]]


_ALL = (
    Builtin("digits", "1,797 digits of 8×8 pixels, from scikit-learn", DIGITS, load_digits),
    Builtin(
        "mnist:DIR",
        "MNIST, 28×28 pixels, IDX files in DIR",
        DIGITS,
        partial(load_idx, subfolders=("raw", "MNIST/raw", "MNIST", "mnist")),
    ),
    Builtin(
        "fashion-mnist:DIR",
        "Fashion-MNIST, 28×28 pixels, IDX files in DIR",
        FASHION,
        partial(load_idx, subfolders=("raw", "FashionMNIST/raw", "FashionMNIST", "fashion-mnist")),
    ),
    Builtin(
        "cifar10:DIR",
        "CIFAR-10, 3×32×32 pixels, binary or Python batches in DIR",
        CIFAR10,
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
            called with ``split`` and, if given, ``limit``, as far as it has such arguments.
        split: ``"train"`` or ``"test"``; an ``.npz`` and a factory may have others.
        limit: Take only the first so many samples.
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
    check_limit(limit)
    name, colon, folder = spec.partition(":")
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if name in BUILTIN:
        _check_usage(spec, name, folder, split)
        classes, load = BUILTIN[name].classes, BUILTIN[name].load
        place = (folder,) if folder else ()
        inputs, targets = load(*place, split=split, limit=limit)
    elif spec.endswith(".npz"):
        name = spec
        inputs, targets, notes = load_npz(spec, split=split, limit=limit)
    elif colon or spec.endswith(".py"):
        _refuse(spec, mean=mean, std=std)
        return _from_factory(spec, split, limit)
    else:
        raise ValueError(_unknown(spec))
    inputs = normalise(inputs, mean, std)
    return Samples(inputs, targets, name=name, split=split, classes=classes, notes=notes)


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
        found = user_code.resolve(spec)
    except (ModuleNotFoundError, ValueError):
        if not spec.partition(":")[0].replace("-", "_").isidentifier():
            raise  # a path or a dotted module: its own message says more
        raise ValueError(_unknown(spec)) from None
    options: dict[str, object] = {"split": split} if split != "train" else {}
    options |= {} if limit is None else {"limit": limit}
    if not callable(found):
        _refuse(spec, **options)
        return found
    named, others = _keywords(found)
    if not others:
        _refuse(spec, **{key: value for key, value in options.items() if key not in named})
    if "split" in named:
        options["split"] = split
    data = user_code.call(spec, found, **options)
    if data is None:
        raise TypeError(f"`{spec}` returned None; needed are data; let it `return` them.")
    return data


def _keywords(factory: Callable[..., Any]) -> tuple[set[str], bool]:
    """The keywords a factory names, and whether it takes any others."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return set(), False
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _refuse(spec: str, **options: object) -> None:
    """Say which options a user's own data cannot be given."""
    for name, value in options.items():
        if value is not None:
            own = name in ("split", "limit")
            advice = f"give it an argument `{name}`" if own else "normalise there"
            raise ValueError(
                f"`{name}={value!r}` cannot be applied to the data of `{spec}`, which are used "
                f"as they come; {advice}, or leave it out."
            )


def _unknown(spec: str) -> str:
    """Say what can be written for data, and what was probably meant."""
    name = spec.partition(":")[0].lower().replace("_", "-")
    close = difflib.get_close_matches(name, BUILTIN, n=1)
    hint = f"; did you mean `{BUILTIN[close[0]].usage}`?" if close else "."
    known = ", ".join(f"`{builtin.usage}`" for builtin in BUILTIN.values())
    return (
        f"`{spec}` is not known as data; needed is one of {known}, a path to an `.npz`, "
        f"`path/to/file.py:factory` or `package.module:factory`{hint}"
    )
