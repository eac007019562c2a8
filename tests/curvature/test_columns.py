"""Columns that one sweep leaves for the eigenvalues of blocks."""

from __future__ import annotations

import torch
from torch import Generator, nn

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.curvature.sweep import Sweeper


def net_and_data() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = Generator().manual_seed(1)
    inputs = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (50,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return model.double(), inputs, labels


def test_one_sweep_serves_measures_and_eigenvalues(monkeypatch):
    model, inputs, labels = net_and_data()
    passes: list[frozenset[str]] = []
    plain = Sweeper.passes

    def counted(self, names, wanted, **options):
        passes.append(wanted)
        return plain(self, names, wanted, **options)

    monkeypatch.setattr(Sweeper, "passes", counted)
    names = ["kappa_trace_sum", "kappa_max", "kappa_sum"]
    together = LossSurface(model, "cross_entropy", (inputs, labels))
    report = fg.measure(together, measures=names)
    assert passes == [frozenset({"trace", "columns"})]
    assert list(report) == names
    for name in names:  # And nothing depends on it.
        apart = LossSurface(model, "cross_entropy", (inputs, labels))
        assert fg.measure(apart, measures=[name])[name].value == report[name].value
    passes.clear()
    chosen = fg.measure(together, measures={"kappa_sum": {"layers": "0.*"}, "rho_max": {}})
    assert list(chosen["kappa_sum"].layers) == ["0.weight"]
    assert {"columns"} in passes  # Other layers than all: their own sweep.
