"""LeNet-5, and the small convolutional network of Rangamani et al.'s simulations.

LeCun et al.'s images for LeNet-5 were 32 by 32, and so smaller ones down to 28 are padded by two
pixels on each side: the first linear layer has 400 inputs for MNIST and CIFAR-10 alike. Still
smaller images, such as the digits, would vanish: both convolutions keep their size, and only the
first is pooled.
"""

from __future__ import annotations

from torch import nn

from flatgauge.studies.networks.architecture import Architecture, chain, dense, image_shape, scaled


def _lenet5(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Two convolutions of 5 by 5 with ReLU and max-pooling, then 120, 84 and the classes."""
    channels, height, across = image_shape("lenet5", shape, 8)
    small = min(height, across) < 28
    first = 0 if min(height, across) >= 32 else 2
    second = 2 if small else 0
    one, two = scaled(6, width), scaled(16, width)
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(channels, one, 5, padding=first)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(one, two, 5, padding=second)),
        ("relu2", nn.ReLU()),
    ]
    if not small:
        layers.append(("pool2", nn.MaxPool2d(2)))
    sides = [_after(side, first, second, small) for side in (height, across)]
    sizes = [two * sides[0] * sides[1], scaled(120, width), scaled(84, width), classes]
    return chain([*layers, ("flatten", nn.Flatten()), *dense(sizes)])


def _c1(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Two convolutions of 5 by 5 without padding, each with max-pooling and then ReLU."""
    channels, height, across = image_shape("c1", shape, 16)
    one, two = scaled(10, width), scaled(20, width)
    sides = [_after(side, 0, 0, small=False) for side in (height, across)]
    sizes = [two * sides[0] * sides[1], scaled(120, width), scaled(84, width), classes]
    return chain(
        [
            ("conv1", nn.Conv2d(channels, one, 5)),
            ("pool1", nn.MaxPool2d(2)),
            ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(one, two, 5)),
            ("pool2", nn.MaxPool2d(2)),
            ("relu2", nn.ReLU()),
            ("flatten", nn.Flatten()),
            *dense(sizes),
        ]
    )


def _after(side: int, first: int, second: int, small: bool) -> int:
    """What is left of a side after the convolutions; a small image is pooled once only."""
    side = (side - 4 + 2 * first) // 2 - 4 + 2 * second
    return side if small else side // 2


LENET5 = Architecture(
    "lenet5",
    "LeNet-5: convolutions of 6 and 16 channels, then 120 and 84 units",
    "Petzka et al. 2019; Rangamani et al. 2019; Tsuzuku et al. 2019",
    _lenet5,
)

C1 = Architecture(
    "c1",
    "Convolutions of 10 and 20 channels, then 120 and 84 units",
    "Rangamani et al. 2019, Table 1",
    _c1,
)
