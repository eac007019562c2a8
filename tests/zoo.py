"""Networks trained by other people, rebuilt from the facts in ``shared/data/README.md``.

`ZOO` lists them by name; `trained(name)` gives the network with its weights, in eval mode, and
`images(name, limit)` what it was made for, normalised as it expects. Each builder returns
(model, mean, std) with fresh weights, and so needs no files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatgauge.loading.datasets import Samples, load_dataset, normalise
from flatgauge.loading.models import load_weights

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
CHECKPOINTS = DATA / "checkpoints"

Numbers = tuple[float, ...] | None
Network = tuple[nn.Module, Numbers, Numbers]

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_MEAN = (0.4914, 0.4822, 0.4465)


class OptionA(nn.Module):
    """A shortcut without weights: every second pixel, new channels of zeros on both sides."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra // 2, self.extra // 2))


class NormBlock(nn.Module):
    """Two 3×3 convolutions with batch-norm and a shortcut (He et al. 2015, §4.2)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.shortcut = nn.Identity() if inner == outer else OptionA(outer - inner)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class CifarResNet(nn.Module):
    """The ResNet of depth 6n + 2 for CIFAR-10, widths 16, 32, 64."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        count = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, count)
        self.layer2 = self._stage(16, 32, count)
        self.layer3 = self._stage(32, 64, count)
        self.linear = nn.Linear(64, 10)

    @staticmethod
    def _stage(inner: int, outer: int, count: int) -> nn.Sequential:
        first = NormBlock(inner, outer, 1 if inner == outer else 2)
        return nn.Sequential(first, *(NormBlock(outer, outer, 1) for _ in range(count - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean(dim=(2, 3)))


class BiasBlock(nn.Module):
    """Two biased 3×3 convolutions without batch-norm; a 1×1 convolution where sizes change."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut.append(nn.Conv2d(inner, outer, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class BiasResNet(nn.Module):
    """A residual net without batch-norm: every stage halves the image and has two blocks."""

    def __init__(self, width: int, stages: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 2, 1)
        self.stages = stages
        inner, side = width, 16
        for number in range(1, stages + 1):
            blocks = BiasBlock(inner, 2 * width, 2), BiasBlock(2 * width, 2 * width, 1)
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
            inner, side = 2 * width, side // 2
        self.linear1 = nn.Linear(inner * side * side, 100)
        self.linear2 = nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        for number in range(1, self.stages + 1):
            x = getattr(self, f"layer{number}")(x)
        return self.linear2(F.relu(self.linear1(x.flatten(1))))


class LeNet(nn.Module):
    """Two convolutions with pooling, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.linear1 = nn.Linear(3136, 200)
        self.linear2 = nn.Linear(200, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.linear2(F.relu(self.linear1(x.flatten(1))))


def plain(
    channels: tuple[int, ...],
    widths: tuple[int, ...],
    padding: int = 0,
    activation: type[nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Convolutions of kernel 4 and stride 2, then linear layers, with activations between."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(channels):
        layers += [nn.Conv2d(inner, outer, 4, 2, padding), activation()]
    layers.append(nn.Flatten())
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), activation()]
    return nn.Sequential(*layers[:-1])


def resnet(depth: int) -> Network:
    return CifarResNet(depth), *IMAGENET


def lenet() -> Network:
    return LeNet(), None, None


def marabou(width: int) -> Network:
    return plain((3, width, 2 * width), (72 * width, 128, 64, 10)), None, None


def eran_mlp(layers: int, width: int) -> Network:
    return plain((), (784, *[width] * (layers - 1), 10)), None, None


def eran_conv_small() -> Network:
    return plain((1, 16, 32), (800, 100, 10)), None, None


def cnn_a() -> Network:
    mean, std = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
    network = plain((3, 16, 32), (2048, 100, 10), padding=1)
    return network, tuple(m / 255 for m in mean), tuple(s / 255 for s in std)


def resnet2b() -> Network:
    return BiasResNet(8, stages=1), CIFAR_MEAN, (0.2471, 0.2435, 0.2616)


def resnet4b() -> Network:
    return BiasResNet(16, stages=2), CIFAR_MEAN, (0.2471, 0.2435, 0.2616)


def sigmoid_conv() -> Network:
    network = plain((3, 16, 32), (1152, 100, 10), activation=nn.Sigmoid)
    return network, CIFAR_MEAN, (0.2023, 0.1994, 0.2010)


@dataclass(frozen=True)
class Entry:
    """One checkpoint: its file, data, builder, and accuracy in percent on all test images."""

    file: str
    data: str
    build: Callable[[], Network]
    accuracy: float


ZOO = {
    "lenet": Entry("lenet_mnist/mnist_lenet5_clntrained.pt", "mnist", lenet, 98.89),
    "lenet_adv": Entry("lenet_mnist/mnist_lenet5_advtrained.pt", "mnist", lenet, 98.64),
    "resnet2b": Entry("verification/cifar10_resnet_resnet2b.pth", "cifar10", resnet2b, 69.25),
    "resnet4b": Entry("verification/cifar10_resnet_resnet4b.pth", "cifar10", resnet4b, 77.20),
    "sigmoid_conv": Entry(
        "verification/non_relu_cifar_conv_small_sigmoid.pth", "cifar10", sigmoid_conv, 63.17
    ),
    "eran_conv_small": Entry(  # not in the README's table: measured here
        "verification/eran_mnist_conv_small_nat.pth", "mnist", eran_conv_small, 98.04
    ),
}
ZOO |= {
    f"resnet{depth}": Entry(
        f"resnet_cifar10/resnet{depth}-{mark}.th", "cifar10", partial(resnet, depth), percent
    )
    for depth, mark, percent in (
        (20, "12fca82f", 91.73),
        (32, "d509ac18", 92.63),
        (44, "014dd654", 93.10),
        (56, "4bfd9763", 93.39),
    )
}
ZOO |= {
    f"marabou_{size}": Entry(
        f"verification/marabou_cifar10_cifar_marabou_{size}.pth",
        "cifar10",
        partial(marabou, width),
        percent,
    )
    for size, width, percent in (
        ("small", 8, 63.14),
        ("medium", 16, 70.21),
        ("large", 32, 74.16),
    )
}
ZOO |= {
    f"eran_{layers}_{width}": Entry(
        f"verification/eran_mnist_{layers}_{width}_nat.pth",
        "mnist",
        partial(eran_mlp, layers, width),
        percent,
    )
    for (layers, width), percent in zip(
        ((6, 100), (6, 200), (9, 100), (9, 200)), (96.29, 96.59, 95.08, 94.95), strict=True
    )
}
ZOO |= {
    f"cnn_a_{training}": Entry(
        f"verification/sdp_cifar_cnn_a_{training}.model", "cifar10", cnn_a, percent
    )
    for training, percent in (
        ("adv", 65.65),
        ("adv4", 56.52),
        ("adv_alt", 68.73),
        ("mix", 74.18),
        ("mix4", 67.79),
    )
}


def need_data(*parts: str) -> Path:
    """The path of shared data, or skip the test where there is none."""
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {path}, which a user's machine does not have")
    return path


def trained(name: str) -> nn.Module:
    """The network with its trained weights, in eval mode."""
    model, _, _ = ZOO[name].build()
    load_weights(model, need_data("checkpoints", ZOO[name].file))
    return model.eval()


def images(name: str, limit: int | None = None, *, split: str = "test") -> Samples:
    """Images for a network, normalised as it expects."""
    _, mean, std = ZOO[name].build()
    inputs, targets = raw_images(ZOO[name].data, limit, split)
    return Samples(normalise(inputs.clone(), mean, std), targets, name=name, split=split)


@lru_cache(maxsize=4)
def raw_images(data: str, limit: int | None, split: str) -> Samples:
    """Images with values in [0, 1], read once and shared: not to be changed in place."""
    return load_dataset(f"{data}:{need_data()}", split=split, limit=limit)


@torch.no_grad()
def accuracy(model: nn.Module, samples: Samples) -> float:
    """The share of images a model gets right, in percent."""
    right = 0
    for inputs, targets in zip(*(part.split(250) for part in samples), strict=True):
        right += int((model(inputs).argmax(dim=1) == targets).sum())
    return 100.0 * right / len(samples.targets)
