"""A model that makes a constant of the number of samples is not swept, and is measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatgauge as fg
from flatgauge.curvature.sweep.backprop import sweep_of


class Counting(nn.Module):
    """Asks for the number of samples with `len`, which is a number even to the exporter."""

    def __init__(self, classes):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3), nn.Linear(16, classes)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)).reshape(len(x), -1))


@pytest.mark.parametrize("classes", [3, 5])  # Three is also the number of exported samples.
def test_a_model_that_counts_its_samples_is_measured(classes):
    torch.manual_seed(0)
    data = torch.randn(10, 2, 4, 4), torch.arange(10) % classes
    surface = fg.LossSurface(Counting(classes), "cross_entropy", data)
    plan = sweep_of(surface).plan
    assert not plan.exact
    assert {*plan.reasons.values()} == {"the model treats the number of samples as a constant"}
    found = fg.measure(surface, measures=["hessian_trace", "rho_max"])
    exact = float(surface.hvp(torch.eye(surface.size)).trace())
    trace = found["hessian_trace"]
    assert abs(trace.value - exact) < 5 * trace.stderr + 1e-4 * exact
    assert found["rho_max"].value > 0
