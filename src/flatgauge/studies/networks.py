"""The networks of the papers by name, and the initialisations that they are started from.

In: a name (`lenet5`, `mlp-2x64`, ...), the shape of one input, the number of classes and a factor
for all hidden sizes. Out: a network with ReLU activations in which no module is used twice.
`initialise` then draws its weights from a generator. The order of the layers is the order in which
torch draws their weights: changing it changes every trained network.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn

__all__ = [
    "INITIALISATIONS",
    "NETWORKS",
    "Architecture",
    "build",
    "find_architecture",
    "initialise",
]

#: Layers as they follow each other, each with its name.
_Named: TypeAlias = list[tuple[str, nn.Module]]


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


# -- what builders share ------------------------------------------------------------------------


def _hidden_size(size: int, width: float) -> int:
    """A hidden size times the width multiplier, rounded, at least 1."""
    return max(1, round(size * width))


def _image_shape(name: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Channels, height and width, refused if the inputs are not images or too small."""
    if len(shape) != 3:
        raise ValueError(
            f"`shape={shape!r}` is not that of an image; `{name}` needs (channels, height, width), "
            "as in (1, 28, 28); reshape the inputs, or take a network `mlp-...`, which takes any "
            "shape."
        )
    channels, height, width = shape
    if min(height, width) < least:
        raise ValueError(
            f"`shape={shape!r}` is too small; `{name}` needs images of at least {least} by {least} "
            "pixels, as its layers make them smaller; enlarge the images, or take `lenet5` (8 by "
            "8 and larger) or a network `mlp-...` (any shape)."
        )
    return channels, height, width


def _dense(sizes: Iterable[int]) -> _Named:
    """Linear layers with ReLUs between them: `fc1`, `relu_fc1`, `fc2`, and so on."""
    layers: _Named = []
    for number, (inner, outer) in enumerate(pairwise(sizes), start=1):
        layers += [(f"fc{number}", nn.Linear(inner, outer)), (f"relu_fc{number}", nn.ReLU())]
    return layers[:-1]


def _chain(layers: _Named) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


# -- perceptrons --------------------------------------------------------------------------------

#: "mlp", then for every hidden layer "-units", or "-layersxunits" for some of one size.
_MLP_NAME = re.compile(r"mlp(-([1-9]\d*x)?[1-9]\d*)+")


def _perceptron(name: str, about: str = "", paper: str = "") -> Architecture | None:
    """The multilayer perceptron of a name such as `mlp-64-64`; None if it is of another form."""
    spelled = "mlp-300-100" if name == "f1" else name
    if _MLP_NAME.fullmatch(spelled) is None:
        return None
    hidden: list[int] = []
    for part in spelled.split("-")[1:]:
        times, _, size = part.rpartition("x")
        hidden += int(times or 1) * [int(size)]
    if not about:
        *others, last = (str(size) for size in hidden)
        listed = f"s of {', '.join(others)} and {last}" if others else f" of {last}"
        about = f"Hidden layer{listed} units"
    return Architecture(name, about, paper, partial(_build_mlp, tuple(hidden)))


def _build_mlp(
    hidden: tuple[int, ...], shape: tuple[int, ...], classes: int, width: float
) -> nn.Module:
    """Everything flattened, then linear layers with ReLUs between them."""
    sizes = [math.prod(shape), *(_hidden_size(size, width) for size in hidden), classes]
    return _chain([("flatten", nn.Flatten()), *_dense(sizes)])


# -- LeNet-5 and C1 -----------------------------------------------------------------------------


def _build_lenet5(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Two convolutions of 5 by 5 with ReLU and max-pooling, then 120, 84 and the classes."""
    # LeCun et al.'s images were 32 by 32, so smaller ones down to 28 are padded by two pixels
    # on each side: the first linear layer has 400 inputs for MNIST and CIFAR-10 alike. Still
    # smaller images, such as the digits, would vanish: both convolutions keep their size,
    # only the first is pooled.
    channels, height, across = _image_shape("lenet5", shape, 8)
    small = min(height, across) < 28
    first = 0 if min(height, across) >= 32 else 2
    second = 2 if small else 0
    one, two = _hidden_size(6, width), _hidden_size(16, width)
    layers: _Named = [
        ("conv1", nn.Conv2d(channels, one, 5, padding=first)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(one, two, 5, padding=second)),
        ("relu2", nn.ReLU()),
    ]
    if not small:
        layers.append(("pool2", nn.MaxPool2d(2)))
    sides = [_side_after_lenet(side, first, second, small) for side in (height, across)]
    sizes = [two * sides[0] * sides[1], _hidden_size(120, width), _hidden_size(84, width), classes]
    return _chain([*layers, ("flatten", nn.Flatten()), *_dense(sizes)])


def _build_c1(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Two convolutions of 5 by 5 without padding, each with max-pooling and then ReLU."""
    channels, height, across = _image_shape("c1", shape, 16)
    one, two = _hidden_size(10, width), _hidden_size(20, width)
    sides = [_side_after_lenet(side, 0, 0, small=False) for side in (height, across)]
    sizes = [two * sides[0] * sides[1], _hidden_size(120, width), _hidden_size(84, width), classes]
    return _chain(
        [
            ("conv1", nn.Conv2d(channels, one, 5)),
            ("pool1", nn.MaxPool2d(2)),
            ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(one, two, 5)),
            ("pool2", nn.MaxPool2d(2)),
            ("relu2", nn.ReLU()),
            ("flatten", nn.Flatten()),
            *_dense(sizes),
        ]
    )


