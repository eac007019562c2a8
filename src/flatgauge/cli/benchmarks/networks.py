"""The networks that are timed: a perceptron, LeNet-5 and ResNet-20."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


def mlp(classes: int = 10, width: int = 512) -> nn.Module:
    """784-512-512-512-512-512-10 with ReLU, or other widths and classes."""
    widths = [784, *(5 * [width])]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def lenet() -> nn.Module:
    """LeNet-5 for 28×28 pixels, with ReLU and max-pooling."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch-norm around a shortcut without parameters.

    Attributes:
        stride: Of the first convolution.
        extra: How many more channels come out than go in.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.stride, self.extra = stride, after - before

    def forward(self, x: Tensor) -> Tensor:
        """The block's output; a wider one takes every other pixel and pads with zero channels."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.extra:
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, self.extra // 2, self.extra // 2))
        return F.relu(x + y)


def resnet20() -> nn.Module:
    """The CIFAR ResNet-20 of He et al. (2016), section 4.2, with option-A shortcuts."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(16), nn.ReLU()]
    before = 16
    for width in (16, 32, 64):
        for _ in range(3):
            layers.append(ResidualBlock(before, width, stride=width // before))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
