"""Runs of a study that are trained together, beside others that hold some of them."""

from __future__ import annotations

import pytest
import torch

from flatgauge.studies.networks import build
from flatgauge.studies.open_runs import train_open_runs
from flatgauge.studies.preparing import prepare
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.store import Store
from flatgauge.studies.study import Study
from flatgauge.studies.training import train

STUDY = Study(
    name="small",
    recipe=Recipe(samples=60, test_samples=20, epochs=2, network="mlp-8"),
    factors={"network": ["mlp-8", "lenet5"], "batch": [10, 30]},
    seeds=3,
    measures=["hessian_trace"],
)


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store(tmp_path)
    store.open(STUDY.declaration(), resume=False)
    return store


def weights(store: Store, run: str, recipe: Recipe) -> list[torch.Tensor]:
    model = build(recipe.network, shape=(1, 8, 8))
    store.load_model(run, model)
    return list(model.parameters())


def test_perceptrons_are_trained_and_kept_and_others_left(store):
    told: list[str] = []
    train_open_runs(STUDY, store, None, size=2, listener=told.append)
    expected = [run for run, recipe in STUDY.runs().items() if recipe.network == "mlp-8"]
    assert sorted(told) == sorted(expected)
    assert [run for run in STUDY.runs() if store.training(run) is not None] == expected
    for run in expected:
        recipe = STUDY.runs()[run]
        alone = train(recipe, prepare(recipe, None))
        facts = alone.facts()
        kept = store.training(run)
        assert {key: kept[key] for key in facts if key != "seconds"} == {
            key: facts[key] for key in facts if key != "seconds"
        }
        found = weights(store, run, recipe)
        assert all(map(torch.equal, found, alone.model.parameters()))


def test_what_is_there_or_held_is_left_alone_and_all_is_released(store):
    runs = STUDY.runs()
    there, held, *_ = [run for run, recipe in runs.items() if recipe.network == "mlp-8"]
    store.keep_model(there, runs[there], train(runs[there], prepare(runs[there], None)))
    told: list[str] = []
    with store.held(held) as mine:
        assert mine
        train_open_runs(STUDY, store, None, listener=told.append)
    assert store.training(held) is None
    assert there not in told
    assert len(told) == 4
    train_open_runs(STUDY, store, None, listener=told.append)
    assert held not in told  # A single one is not worth a stack.
    for run in runs:
        with store.held(run) as mine:
            assert mine


def test_all_are_released_after_an_error(store):
    def interrupted(run: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_open_runs(STUDY, store, None, listener=interrupted)
    for run in STUDY.runs():
        with store.held(run) as mine:
            assert mine
    kept = [run for run in STUDY.runs() if store.training(run) is not None]
    assert len(kept) == 1
