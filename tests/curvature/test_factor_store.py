"""Factors that one sweep leaves for the eigenvalues of blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Generator, nn

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.curvature.sweep.backprop import Sweep


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
    sweeps: list[tuple[frozenset[str], bool]] = []
    plain = Sweep.chunks

    def counted(self, names, wanted, **options):
        sweeps.append((wanted, options.get("record", False)))
        return plain(self, names, wanted, **options)

    monkeypatch.setattr(Sweep, "chunks", counted)
    names = ["kappa_trace_sum", "kappa_max", "kappa_sum"]
    together = LossSurface(model, "cross_entropy", (inputs, labels))
    report = fg.measure(together, measures=names)
    assert sweeps == [(frozenset({"trace"}), True)]
    assert list(report) == names
    for name in names:  # And nothing depends on it.
        apart = LossSurface(model, "cross_entropy", (inputs, labels))
        assert fg.measure(apart, measures=[name])[name].value == report[name].value
    sweeps.clear()
    chosen = fg.measure(together, measures={"kappa_sum": {"layers": "0.*"}, "rho_max": {}})
    assert list(chosen["kappa_sum"].layers) == ["0.weight"]
    assert (frozenset(), True) in sweeps  # Other layers than all: their own sweep.


def test_a_sweep_that_fails_leaves_no_factors(monkeypatch):
    model, inputs, labels = net_and_data()
    expected = fg.measure(
        LossSurface(model, "cross_entropy", (inputs, labels)), measures=["rho_sum", "kappa_max"]
    )
    surface = LossSurface(model, "cross_entropy", (inputs, labels), chunk=10)
    plain = Sweep.chunks

    def failing(self, names, wanted, **options):
        for number, chunk in enumerate(plain(self, names, wanted, **options)):
            if wanted and number:
                raise MemoryError("no room for the second chunk")
            yield chunk

    monkeypatch.setattr(Sweep, "chunks", failing)
    with pytest.raises(MemoryError, match="the second chunk"):
        fg.measure(surface, measures=["rho_sum", "kappa_max"])
    monkeypatch.undo()
    found = fg.measure(surface, measures=["kappa_max"])["kappa_max"].value
    assert found == pytest.approx(expected["kappa_max"].value, rel=1e-3)


def test_a_loss_of_64_outputs_shares_no_sampled_factors():
    generator = Generator().manual_seed(0)
    inputs = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    targets = torch.randn(20, 64, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 64)).double()
    alone, together = (
        fg.measure(LossSurface(model, "mse", (inputs, targets)), measures=names)["kappa_max"]
        for names in (["kappa_max"], ["kappa_max", "rho_sum"])
    )
    assert together.value == alone.value
