"""All measures of one small network, as trained and rescaled: the numbers on their pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

import flatgauge as fg

#: What the numbers were taken of, for the page.
TOLD = (
    "a network 64-16-16-10 trained on 300 images of digits, and the same network with every hidden "
    "unit rescaled by a random power of two between 1/64 and 64"
)


@dataclass(frozen=True)
class Pair:
    """The same network, measured in two ways of writing it.

    Attributes:
        before: As trained.
        after: Rescaled.
    """

    before: fg.Report
    after: fg.Report


@cache
def example_run() -> Pair:
    """Train, measure, rescale, measure again."""
    images, labels = fg.load_dataset("digits", limit=300)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()),
            *(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    gauge = fg.find_gauge(model, images[:2])
    move = gauge.sample(generator=torch.Generator().manual_seed(0), log2_range=6)
    twin = gauge.rescale(model, move)
    surfaces = (fg.LossSurface(net, "cross_entropy", (images, labels)) for net in (model, twin))
    return Pair(*(fg.measure(surface) for surface in surfaces))
