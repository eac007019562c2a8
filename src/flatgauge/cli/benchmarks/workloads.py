"""The networks and data that are timed: an MLP, LeNet-5 and ResNet-20, each briefly trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from flatgauge.cli.benchmarks.networks import lenet, mlp, resnet20
from flatgauge.loading.datasets import load_dataset

#: Samples come in multiples of this, so that every batch size has a divisor near it.
_GRAIN = 20

#: How far apart the classes of synthetic images are: near enough to be confused at times.
_CONTRAST = 0.12


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
    """Build a workload: the same at every call.

    Args:
        name: Its key in `KINDS`.
        scale: What share of the samples to take.
        folder: Where MNIST and CIFAR-10 lie; without one the images are synthetic.

    Returns:
        The workload.
    """
    return built(KINDS[name], name, scale=scale, folder=folder)


def built(kind: Kind, name: str, *, scale: float = 1.0, folder: str | None = None) -> Workload:
    """Build a workload of any kind: the same at every call.

    Args:
        kind: What it is.
        name: What to call it.
        scale: What share of the samples to take.
        folder: Where MNIST and CIFAR-10 lie; without one the images are synthetic.

    Returns:
        The workload.
    """
    samples = max(round(kind.samples * scale / _GRAIN), 1) * _GRAIN
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
    return tuple(sorted({_divisor(samples, size) for size in wanted}))


def _divisor(samples: int, size: int) -> int:
    """The largest batch size up to `size` that leaves no smaller last batch."""
    return next(d for d in range(min(size, samples), 0, -1) if samples % d == 0)


def _synthetic(shape: tuple[int, int, int], samples: int, classes: int) -> tuple[Tensor, Tensor]:
    """Images: a smooth pattern of the class under unit noise."""
    generator = Generator().manual_seed(0)
    patterns = torch.randn(classes, shape[0], 7, 7, generator=generator)
    means = F.interpolate(patterns, size=shape[1:], mode="bilinear", align_corners=True)
    targets = torch.randint(classes, (samples,), generator=generator)
    noise = torch.randn(samples, *shape, generator=generator)
    return noise + _CONTRAST * means[targets], targets


def _train(model: nn.Module, inputs: Tensor, targets: Tensor, *, epochs: int) -> None:
    """A few epochs of Adam: away from initialisation, not yet at a minimum."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for index in torch.split(torch.randperm(len(inputs)), 100):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[index]), targets[index]).backward()
            optimizer.step()


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
