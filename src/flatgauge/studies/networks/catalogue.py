"""Networks by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from flatgauge.studies.networks.alexnet import ALEXNET
from flatgauge.studies.networks.architecture import Architecture
from flatgauge.studies.networks.lenet import C1, LENET5
from flatgauge.studies.networks.mlp import MLPS, perceptron
from flatgauge.studies.networks.plainnet import PLAINNET18
from flatgauge.studies.networks.vgg import VGG16
from flatgauge.studies.networks.wide_resnet import WRN16_4

_PERCEPTRONS = (perceptron(name, about=about, paper=paper) for name, about, paper in MLPS)
_CONVOLUTIONAL = (C1, LENET5, ALEXNET, VGG16, PLAINNET18, WRN16_4)

NETWORKS: Mapping[str, Architecture] = MappingProxyType(
    {known.name: known for known in (*_PERCEPTRONS, *_CONVOLUTIONAL) if known is not None}
)
"""The networks of the papers, by name. `build` knows every other `mlp-...` too."""


def find_architecture(name: str) -> Architecture:
    """The architecture of a name.

    Args:
        name: One of `NETWORKS`, or a multilayer perceptron written as its hidden layers:
            `mlp-64-32`, or `mlp-2x64` for two of 64.

    Returns:
        The architecture.

    Raises:
        ValueError: If nothing is known by that name.

    Example:
        >>> find_architecture("mlp-5x512").paper
        'Rangamani et al. 2019'
    """
    found = NETWORKS.get(name) or perceptron(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(name.lower().replace("_", "-"), NETWORKS, n=1)
    hint = f"; did you mean `{close[0]}`?" if close else "."
    known = ", ".join(f"`{one}`" for one in NETWORKS)
    raise ValueError(
        f"`{name}` is not known as a network; needed is one of {known}, or hidden layers written "
        f"as `mlp-64-32` or `mlp-2x64`{hint}"
    )


def build(
    name: str,
    *,
    shape: tuple[int, ...] = (1, 28, 28),
    classes: int = 10,
    width: float = 1.0,
) -> nn.Module:
    """Build a network by name, with weights as torch draws them by default.

    The weights come from torch's global generator; see `initialise` for others. All networks
    have ReLU activations, and no module is used twice.

    Args:
        name: One of `NETWORKS`, or hidden layers written as `mlp-64-32` or `mlp-2x64`.
        shape: Of one input: (channels, height, width); anything for a multilayer perceptron.
        classes: Outputs.
        width: Every hidden size is multiplied by this and rounded, and is at least 1.

    Returns:
        The network, in training mode.

    Raises:
        ValueError: If nothing is known by that name, or it cannot be built with these.

    Example:
        >>> net = build("mlp-50-50-50-30", width=0.2)
        >>> [layer.out_features for layer in net.modules() if isinstance(layer, nn.Linear)]
        [10, 10, 10, 6, 10]
    """
    architecture = find_architecture(name)
    shape = tuple(shape)
    if not shape or any(isinstance(size, bool) or size != int(size) or size < 1 for size in shape):
        raise ValueError(
            f"`shape={shape!r}` is not the shape of an input; needed are whole numbers of at least "
            "1, without the number of samples, as in (1, 28, 28)."
        )
    if classes != int(classes) or classes < 1:
        raise ValueError(f"`classes={classes!r}` is not possible; needed is a whole number ≥ 1.")
    if not (math.isfinite(width) and width > 0):
        raise ValueError(
            f"`width={width!r}` is not possible; needed is a positive number, and 1.0 is the "
            "network as published."
        )
    return architecture.build(shape, classes, width)
