"""Sums over many chunks lose no digits; half precision inside a model is left out or named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference import error
from torch import Generator, Tensor, nn

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.estimators.linalg import CHUNKS_PER_FLUSH, ChunkedSum

SAMPLES = 10_000


@pytest.fixture(scope="module")
def problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A small network in single precision, and many samples."""
    torch.manual_seed(0)
    source = Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=source)
    labels = torch.randint(3, (SAMPLES,), generator=source)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (inputs, labels)


def test_many_chunks_are_as_exact_as_one(problem):
    model, data = problem
    double = LossSurface(model, "cross_entropy", data, dtype=torch.float64)
    vector = torch.randn(double.size, generator=Generator().manual_seed(1), dtype=torch.float64)
    errors = {}
    for chunk in (SAMPLES, 16):
        surface = LossSurface(model, "cross_entropy", data, chunk=chunk)
        assert surface.gradient().dtype is surface.hvp(vector.float()).dtype is torch.float32
        errors[chunk] = [
            abs(surface.value() / double.value() - 1),
            error(surface.gradient().double(), double.gradient()),
            error(surface.hvp(vector.float()).double(), double.hvp(vector)),
        ]
    for many, one in zip(errors[16], errors[SAMPLES], strict=True):
        assert many <= 1.5 * one + 1e-8


def test_the_gradient_summed_in_single_precision_would_be_worse(problem, monkeypatch):
    """The test above has teeth: with narrow sums the same chunks lose digits."""
    model, data = problem
    exact = LossSurface(model, "cross_entropy", data, dtype=torch.float64).gradient()
    wide = LossSurface(model, "cross_entropy", data, chunk=16).gradient()
    monkeypatch.setattr("flatgauge.estimators.linalg.CHUNKS_PER_FLUSH", SAMPLES)
    narrow = LossSurface(model, "cross_entropy", data, chunk=16).gradient()
    assert error(narrow.double(), exact) > 2 * error(wide.double(), exact)


def test_a_sum_that_failed_begins_anew():
    sums = ChunkedSum(torch.zeros(2))
    for _ in range(2 * CHUNKS_PER_FLUSH + 1):
        sums.partial += 1
        sums.end_chunk()
    sums.clear()
    sums.partial += 1
    assert sums.total().tolist() == [1, 1]


def test_sums_of_many_chunks_are_double():
    sums = ChunkedSum(torch.zeros(1))
    for _ in range(2 * CHUNKS_PER_FLUSH + 1):
        sums.partial += 0.5
        sums.end_chunk()
    assert sums.total().tolist() == [CHUNKS_PER_FLUSH + 0.5]
    assert sums.total().dtype is torch.float64


class Mixed(nn.Module):
    """Computes in half precision by itself: by autocast, or by casts of its own."""

    def __init__(self, way: str = "autocast") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.way = nn.Linear(4, 5), nn.Linear(5, 3), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "cast":
            weight, bias = self.first.weight.bfloat16(), self.first.bias.bfloat16()
            return self.last(F.linear(x.bfloat16(), weight, bias).to(x).relu())
        with torch.autocast("cpu", torch.bfloat16, enabled=self.way == "autocast"):
            return self.last(self.first(x).relu())


X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
DATA = X, torch.arange(12) % 3
LAYERED = ["kappa_trace_sum", "rho_sum", "normalized_sharpness"]


def test_autocast_in_the_forward_is_left_out_by_double_precision():
    plain = LossSurface(Mixed("off"), "cross_entropy", DATA, dtype=torch.float64)
    surface = LossSurface(Mixed(), "cross_entropy", DATA)
    found = fg.measure(surface, measures=LAYERED)
    assert found.facts.dtype == "float64"
    assert any("computes in bfloat16 by itself" in note for note in found.facts.notes)
    for name, expected in fg.measure(plain, measures=LAYERED).items():
        assert found[name].exact
        assert found[name].value == pytest.approx(expected.value, rel=1e-12)
    assert {p.dtype for p in surface.model.parameters()} == {torch.float32}


def test_half_precision_that_is_asked_for_is_what_the_report_says():
    surface = LossSurface(Mixed(), "cross_entropy", DATA, dtype=torch.float32)
    expected = F.cross_entropy(Mixed()(X).float(), DATA[1]).item()
    assert surface.value() == pytest.approx(expected, rel=1e-2)
    found = fg.measure(surface, measures=["kappa_trace_sum"])  # The layers are found.
    assert found.facts.dtype == "bfloat16"
    assert any("numbers have few digits" in note for note in found.facts.notes)
    plain = LossSurface(Mixed("off"), "cross_entropy", DATA)
    expected = fg.measure(plain, measures=["kappa_trace_sum"])["kappa_trace_sum"].value
    estimate = found["kappa_trace_sum"]
    assert estimate.value == pytest.approx(expected, abs=0.05 * expected + 4 * estimate.stderr)


def test_half_precision_by_casts_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"computes in bfloat16 by casts .* Take the casts out"):
        LossSurface(Mixed("cast"), "cross_entropy", DATA)


def test_a_model_that_switches_autocast_off_is_measured_as_it_is():
    surface = LossSurface(Mixed("off"), "cross_entropy", DATA)
    assert (surface.dtype, surface.notes) == (torch.float32, [])
