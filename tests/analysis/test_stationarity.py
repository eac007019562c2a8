"""Whether a point is a minimum: marked where a small change of the weights lowers the loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatgauge as fg
from flatgauge.analysis.measurement import descent_note


@pytest.fixture(scope="module")
def digits():
    return fg.load_dataset("digits", limit=200)


def train(digits, steps: int) -> nn.Module:
    images, labels = digits
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def test_untrained_and_half_trained_networks_are_marked(digits):
    for steps in (0, 20):
        note = descent_note(fg.LossSurface(train(digits, steps), "cross_entropy", digits))
        assert note is not None
        assert note.startswith("not at a minimum: changing every weight by ")
        assert "train longer" in note


def test_a_network_that_fits_its_data_is_not(digits):
    surface = fg.LossSurface(train(digits, 2000), "cross_entropy", digits)
    loss, gradient = surface.value_and_gradient()
    assert 0 < loss < 0.01
    assert gradient.norm() > 0  # Cross-entropy has no minimum here.
    assert descent_note(surface) is None


def test_the_note_names_a_fall_that_can_be_repeated_by_hand(digits):
    surface = fg.LossSurface(train(digits, 20), "cross_entropy", digits)
    note = descent_note(surface)
    words = note.split()
    fraction = float(words[words.index("by") + 1])
    before, after = float(words[words.index("from") + 1]), float(words[words.index("to") + 1])
    point, gradient = surface.point, surface.gradient()
    moved = point - fraction * point.abs() * gradient.sign()
    assert surface.value() == pytest.approx(before, rel=1e-2)
    assert surface.value(moved) == pytest.approx(after, rel=1e-2)


def test_rescaling_does_not_change_it(digits):
    model = train(digits, 20)
    gauge = fg.find_gauge(model, digits[0][:2])
    move = gauge.sample(generator=torch.Generator().manual_seed(0), powers_of_two=True)
    note, other = (
        descent_note(fg.LossSurface(m, "cross_entropy", digits))
        for m in (model, gauge.rescale(model, move))
    )
    assert note.split(" (gradient norm")[0] == other.split(" (gradient norm")[0]


@pytest.mark.parametrize("unit", [1.0, 1e-3])
def test_a_quadratic_is_marked_away_from_its_minimum_only(unit):
    x, y = torch.eye(3).double(), unit * torch.tensor([[1.0], [2.0], [3.0]]).double()
    model = nn.Linear(3, 1, bias=False).double()
    for factor, marked in ((1.0, False), (1.02, False), (1.5, True)):
        with torch.no_grad():
            model.weight.copy_(factor * y.T)  # The fall is (factor - 1)² mean(y²) at most.
        assert (descent_note(fg.LossSurface(model, "mse", (x, y))) is not None) == marked


def test_a_model_that_cannot_be_computed_at_zero_is_judged_all_the_same():
    class Inverted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(2 * torch.eye(2))

        def forward(self, x):
            return torch.linalg.solve(self.weight, x.T).T

    data = torch.eye(2), torch.eye(2)
    assert descent_note(fg.LossSurface(Inverted(), "mse", data)) is not None
