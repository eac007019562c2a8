"""What ranks run in tests: every function is one program of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import flatgauge as fg


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)
    ).double()


def samples(count: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=generator)


def everything(processes: Any = "all") -> dict[str, Any]:
    surface = fg.LossSurface(network(), "cross_entropy", samples(), processes=processes)
    report = fg.measure(surface)
    return {
        "report": {
            name: (e.value, e.data_stderr, e.stderr, e.notes, e.matvecs, dict(e.layers))
            for name, e in report.items()
        }
    }
