"""All measures of one small network, as trained and rescaled: the numbers on their pages."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import flatgauge as fg
from flatgauge.analysis.measurement import Report

#: What the numbers were taken of, for the page.
NETWORKS = (
    "a network 64-16-16-10 trained on 300 images of digits, and the same network with every hidden "
    "unit rescaled by a random power of two between 1/64 and 64"
)


@cache
def example_run() -> tuple[Report, Report]:
    """Train, measure, rescale, measure again."""
    images, labels = fg.load_dataset("digits", limit=300)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hidden = (nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(16, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    gauge = fg.find_gauge(model, images[:2])
    move = gauge.sample(generator=torch.Generator().manual_seed(0), log2_range=6)
    both = model, gauge.rescale(model, move)
    before, after = (fg.measure(fg.LossSurface(m, "cross_entropy", (images, labels))) for m in both)
    return before, after
