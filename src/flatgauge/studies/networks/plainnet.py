"""The plain network of 18 layers: a ResNet-18 without shortcuts.

He et al.'s 18-layer plain network, with its first convolution made for small images (3 by 3,
stride 1, no pooling), as is usual for CIFAR-10. No batch-norm and no shortcuts, as Yi et
al.'s basis paths are those of a network without either. Torch's default weights shrink a
signal by more than half in every layer, so that nothing is left of it after 17; start this
network from `initialise(model, "kaiming_uniform", generator)`.
"""

from __future__ import annotations

from torch import nn

from flatgauge.studies.networks.architecture import Architecture, Named, chain, image_shape, scaled


def _plainnet18(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Seventeen convolutions of 3 by 3 and a linear layer, with nothing around them."""
    inner, _, _ = image_shape("plainnet18", shape, 8)
    layers: list[Named] = []
    first = scaled(64, width)
    layers += [("conv1", nn.Conv2d(inner, first, 3, padding=1)), ("relu1", nn.ReLU())]
    inner = first
    for stage, size in enumerate((64, 128, 256, 512), start=2):
        outer = scaled(size, width)
        for number in range(1, 5):
            stride = 2 if stage > 2 and number == 1 else 1
            convolution = nn.Conv2d(inner, outer, 3, stride, padding=1)
            layers += [(f"conv{stage}_{number}", convolution), (f"relu{stage}_{number}", nn.ReLU())]
            inner = outer
    ending: list[Named] = [
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("fc", nn.Linear(inner, classes)),
    ]
    return chain([*layers, *ending])


PLAINNET18 = Architecture(
    "plainnet18",
    "PlainNet-18: seventeen convolutions of 64 to 512 channels, no shortcuts, no batch-norm",
    "Yi et al. 2019",
    _plainnet18,
)
