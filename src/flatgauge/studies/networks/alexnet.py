"""An AlexNet for small images.

Rangamani et al. say no more than "AlexNet-type". This is the small AlexNet of Zhang et al.
2017 (Understanding deep learning requires rethinking generalization, App. A), also close to
Keskar et al.'s C1, without the local response normalisation of the former and the batch-norm
and dropout of the latter. It has 1.76 million parameters on CIFAR-10.
"""

from __future__ import annotations

from torch import nn

from flatgauge.studies.networks.architecture import Architecture, chain, dense, image_shape, scaled


def _alexnet(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Two convolutions of 5 by 5 with 64 channels, pooled by 3 with stride 2; then 384, 192."""
    channels, height, across = image_shape("alexnet", shape, 8)
    size = scaled(64, width)
    left = [-(-side // 4) for side in (height, across)]  # Halved twice, each time rounded up.
    sizes = [size * left[0] * left[1], scaled(384, width), scaled(192, width), classes]
    return chain(
        [
            ("conv1", nn.Conv2d(channels, size, 5, padding=2)),
            ("relu1", nn.ReLU()),
            ("pool1", nn.MaxPool2d(3, 2, padding=1)),
            ("conv2", nn.Conv2d(size, size, 5, padding=2)),
            ("relu2", nn.ReLU()),
            ("pool2", nn.MaxPool2d(3, 2, padding=1)),
            ("flatten", nn.Flatten()),
            *dense(sizes),
        ]
    )


ALEXNET = Architecture(
    "alexnet",
    "AlexNet for small images: two convolutions of 64 channels, then 384 and 192 units",
    "Rangamani et al. 2019",
    _alexnet,
)
