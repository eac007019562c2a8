"""The networks and data that are timed: an MLP, LeNet-5 and ResNet-20, each briefly trained.

`load` builds a workload by name, the same at every call. Images are those of MNIST and CIFAR-10 if
a folder holds them, else synthetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from flatgauge.loading.datasets import load_dataset


@dataclass(frozen=True)
class Kind:
    """A workload before it is built.

    Attributes:
        about: What it is, in a few words.
        build: Makes the untrained network.
        data: Name of the real data set; None if there is none, and images are always synthetic.
        shape: Of one image.
        samples: At full scale.
        batches: Batch sizes that suit it; which of them suits a tool best is tried out.
        epochs: Of training.
        classes: How many.
    """

    about: str
    build: Callable[[], nn.Module]
    data: str | None
    shape: tuple[int, int, int]
    samples: int
    batches: tuple[int, ...]
    epochs: int
    classes: int = 10


@dataclass(frozen=True)
class Workload:
    """A trained network, in eval mode, and the samples it is measured on.

    Attributes:
        name: Its key in `KINDS`.
        about: What it is, in a few words.
        model: The network.
        inputs: The images (N, C, H, W).
        targets: Their classes (N,).
        sizes: Batch sizes to choose from; all divide N, because one peer takes the mean of
            its batches' means.
        scale: What share of the samples of full size it has.
    """

    name: str
    about: str
    model: nn.Module
    inputs: Tensor
    targets: Tensor
    sizes: tuple[int, ...]
    scale: float = 1.0

    def batches(self, size: int, samples: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """The first samples (or all) in batches."""
        inputs, targets = self.inputs[:samples], self.targets[:samples]
        return list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, all of them."""
        return list(self.model.parameters())


def load(name: str, *, scale: float = 1.0, folder: str | None = None) -> Workload:
    """The workload of this name in `KINDS`, the same at every call; see `build_workload`."""
    return build_workload(KINDS[name], name, scale=scale, folder=folder)


def build_workload(
    kind: Kind, name: str, *, scale: float = 1.0, folder: str | None = None
) -> Workload:
    """Build a workload with a share of its samples; without a folder its images are synthetic."""
    # A multiple of 20: every batch size has a divisor near it.
    samples = max(round(kind.samples * scale / 20), 1) * 20
    if folder is None or kind.data is None:
        inputs, targets = _synthetic(kind.shape, samples, kind.classes)
    else:
        spec = f"{kind.data}:{folder}"
        inputs, targets = load_dataset(spec, limit=samples, mean=0.5, std=0.25)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.build()
        _train(model, inputs, targets, epochs=kind.epochs)
    sizes = batch_sizes(samples, kind.batches)
    return Workload(name, kind.about, model.eval(), inputs, targets, sizes, scale)


def batch_sizes(samples: int, wanted: Iterable[int]) -> tuple[int, ...]:
    """Batch sizes near those that are wanted, all of which divide the number of samples."""
    divisors = [size for size in range(1, samples + 1) if samples % size == 0]
    return tuple(sorted({max(d for d in divisors if d <= size) for size in wanted}))


def _synthetic(shape: tuple[int, int, int], samples: int, classes: int) -> tuple[Tensor, Tensor]:
    """Images: a smooth pattern of the class under unit noise."""
    generator = Generator().manual_seed(0)
    patterns = torch.randn(classes, shape[0], 7, 7, generator=generator)
    means = F.interpolate(patterns, size=shape[1:], mode="bilinear", align_corners=True)
    targets = torch.randint(classes, (samples,), generator=generator)
    noise = torch.randn(samples, *shape, generator=generator)
    return noise + 0.12 * means[targets], targets  # Near enough to be confused at times.


def _train(model: nn.Module, inputs: Tensor, targets: Tensor, *, epochs: int) -> None:
    """A few epochs of Adam: away from initialisation, not yet at a minimum."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for index in torch.split(torch.randperm(len(inputs)), 100):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[index]), targets[index]).backward()
            optimizer.step()


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
    """Two 3×3 convolutions with batch-norm around a shortcut without parameters."""

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


#: Those that nearly everything is timed on.
STANDARD = ("W1", "W2", "W3")

#: The one with a thousand classes.
MANY_CLASSES = "W1K"

KINDS = {
    "W1": Kind("MLP 784-512⁵-10", mlp, "mnist", (1, 28, 28), 10_000, (500, 1000, 2500), 2),
    "W2": Kind("LeNet-5", lenet, "mnist", (1, 28, 28), 10_000, (100, 250, 1000), 2),
    "W3": Kind("ResNet-20", resnet20, "cifar10", (3, 32, 32), 1_000, (20, 50, 100), 4),
    MANY_CLASSES: Kind(
        *("MLP 784-512⁵-1000", partial(mlp, 1000), None, (1, 28, 28), 500, (100, 250, 500), 8),
        classes=1000,
    ),
}
