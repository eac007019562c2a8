"""Two networks that differ in their batch size, seen along lines and in path space.

The lines stand beside Figure 2 of Rangamani et al. (2019), the planes (of the first network) beside
Figure 3 of Yi et al. (2019), at a size that two processor cores train in minutes: a fully connected
network on MNIST and a convolutional one on CIFAR-10, each on its first images, trained with one
step size until the training loss is small.

    python docs/figures/batch_size.py DIRECTORY_OF_DATA [DIRECTORY_FOR_PICTURES]

The first directory holds `mnist/` and `cifar-10-batches-bin/` as they are published.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Generator, Tensor, nn

import flatgauge as fg


@dataclass(frozen=True)
class Setting:
    """A network, its data, and how it is trained.

    Attributes:
        title: What it is called in pictures.
        data: The name of the data set, with a place for the directory.
        images: How many of its images are used.
        build: Makes the network.
        batches: The small and the large batch.
        rate: The step size.
        goal: Training stops when the mean loss of an epoch is so small.
    """

    title: str
    data: str
    images: int
    build: type[nn.Module]
    batches: tuple[int, int]
    rate: float
    goal: float


class Connected(nn.Sequential):
    """784-256-256-10."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(),
            *(nn.Linear(784, 256), nn.ReLU()),
            *(nn.Linear(256, 256), nn.ReLU()),
            nn.Linear(256, 10),
        )


class Convolutional(nn.Sequential):
    """Three convolutions with pooling, two layers on top: a small AlexNet."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
        )


SETTINGS = (
    Setting("MNIST, 784-256-256-10", "mnist:{}/mnist", 5000, Connected, (16, 500), 0.1, 0.01),
    Setting(
        "CIFAR-10, small AlexNet",
        "cifar10:{}/cifar-10-batches-bin",
        2000,
        Convolutional,
        (32, 250),
        0.05,
        0.1,
    ),
)


def main() -> None:
    """Train, draw, and write the pictures."""
    root = Path(sys.argv[1])
    place = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent
    pairs = {setting: networks(setting, root) for setting in SETTINGS}
    lines(pairs).savefig(place / "batch_size_lines.png", dpi=110)
    planes = fg.landscape(pairs[SETTINGS[0]], space="basis_paths", dims=2, points=25)
    planes.to_png(place / "batch_size_path_space.png", kind="surface", dpi=110)
    planes.to_png(place / "batch_size_path_space_contours.png", kind="contour", dpi=110)


def networks(setting: Setting, root: Path) -> dict[str, fg.LossSurface]:
    """The surfaces of the two networks, named by batch size and test accuracy as in the papers."""
    name = setting.data.format(root)
    images, labels = fg.load_dataset(name, limit=setting.images)
    test_images, test_labels = fg.load_dataset(name, split="test", limit=5000)
    centre, spread = images.mean(), images.std()
    images, test_images = (images - centre) / spread, (test_images - centre) / spread
    found = {}
    for batch in setting.batches:
        model = train(setting, images, labels, batch)
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean().item()
        surface = fg.LossSurface(model, "cross_entropy", (images[:2000], labels[:2000]))
        print(f"{setting.title}, batch {batch}: loss {surface.value():.4f}, test {right:.2%}")
        print(fg.measure(surface, measures=["hessian_trace", "rho_sum", "psi_trace"]))
        found[f"{batch}; {right:.1%}"] = surface
    return found


def train(setting: Setting, images: Tensor, labels: Tensor, batch: int) -> nn.Module:
    """Train by plain gradient steps until the loss is small."""
    torch.manual_seed(0)
    model, generator = setting.build(), Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.rate)
    mean = float("inf")
    while mean > setting.goal:
        losses = []
        for chosen in torch.randperm(len(images), generator=generator).split(batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        mean = sum(losses) / len(losses)
    return model.eval()


def lines(pairs: dict[Setting, dict[str, fg.LossSurface]]) -> Figure:
    """The loss along random directions in units of every layer's size."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for ax, (setting, pair) in zip(figure.subplots(1, 2), pairs.items(), strict=True):
        fg.landscape(pair, space="layers", dims=1, points=41, extent=0.5).plot(ax)
        ax.set_title(setting.title)
    return figure


if __name__ == "__main__":
    main()
