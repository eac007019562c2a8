"""The Wide ResNet with 16 layers and width factor 4."""

from __future__ import annotations

from torch import Tensor, nn

from flatgauge.studies.networks.architecture import Architecture, image_shape, scaled


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
        """The block's output.

        Args:
            x: Its input.

        Returns:
            What goes around it plus what goes through it.
        """
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
        """The network's outputs.

        Args:
            x: Images.

        Returns:
            One number per image and class.
        """
        x = self.stage3(self.stage2(self.stage1(self.conv1(x))))
        outputs: Tensor = self.fc(self.flatten(self.pool(self.relu(self.bn(x)))))
        return outputs


def _wrn16_4(shape: tuple[int, ...], classes: int, width: float) -> nn.Module:
    """Depth 16, width factor 4."""
    channels, _, _ = image_shape("wrn16-4", shape, 8)
    sizes = tuple(scaled(size, width) for size in (16, 64, 128, 256))
    return WideResNet(channels, classes, sizes, blocks=2)


WRN16_4 = Architecture(
    "wrn16-4",
    "Wide ResNet with 16 layers and width factor 4, batch-norm",
    "Tsuzuku et al. 2019",
    _wrn16_4,
)
