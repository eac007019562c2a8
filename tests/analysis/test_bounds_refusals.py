"""What has no bound is told, or refused with what to do."""

from __future__ import annotations

import pytest
import torch
from bound_problems import one_weight, signs, terms
from cases import build
from torch import nn

import flatgauge as fg


def test_a_bound_that_is_not_there_is_told_and_refused_by_name():
    surface = build("attention").surface()
    frame = fg.bounds(surface, draws=2)
    assert terms(frame, "basis paths").index.tolist() == ["not available"]
    assert "edge from one unit to another" in terms(frame, "basis paths").note.iloc[0]
    with pytest.raises(ValueError, match="edge from one unit to another"):
        fg.bounds(surface, only="basis paths", draws=2)


def test_frozen_parameters():
    case = build("mlp")
    case.model[0].requires_grad_(False)
    told = fg.bounds(case.surface(), draws=2)
    assert "is frozen" in terms(told, "basis paths").note.iloc[0]
    given = fg.bounds(case.surface(), only="normalized", draws=2, frozen="given")
    numbers = [terms(f, "normalized").value["numbers told outright"] for f in (told, given)]
    assert numbers == [25 + 7, 7]


def test_regression_is_refused():
    surface = build("leaky relu with mse").surface()
    with pytest.raises(ValueError, match="0-1 loss needs class labels, but the targets are"):
        fg.bounds(surface)


def test_one_output_is_refused():
    inputs, labels = signs(20)
    model = nn.Linear(1, 1).double()
    surface = fg.LossSurface(model, "binary_cross_entropy", (inputs, labels[:, None].double()))
    with pytest.raises(ValueError, match="one output per class"):
        fg.bounds(surface)
    surface = fg.LossSurface(model, lambda o, t: (o[:, 0] * t).mean(), (inputs, labels))
    with pytest.raises(ValueError, match="at least two classes"):
        fg.bounds(surface)


def test_labels_per_position_are_refused():
    inputs = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(6, 4, dtype=torch.long)
    surface = fg.LossSurface(nn.Linear(3, 5), "cross_entropy", (inputs, labels))
    with pytest.raises(ValueError, match="one per independent sample"):
        fg.bounds(surface)


def test_a_model_without_layers_is_refused():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return x + self.shift

    inputs = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    surface = fg.LossSurface(Shift(), "cross_entropy", (inputs, torch.arange(9) % 3))
    with pytest.raises(ValueError, match="no layers"):
        fg.bounds(surface, only="normalized")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, "between 0 and 1"),
        ({"draws": 0}, "`draws=0` must be a whole number from 1"),
        ({"bits": 4}, "from 8 to 48"),
        ({"seed": -1}, "`seed=-1`"),
        ({"frozen": "no"}, "use 'told'"),
        ({"only": "pac"}, "the bounds are normalized, basis paths, theorem 5.1"),
        ({"skeleton": "weakest"}, "`skeleton='weakest'` is unknown"),
        ({"surrogate": "hinge"}, "`surrogate='hinge'` is unknown"),
        ({"prior": "wide"}, "`prior='wide'` is unknown; use 'paper'"),
        ({"epsilon": -1.0}, "`epsilon=-1.0` must be"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fg.bounds(one_weight(1.0, 20), **options)


def test_what_is_no_surface_or_no_holdout_is_refused():
    with pytest.raises(TypeError, match="needs a LossSurface, but got a Linear"):
        fg.bounds(nn.Linear(2, 2))
    surface = one_weight(1.0, 20)
    with pytest.raises(ValueError, match="data that it has not seen"):
        fg.bounds(surface, holdout=surface)
