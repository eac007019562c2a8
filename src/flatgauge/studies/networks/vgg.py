"""A VGG16 for small images.

Simonyan and Zisserman's configuration D without dropout, with 512 instead of 4096 units, as
images of 32 by 32 have shrunk to one pixel by then. No batch-norm, as in Rangamani et al.
Poolings round up, so that images of 28 by 28 end as one pixel too.

As in every deep network without norm layers, little is left of an image under torch's default
weights: outputs differ by 1e-7 between images. Start from `kaiming_uniform`.
"""

from __future__ import annotations

from torch import nn

from flatgauge.studies.networks.architecture import (
    Architecture,
    Named,
    chain,
    dense,
    image_shape,
    scaled,
)

#: Channels, and how many convolutions of 3 by 3 have them before the image is halved.
_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def _vgg16(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Thirteen convolutions of 3 by 3 in five stages, then two hidden layers of 512 units."""
    inner, *sides = image_shape("vgg16", shape, 28)
    layers: list[Named] = []
    for stage, (size, count) in enumerate(_STAGES, start=1):
        outer = scaled(size, width)
        for number in range(1, count + 1):
            layers.append((f"conv{stage}_{number}", nn.Conv2d(inner, outer, 3, padding=1)))
            layers.append((f"relu{stage}_{number}", nn.ReLU()))
            inner = outer
        layers.append((f"pool{stage}", nn.MaxPool2d(2, ceil_mode=True)))
        sides = [-(-side // 2) for side in sides]
    hidden = scaled(512, width)
    sizes = [inner * sides[0] * sides[1], hidden, hidden, classes]
    return chain([*layers, ("flatten", nn.Flatten()), *dense(sizes)])


VGG16 = Architecture(
    "vgg16",
    "VGG16 for small images: thirteen convolutions of 64 to 512 channels, then 512 and 512 units",
    "Rangamani et al. 2019",
    _vgg16,
)