def _side_after_lenet(side: int, first: int, second: int, small: bool) -> int:
    """What is left of a side after both convolutions; a small image is pooled only once."""
    side = (side - 4 + 2 * first) // 2 - 4 + 2 * second
    return side if small else side // 2


# -- deep networks ------------------------------------------------------------------------------


def _build_alexnet(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Two convolutions of 5 by 5 with 64 channels, pooled by 3 with stride 2; then 384, 192."""
    # Rangamani et al. say no more than "AlexNet-type". This is the small AlexNet of Zhang et
    # al. 2017 (Understanding deep learning requires rethinking generalization, App. A), also
    # close to Keskar et al.'s C1, without the local response normalisation of the former and
    # the batch-norm and dropout of the latter. It has 1.76 million parameters on CIFAR-10.
    channels, height, across = _image_shape("alexnet", shape, 8)
    size = _hidden_size(64, width)
    left = [-(-side // 4) for side in (height, across)]  # Halved twice, each time rounded up.
    hidden = [_hidden_size(384, width), _hidden_size(192, width)]
    return _chain(
        [
            ("conv1", nn.Conv2d(channels, size, 5, padding=2)),
            ("relu1", nn.ReLU()),
            ("pool1", nn.MaxPool2d(3, 2, padding=1)),
            ("conv2", nn.Conv2d(size, size, 5, padding=2)),
            ("relu2", nn.ReLU()),
            ("pool2", nn.MaxPool2d(3, 2, padding=1)),
            ("flatten", nn.Flatten()),
            *_dense([size * left[0] * left[1], *hidden, classes]),
        ]
    )


#: Channels, and how many convolutions of 3 by 3 have them before the image is halved.
_VGG_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def _build_vgg16(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Thirteen convolutions of 3 by 3 in five stages, then two hidden layers of 512 units."""
    # Simonyan and Zisserman's configuration D without dropout, with 512 instead of 4096
    # units, as images of 32 by 32 have shrunk to one pixel by then. No batch-norm, as in
    # Rangamani et al. Poolings round up, so that images of 28 by 28 end as one pixel too. As
    # in every deep network without norm layers, little is left of an image under torch's
    # default weights (outputs differ by 1e-7 between images): start from `kaiming_uniform`.
    inner, *sides = _image_shape("vgg16", shape, 28)
    layers: _Named = []
    for stage, (size, count) in enumerate(_VGG_STAGES, start=1):
        outer = _hidden_size(size, width)
        for number in range(1, count + 1):
            layers.append((f"conv{stage}_{number}", nn.Conv2d(inner, outer, 3, padding=1)))
            layers.append((f"relu{stage}_{number}", nn.ReLU()))
            inner = outer
        layers.append((f"pool{stage}", nn.MaxPool2d(2, ceil_mode=True)))
        sides = [-(-side // 2) for side in sides]
    hidden = _hidden_size(512, width)
    sizes = [inner * sides[0] * sides[1], hidden, hidden, classes]
    return _chain([*layers, ("flatten", nn.Flatten()), *_dense(sizes)])


def _build_plainnet18(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Seventeen convolutions of 3 by 3 and a linear layer: a ResNet-18 without shortcuts."""
    # He et al.'s 18-layer plain network, with its first convolution made for small images (3
    # by 3, stride 1, no pooling), as is usual for CIFAR-10. No batch-norm and no shortcuts,
    # as Yi et al.'s basis paths are those of a network without either. Start it from
    # `kaiming_uniform`: torch's default weights shrink a signal by more than half in every
    # layer.
    inner, _, _ = _image_shape("plainnet18", shape, 8)
    first = _hidden_size(64, width)
    layers: _Named = [("conv1", nn.Conv2d(inner, first, 3, padding=1)), ("relu1", nn.ReLU())]
    inner = first
    for stage, size in enumerate((64, 128, 256, 512), start=2):
        outer = _hidden_size(size, width)
        for number in range(1, 5):
            stride = 2 if stage > 2 and number == 1 else 1
            convolution = nn.Conv2d(inner, outer, 3, stride, padding=1)
            layers += [(f"conv{stage}_{number}", convolution), (f"relu{stage}_{number}", nn.ReLU())]
            inner = outer
    ending: _Named = [
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(inner, classes)),
    ]
    return _chain([*layers, *ending])


class WideBlock(nn.Module):
    """Two convolutions of 3 by 3, each after batch-norm and ReLU, and a shortcut around them.

    Args:
        inner: Channels that come in.
        outer: Channels that go out.
        stride: Of the first convolution.
    """

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inner)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        plain = inner == outer and stride == 1
        self.shortcut = None if plain else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What goes around the block plus what goes through it."""
        begun: Tensor = self.relu1(self.bn1(x))
        around = x if self.shortcut is None else self.shortcut(begun)
        through: Tensor = self.conv2(self.relu2(self.bn2(self.conv1(begun))))
        return around + through


class WideResNet(nn.Module):
    """A convolution, three stages of blocks, and a linear layer (Zagoruyko and Komodakis 2016).

    A network of depth d has (d − 4) / 6 blocks per stage. Where sizes change, the shortcut is a
    convolution of 1 by 1. No dropout.

    Args:
        channels: Of the images.
        classes: Outputs.
        sizes: Channels of the first convolution and of the three stages.
        blocks: Blocks per stage.
    """

    def __init__(self, channels: int, classes: int, sizes: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        inner = sizes[0]
        self.conv1 = nn.Conv2d(channels, inner, 3, padding=1, bias=False)
        stages = []
        for number, outer in enumerate(sizes[1:]):
            first = WideBlock(inner, outer, stride=2 if number else 1)
            stages.append(
                nn.Sequential(first, *(WideBlock(outer, outer, 1) for _ in range(1, blocks)))
            )
            inner = outer
        self.stage1, self.stage2, self.stage3 = stages
        self.bn = nn.BatchNorm2d(inner)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        """One number per image and class."""
        x = self.stage3(self.stage2(self.stage1(self.conv1(x))))
        outputs: Tensor = self.fc(self.flatten(self.pool(self.relu(self.bn(x)))))
        return outputs


def _build_wrn16_4(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Depth 16, width factor 4."""
    channels, _, _ = _image_shape("wrn16-4", shape, 8)
    sizes = tuple(_hidden_size(size, width) for size in (16, 64, 128, 256))
    return WideResNet(channels, classes, sizes, blocks=2)


# -- by name ------------------------------------------------------------------------------------

_PERCEPTRONS = (
    ("mlp-5x512", "Five hidden layers of 512 units (MNIST-FC)", "Rangamani et al. 2019"),
    ("mlp-50-50-50-30", "Four hidden layers of 50, 50, 50 and 30", "Petzka et al. 2019, App. C"),
    ("mlp-3x512", "Three hidden layers, which the paper gives no size", "Tsuzuku et al. 2019"),
    ("f1", "Two hidden layers of 300 and 100 units", "Rangamani et al. 2019, Table 1"),
)

_CONVOLUTIONAL = (
    Architecture(
        "c1",
        "Convolutions of 10 and 20 channels, then 120 and 84 units",
        "Rangamani et al. 2019, Table 1",
        _build_c1,
    ),
    Architecture(
        "lenet5",
        "LeNet-5: convolutions of 6 and 16 channels, then 120 and 84 units",
        "Petzka et al. 2019; Rangamani et al. 2019; Tsuzuku et al. 2019",
        _build_lenet5,
    ),
    Architecture(
        "alexnet",
        "AlexNet for small images: two convolutions of 64 channels, then 384 and 192 units",
        "Rangamani et al. 2019",
        _build_alexnet,
    ),
    Architecture(
        "vgg16",
        "VGG16 for small images: thirteen convolutions of 64 to 512 channels, then 512 and 512 "
        "units",
        "Rangamani et al. 2019",
        _build_vgg16,
    ),
    Architecture(
        "plainnet18",
        "PlainNet-18: seventeen convolutions of 64 to 512 channels, no shortcuts, no batch-norm",
        "Yi et al. 2019",
        _build_plainnet18,
    ),
    Architecture(
        "wrn16-4",
        "Wide ResNet with 16 layers and width factor 4, batch-norm",
        "Tsuzuku et al. 2019",
        _build_wrn16_4,
    ),
)

_KNOWN = (*(_perceptron(*known) for known in _PERCEPTRONS), *_CONVOLUTIONAL)

NETWORKS: Mapping[str, Architecture] = MappingProxyType(
    {known.name: known for known in _KNOWN if known is not None}
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
        >>> find_architecture("mlp-5x512").paper, find_architecture("mlp-2x64-32").about
        ('Rangamani et al. 2019', 'Hidden layers of 64, 64 and 32 units')
    """
    found = NETWORKS.get(name) or _perceptron(name)
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


# -- initialisations ----------------------------------------------------------------------------

_Layer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def _with_zero_bias(draw: Callable[..., object]) -> Callable[..., None]:
    """Draw the weight, and set the bias to zero."""

    def scheme(weight: Tensor, bias: Tensor | None, generator: Generator) -> None:
        draw(weight, generator=generator)
        if bias is not None:
            nn.init.zeros_(bias)

    return scheme


def _like_weight(draw: Callable[[Tensor, Tensor, Generator], object]) -> Callable[..., None]:
    """Draw weight and bias alike; `draw` also sees the weight, for its number of inputs."""

    def scheme(weight: Tensor, bias: Tensor | None, generator: Generator) -> None:
        for tensor in (weight, bias):
            if tensor is not None:
                draw(tensor, weight, generator)

    return scheme


def _draw_default(tensor: Tensor, weight: Tensor, generator: Generator) -> None:
    """Uniform in ±1 / √(fan in), as torch draws a new layer."""
    bound = 1 / math.sqrt(math.prod(weight.shape[1:]))
    nn.init.uniform_(tensor, -bound, bound, generator=generator)


INITIALISATIONS: Mapping[str, Callable[[Tensor, Tensor | None, Generator], None]] = (
    MappingProxyType(
        {
            "default": _like_weight(_draw_default),
            "xavier_normal": _with_zero_bias(nn.init.xavier_normal_),
            "kaiming_uniform": _with_zero_bias(
                partial(nn.init.kaiming_uniform_, nonlinearity="relu")
            ),
            "uniform": _like_weight(lambda t, _, g: nn.init.uniform_(t, -0.1, 0.1, generator=g)),
            "normal": _like_weight(
                lambda t, _, g: nn.init.normal_(t, 0.0, math.sqrt(0.1), generator=g)
            ),
        }
    )
)
"""The schemes by name: each sets a layer's weight and bias in place, from a generator."""


@torch.no_grad()
def initialise(model: nn.Module, scheme: str, generator: Generator) -> None:
    """Draw new weights for a network, in place.

    The schemes are torch's `default` and the four of Petzka et al. 2019: `xavier_normal`,
    `kaiming_uniform` (both with biases zero), `uniform` in (−0.1, 0.1), and `normal` with mean 0
    and variance 0.1 (so the standard deviation is √0.1 ≈ 0.316; both draw biases like weights,
    which the paper leaves open). Norm layers go back to weight 1, bias 0 and fresh statistics.

    Args:
        model: The network, of linear, convolutional and norm layers.
        scheme: One of `INITIALISATIONS`.
        generator: Source of all randomness.

    Raises:
        ValueError: If there is no such scheme.
        TypeError: If the network has parameters in other kinds of layers.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> initialise(net, "uniform", torch.Generator().manual_seed(0))
        >>> bool(net.weight.abs().max() < 0.1), bool(net.bias.abs().max() < 0.1)
        (True, True)
    """
    if scheme not in INITIALISATIONS:
        known = ", ".join(f"`{one}`" for one in INITIALISATIONS)
        raise ValueError(f"`scheme={scheme!r}` is not known; needed is one of {known}.")
    layers: list[_Layer] = []
    for name, module in model.named_modules():
        if isinstance(module, _WEIGHTED):
            layers.append(module)
        elif (
            not isinstance(module, _NORMS)
            and next(module.parameters(recurse=False), None) is not None
        ):
            raise TypeError(
                f"`{name or 'model'}` is a {type(module).__name__} with parameters of its own, for "
                "which no initialisation is defined; needed are linear, convolutional and norm "
                "layers; initialise this network yourself."
            )
    for layer in layers:
        INITIALISATIONS[scheme](layer.weight, layer.bias, generator)
    for module in model.modules():
        if isinstance(module, _NORMS):
            module.reset_parameters()
