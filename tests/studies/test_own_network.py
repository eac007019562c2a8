"""Networks of the user's own in a study: odd layers, tied weights, one object for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_studies import TINY, tiny_study

from flatgauge.studies.data import load_data
from flatgauge.studies.training import make_network, train

CODE = """
import torch
from torch import nn

def dropping():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.5), nn.Linear(20, 10))

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64))
        self.first, self.second, self.last = (nn.Linear(64, k) for k in (64, 64, 10))
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.first(self.scale * x.flatten(1)).relu()
        return self.last(self.second(x).relu())

one = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    place = tmp_path / "nets.py"
    place.write_text(CODE)
    return place


def test_dropout_belongs_to_the_seed_and_leaves_the_global_state(file: Path) -> None:
    recipe = TINY.but(network=f"{file}:dropping")
    prepared = load_data(recipe, None)
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        losses.append(train(recipe, prepared).scores.train_loss)
        assert torch.get_rng_state().equal(before)
    assert losses[0] == losses[1]


def test_weights_are_left_as_they_were_made_unless_asked(file: Path) -> None:
    recipe = TINY.but(network=f"{file}:Tied")
    prepared = load_data(recipe, None)
    model = make_network(recipe, prepared)
    assert 0 <= model.scale.min() <= model.scale.max() <= 1
    assert not model.scale.equal(make_network(recipe.but(seed=1), prepared).scale)
    with pytest.raises(TypeError, match="no initialisation is defined"):
        make_network(recipe.but(init="normal"), prepared)


def test_tied_weights_are_kept(file: Path, tmp_path: Path) -> None:
    study = tiny_study(recipe=TINY.but(network=f"{file}:Tied"), factors={"batch": [16]}, seeds=1)
    found = study.run(tmp_path / "out")
    (run,) = found.rows
    model = found.surface(run).model
    assert model.first.weight is model.second.weight
    recipe = study.runs()[run]
    assert model.first.weight.equal(train(recipe, load_data(recipe, None)).model.first.weight)


def test_networks_of_one_object_are_several(file: Path, tmp_path: Path) -> None:
    study = tiny_study(
        recipe=TINY.but(network=f"{file}:one"), factors={"rate": [0.01, 0.5]}, seeds=1
    )
    found = study.run(tmp_path / "out")
    slow, fast = (found.surface(run) for run in found.rows)
    assert slow.value() > fast.value()
    recipe = study.runs()[list(found.rows)[1]]
    again = train(recipe, load_data(recipe, None))
    assert again.scores.train_loss == found.to_frame()["train_loss"].iloc[1]
