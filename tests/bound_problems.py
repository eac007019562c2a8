"""Problems whose risk is known, for bounds on it."""

from __future__ import annotations

import torch
from torch import nn

import flatgauge as fg


class OneWeight(nn.Module):
    """Two classes, one weight: the first class where w x > 0."""

    def __init__(self, weight):
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(self.line.weight, weight)

    def forward(self, x):
        score = self.line(x)
        return torch.cat([score, torch.zeros_like(score)], 1)


def signs(samples, *, flipped=0.0, seed=0):
    """Inputs of both signs, labelled by their sign, some labels flipped."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    wrong = torch.rand(samples, generator=generator) < flipped
    return inputs, ((inputs[:, 0] < 0) ^ wrong).long()


def one_weight(weight, samples, **options):
    return fg.LossSurface(OneWeight(weight), "cross_entropy", signs(samples, **options))


def terms(frame, bound):
    return frame[frame.bound == bound].set_index("term")
