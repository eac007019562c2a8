"""What a network has to say about itself, and what its builders share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

#: A network's layers as they follow each other, each with its name.
Named = tuple[str, nn.Module]


@dataclass(frozen=True)
class Architecture:
    """A network that is known by name.

    Attributes:
        name: What it is called.
        about: What it is, in one line.
        paper: Who used it.
        build: Makes it, from the shape of one input, the number of classes and the width
            multiplier.
    """

    name: str
    about: str
    paper: str
    build: Callable[[tuple[int, ...], int, float], nn.Module]


def scaled(size: int, width: float) -> int:
    """A hidden size times the width multiplier, rounded, at least 1.

    Args:
        size: Units or channels at width 1.
        width: The multiplier.

    Returns:
        Units or channels.

    Example:
        >>> scaled(50, 0.25), scaled(6, 0.01)
        (12, 1)
    """
    return max(1, round(size * width))


def image_shape(name: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Channels, height and width of images that a network can take.

    Args:
        name: What the network is called.
        shape: The shape of one input.
        least: The fewest pixels that an image may have in height and width.

    Returns:
        The three numbers.

    Raises:
        ValueError: If the inputs are no images, or too small.
    """
    if len(shape) != 3:
        raise ValueError(
            f"`shape={shape!r}` is no image; `{name}` needs (channels, height, width), as in "
            "(1, 28, 28); reshape the inputs, or take a network `mlp-...`, which takes any shape."
        )
    channels, height, width = shape
    if min(height, width) < least:
        raise ValueError(
            f"`shape={shape!r}` is too small; `{name}` needs images of at least {least} by {least} "
            "pixels, as its layers make them smaller; enlarge the images, or take `lenet5` (8 by "
            "8 and larger) or a network `mlp-...` (any shape)."
        )
    return channels, height, width


def dense(sizes: Iterable[int]) -> list[Named]:
    """Linear layers with ReLUs between them: `fc1`, `relu_fc1`, `fc2`, and so on.

    Args:
        sizes: Numbers of units, from the inputs to the outputs.

    Returns:
        The layers with their names; the last one is linear.
    """
    layers: list[Named] = []
    for number, (inner, outer) in enumerate(pairwise(sizes), start=1):
        layers += [(f"fc{number}", nn.Linear(inner, outer)), (f"relu_fc{number}", nn.ReLU())]
    return layers[:-1]


def chain(layers: Iterable[Named]) -> nn.Sequential:
    """A network of layers that follow each other.

    Args:
        layers: The layers with their names.

    Returns:
        The network.
    """
    return nn.Sequential(OrderedDict(layers))
