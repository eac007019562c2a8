"""Three networks of one shape that fit their labels equally well, and generalize differently."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

#: Units of each of the two hidden layers.
WIDTH = 64

#: Training stops at the end of the epoch that reaches this loss on all training data.
GOAL = 0.02

#: The step is the same for all, so that only batches and labels differ.
RATE = 0.1

#: Epochs after which it is given up.
_MOST_EPOCHS = 4000


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Attributes:
        name: What it is called.
        batch: Samples per step; None for all of them.
        random: The share of labels that are drawn at random.
    """

    name: str
    batch: int | None
    random: float = 0.0


RECIPES = (
    Recipe("small batch", 8),
    Recipe("large batch", None),
    Recipe("10% random labels", 16, random=0.1),
)


@dataclass(frozen=True)
class Trained:
    """A trained network.

    Attributes:
        model: The network.
        labels: The labels that it was trained on.
        loss: The loss it reached on them.
        epochs: How many passes over the data that took.
    """

    model: nn.Sequential
    labels: Tensor
    loss: float
    epochs: int


def train(recipe: Recipe, images: Tensor, labels: Tensor, *, seed: int) -> Trained:
    """Train a network by plain gradient steps until its loss is small.

    Args:
        recipe: How.
        images: Of shape (N, 1, 8, 8).
        labels: Of shape (N,).
        seed: Of initial weights, random labels and the order of samples.

    Returns:
        The network.

    Raises:
        RuntimeError: If the loss does not become small.
    """
    generator = Generator().manual_seed(seed)
    labels = _partly_random(labels, recipe.random, generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for epoch in range(1, _MOST_EPOCHS + 1):
        order = torch.randperm(len(images), generator=generator)
        for chosen in order.split(recipe.batch or len(images)):
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(images), labels).item()
        if loss <= GOAL:
            optimizer.zero_grad()
            return Trained(model, labels, loss, epoch)
    raise RuntimeError(
        f"the network `{recipe.name}` did not reach a loss of {GOAL} in {_MOST_EPOCHS} epochs with "
        f"seed {seed}; try another one."
    )


def _network() -> nn.Sequential:
    """A network for images of 8 by 8 pixels."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )


def _partly_random(labels: Tensor, share: float, generator: Generator) -> Tensor:
    """Labels of which some are replaced by random ones."""
    count = round(share * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    mixed = labels.clone()
    mixed[chosen] = torch.randint(10, (count,), generator=generator)
    return mixed
