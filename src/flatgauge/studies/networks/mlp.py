"""Multilayer perceptrons: any number of hidden layers of any sizes, read from the name."""

from __future__ import annotations

import re
from functools import partial
from math import prod

from torch import nn

from flatgauge.studies.networks.architecture import Architecture, chain, dense, scaled

#: "mlp", then for every hidden layer "-units", or "-layersxunits" for some of one size.
_NAME = re.compile(r"mlp(-([1-9]\d*x)?[1-9]\d*)+")

MLPS = (
    ("mlp-5x512", "Five hidden layers of 512 units (MNIST-FC)", "Rangamani et al. 2019"),
    ("mlp-50-50-50-30", "Four hidden layers of 50, 50, 50 and 30", "Petzka et al. 2019, App. C"),
    ("mlp-3x512", "Three hidden layers, which the paper gives no size", "Tsuzuku et al. 2019"),
    ("f1", "Two hidden layers of 300 and 100 units", "Rangamani et al. 2019, Table 1"),
)
"""The perceptrons of the papers: name, what it is, who used it."""


def perceptron(name: str, *, about: str = "", paper: str = "") -> Architecture | None:
    """The multilayer perceptron of a name such as `mlp-64-64` or `mlp-2x64`.

    Args:
        name: The name; `f1` stands for `mlp-300-100`.
        about: What it is; if empty, its hidden layers are listed.
        paper: Who used it.

    Returns:
        The architecture; None if the name is not of this form.

    Example:
        >>> perceptron("mlp-2x64-32").about
        'Hidden layers of 64, 64 and 32 units'
    """
    spelled = "mlp-300-100" if name == "f1" else name
    if _NAME.fullmatch(spelled) is None:
        return None
    hidden: list[int] = []
    for part in spelled.split("-")[1:]:
        times, _, size = part.rpartition("x")
        hidden += int(times or 1) * [int(size)]
    if not about:
        *others, last = (str(size) for size in hidden)
        listed = f"s of {', '.join(others)} and {last}" if others else f" of {last}"
        about = f"Hidden layer{listed} units"
    return Architecture(name, about, paper, partial(_build, tuple(hidden)))


def _build(
    hidden: tuple[int, ...], shape: tuple[int, ...], classes: int, width: float
) -> nn.Module:
    """The network: everything flattened, then linear layers with ReLUs between them."""
    sizes = [prod(shape), *(scaled(size, width) for size in hidden), classes]
    return chain([("flatten", nn.Flatten()), *dense(sizes)])
