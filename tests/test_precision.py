"""Sums over many chunks lose no digits: their error does not grow with the number of chunks."""

from __future__ import annotations

import pytest
import torch
from reference import error
from torch import Generator, nn

from flatgauge import LossSurface
from flatgauge.precision import EVERY, Sums

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
    monkeypatch.setattr("flatgauge.precision.EVERY", SAMPLES)
    narrow = LossSurface(model, "cross_entropy", data, chunk=16).gradient()
    assert error(narrow.double(), exact) > 2 * error(wide.double(), exact)


def test_a_sum_that_failed_begins_anew():
    sums = Sums(torch.zeros(2))
    for _ in range(2 * EVERY + 1):
        sums.near += 1
        sums.settle()
    sums.clear()
    sums.near += 1
    assert sums.total().tolist() == [1, 1]


def test_sums_of_many_chunks_are_double():
    sums = Sums(torch.zeros(1))
    for _ in range(2 * EVERY + 1):
        sums.near += 0.5
        sums.settle()
    assert sums.total().tolist() == [EVERY + 0.5]
    assert sums.total().dtype is torch.float64
