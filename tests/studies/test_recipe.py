"""Recipes and what they make: data, networks, training to a goal."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from small_studies import TINY
from torch import nn

import flatgauge as fg
from flatgauge.studies.data import draw_labels, load_data
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.tasks import read_rescaling, rescale_network
from flatgauge.studies.training import gradient_norm, make_network, mean_loss, train

REFUSED = {
    "seed": (-1, "whole number from 0"),
    "samples": (0, "at least 1, or None"),
    "batch": (2.5, "whole number of at least 1"),
    "epochs": (True, "whole number of at least 0"),
    "random_labels": (1.5, "at most 1"),
    "rate": (0.0, "above 0"),
    "width": (math.inf, "finite number above 0"),
    "loss_goal": (-1.0, "above 0"),
    "accuracy_goal": ("all", "at least 0 and at most 1"),
    "optimizer": ("lion", "use one of sgd, adam"),
    "dtype": ("float16", "use one of float32, float64"),
    "momentum": (math.nan, "finite number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_recipe_refuses_what_means_nothing(name: str) -> None:
    value, told = REFUSED[name]
    with pytest.raises(ValueError, match=told):
        Recipe(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("network", 3, "`network=3` must be a text"),
        ("early", "no", "`early='no'` must be True or False"),
        ("rescaling", 5, "`rescaling=5` must be a text"),
    ],
)
def test_a_recipe_refuses_values_of_another_kind(name: str, value: object, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        Recipe(**{name: value})


def test_width_is_of_networks_by_name() -> None:
    with pytest.raises(ValueError, match="is for networks by name"):
        Recipe(network="nets.py:tiny", width=2.0)


def test_momentum_is_of_sgd() -> None:
    with pytest.raises(ValueError, match="is of 'sgd'"):
        Recipe(optimizer="adam", momentum=0.9)


def test_a_recipe_comes_back_from_plain_values() -> None:
    recipe = TINY.but(random_labels=0.3, rescaling="layers 5..25")
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.digest != TINY.digest
    with pytest.raises(ValueError, match="no field 'colour'"):
        Recipe.from_dict({"colour": 1})


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_a_share_of_labels_is_random(share: float) -> None:
    targets = torch.zeros(4000, dtype=torch.int64)
    mixed = draw_labels(targets, share, 10, seed=3)
    # Nine of ten drawn labels differ from the true one; five deviations of a binomial draw.
    expected, spread = 0.9 * share * 4000, math.sqrt(0.09 * share * 4000)
    assert abs(int((mixed != targets).sum()) - expected) <= 5 * spread
    assert targets.eq(0).all()


def test_all_classes_are_drawn_for_random_labels() -> None:
    counts = draw_labels(torch.zeros(5000, dtype=torch.int64), 1.0, 10, seed=0).bincount()
    assert len(counts) == 10
    assert counts.min() > 400


def test_labels_of_another_seed_are_others_and_of_the_same_seed_the_same() -> None:
    one, two, again = (load_data(TINY.but(random_labels=0.5, seed=s), None) for s in (1, 2, 1))
    assert not one.targets.equal(two.targets)
    assert one.targets.equal(again.targets)
    assert one.inputs.equal(two.inputs)
    assert one.test_targets.equal(two.test_targets)
    clean = load_data(TINY, None)
    assert one.replaced == int((one.targets != clean.targets).sum()) > 0
    assert clean.replaced == 0


def test_the_first_samples_or_a_drawn_subset() -> None:
    images, labels = fg.load_dataset("digits")
    first = load_data(TINY.but(standardise=False), None)
    assert first.inputs.equal(images[:60])
    assert first.targets.equal(labels[:60])
    drawn, again = (load_data(TINY.but(subset=5, standardise=False, seed=s), None) for s in (0, 1))
    assert drawn.inputs.equal(again.inputs)
    assert not drawn.inputs.equal(first.inputs)
    assert len(drawn.inputs) == 60
    assert len({tuple(row.flatten().tolist()) for row in drawn.inputs}) == 60


def test_inputs_are_standardised_by_the_training_samples() -> None:
    prepared = load_data(TINY, None)
    assert prepared.inputs.mean().item() == pytest.approx(0, abs=1e-6)
    assert prepared.inputs.std().item() == pytest.approx(1, abs=1e-5)
    raw, test = fg.load_dataset("digits")[0][:60], fg.load_dataset("digits", split="test")[0][:40]
    torch.testing.assert_close(prepared.test_inputs, (test - raw.mean()) / raw.std())


def test_data_that_a_study_cannot_use(tmp_path) -> None:
    with pytest.raises(ValueError, match="name the folder that holds them"):
        load_data(TINY.but(data="mnist"), None)
    with pytest.raises(ValueError, match="asks for more than `digits`"):
        load_data(TINY.but(samples=10**6, subset=0), None)
    file = tmp_path / "own.py"
    file.write_text("import torch\ndef real(split='train'): return torch.ones(3, 2), torch.ones(3)")
    with pytest.raises(ValueError, match="give whole class numbers"):
        load_data(TINY.but(data=f"{file}:real", samples=None, test_samples=None), None)
    file.write_text("def lists(split='train'): return [1, 2, 3]")
    with pytest.raises(TypeError, match="a pair of tensors"):
        load_data(TINY.but(data=f"{file}:lists", samples=None, test_samples=None), None)


def test_pixels_of_whole_numbers_and_inputs_that_are_all_the_same(tmp_path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def bytes(split='train'):\n"
        "    return torch.arange(6, dtype=torch.uint8).view(3, 2), torch.arange(3)\n"
        "def flat(split='train'): return torch.ones(3, 2), torch.arange(3)\n"
    )
    whole = TINY.but(samples=None, test_samples=None, data=f"{file}:bytes")
    assert load_data(whole, None).inputs.std().item() == pytest.approx(1)
    assert load_data(whole.but(standardise=False), None).inputs.tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="are all the same and cannot be standardised"):
        load_data(whole.but(data=f"{file}:flat"), None)


def test_own_network_and_data(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def net(): return torch.nn.Linear(2, 3)\n"
        "def data(split='train'):\n"
        "    g = torch.Generator().manual_seed(len(split))\n"
        "    x = torch.randn(30, 2, generator=g)\n"
        "    return x, (x[:, 0] > 0).long() + 1\n"
    )
    recipe = Recipe(data=f"{file}:data", network=f"{file}:net", epochs=60, rate=0.5)
    trained = train(recipe, load_data(recipe, None))
    assert trained.state == "reached"
    assert trained.epochs == 60
    assert trained.scores.train_accuracy > 0.8


def test_the_first_weights_belong_to_the_seed_alone() -> None:
    prepared = load_data(TINY, None)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = make_network(TINY, prepared)
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(2)
    two, other = make_network(TINY, prepared), make_network(TINY.but(seed=1), prepared)
    for name, part in one.state_dict().items():
        assert part.equal(two.state_dict()[name])
    assert not one.state_dict()["fc1.weight"].equal(other.state_dict()["fc1.weight"])


def test_training_is_plain_gradient_descent() -> None:
    """Two full-batch steps, by hand."""
    recipe = TINY.but(batch=60, epochs=2, rate=0.3, dtype="float64")
    prepared = load_data(recipe, None)
    by_hand = make_network(recipe, prepared)
    for _ in range(2):
        loss = F.cross_entropy(by_hand(prepared.inputs), prepared.targets)
        for part, slope in zip(
            by_hand.parameters(), torch.autograd.grad(loss, list(by_hand.parameters())), strict=True
        ):
            part.data -= 0.3 * slope
    trained = train(recipe, prepared)
    for found, wanted in zip(trained.model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
    assert trained.steps == 2
    assert all(part.grad is None for part in trained.model.parameters())
    assert not trained.model.training


def test_training_stops_where_its_goals_are_reached() -> None:
    recipe = TINY.but(epochs=200, rate=0.5, loss_goal=0.5, accuracy_goal=0.9)
    prepared = load_data(recipe, None)
    trained = train(recipe, prepared)
    assert trained.state == "reached"
    assert 0 < trained.epochs < 200
    assert trained.scores.train_loss <= 0.5
    assert trained.scores.train_accuracy >= 0.9
    # One epoch less is not enough.
    before = train(recipe.but(epochs=trained.epochs - 1), prepared)
    assert before.state == "not reached"
    assert before.scores.train_loss > 0.5 or before.scores.train_accuracy < 0.9


def test_a_small_gradient_can_be_the_goal() -> None:
    recipe = TINY.but(epochs=500, rate=0.5, gradient_goal=0.2)
    prepared = load_data(recipe, None)
    trained = train(recipe, prepared)
    assert trained.state == "reached"
    assert trained.scores.gradient_norm <= 0.2
    surface = fg.LossSurface(trained.model, "cross_entropy", (prepared.inputs, prepared.targets))
    assert float(surface.gradient().norm()) == pytest.approx(trained.scores.gradient_norm, rel=1e-4)


def test_a_goal_can_be_a_filter_at_the_end() -> None:
    prepared = load_data(TINY, None)
    easy = train(TINY.but(loss_goal=100.0, early=False), prepared)
    assert (easy.state, easy.epochs) == ("reached", 3)
    hard = train(TINY.but(loss_goal=1e-9, early=False), prepared)
    assert (hard.state, hard.epochs) == ("not reached", 3)


def test_without_epochs_a_network_is_as_drawn() -> None:
    recipe = TINY.but(epochs=0)
    prepared = load_data(recipe, None)
    trained = train(recipe, prepared)
    assert (trained.state, trained.steps) == ("reached", 0)
    drawn = make_network(recipe, prepared).state_dict()
    assert all(part.equal(drawn[name]) for name, part in trained.model.state_dict().items())


def test_training_that_diverges_says_so() -> None:
    recipe = TINY.but(rate=1e30, epochs=50, loss_goal=0.1)
    trained = train(recipe, load_data(recipe, None))
    assert trained.state == "diverged"
    assert trained.epochs < 50


@pytest.mark.parametrize("goals", [{}, {"loss_goal": 0.5}, {"accuracy_goal": 0.0}])
def test_training_whose_very_last_step_diverges_says_so(goals: dict[str, float]) -> None:
    recipe = TINY.but(rate=1e38, epochs=1, batch=60, **goals)
    prepared = load_data(recipe, None)
    trained = train(recipe, prepared)
    assert trained.state == "diverged"
    assert not math.isfinite(trained.scores.train_loss)


def test_scores_and_gradient_norm_by_hand() -> None:
    """Zero weights: every class is as likely, and the first one is chosen."""
    model = nn.Linear(2, 4)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    inputs, targets = torch.eye(2), torch.tensor([0, 3])
    loss, accuracy = mean_loss(model, inputs, targets)
    assert loss == pytest.approx(math.log(4))
    assert accuracy == 0.5
    # By the outputs: ¼ everywhere, less 1 at the target, halved; once by inputs, once by biases.
    first, second = [-0.375, 0.125, 0.125, 0.125], [0.125, 0.125, 0.125, -0.375]
    squares = sum(x * x for x in first + second)
    squares += sum((a + b) ** 2 for a, b in zip(first, second, strict=True))
    assert gradient_norm(model, inputs, targets) == pytest.approx(math.sqrt(squares))


class TestRescaling:
    @pytest.mark.parametrize("text", ["layers 5..25", "units 1/100..100", "5, 4, 1/20"])
    def test_the_function_stays(self, text: str) -> None:
        recipe = Recipe(network="mlp-5-4", samples=20, test_samples=5, epochs=0, dtype="float64")
        prepared = load_data(recipe, None)
        model = make_network(recipe, prepared)
        twin = rescale_network(model, prepared.inputs[:2], text, seed=0)
        torch.testing.assert_close(twin(prepared.inputs), model(prepared.inputs))
        assert not twin.fc1.weight.equal(model.fc1.weight)

    def test_named_factors_multiply_the_layers(self) -> None:
        recipe = Recipe(network="mlp-5-4", samples=20, test_samples=5, epochs=0, dtype="float64")
        prepared = load_data(recipe, None)
        model = make_network(recipe, prepared)
        twin = rescale_network(model, prepared.inputs[:2], "5, 4, 1/20", seed=0)
        for name, factor in (("fc1", 5), ("fc2", 4), ("fc3", 1 / 20)):
            torch.testing.assert_close(
                getattr(twin, name).weight, factor * getattr(model, name).weight
            )
        # Biases are multiplied by all factors so far.
        torch.testing.assert_close(twin.fc2.bias, 20 * model.fc2.bias)

    def test_random_factors_are_of_their_range(self) -> None:
        recipe = Recipe(network="mlp-50-40", samples=20, test_samples=5, epochs=0, dtype="float64")
        prepared = load_data(recipe, None)
        model = make_network(recipe, prepared)
        layers = rescale_network(model, prepared.inputs[:2], "layers 5..25", seed=1)
        for name in ("fc1", "fc2"):
            ratios = (getattr(layers, name).weight / getattr(model, name).weight).detach()
            assert ratios.min() == pytest.approx(ratios.max())
            assert 5 <= ratios.mean() <= 25
        units = rescale_network(model, prepared.inputs[:2], "units 1/100..100", seed=1)
        ratios = (units.fc1.weight / model.fc1.weight)[:, 0].detach()
        assert 0.01 <= ratios.min() < 0.5 * ratios.max()
        assert ratios.max() <= 100

    @pytest.mark.parametrize(
        "text", ["", "layers", "layers 5", "units 0..4", "units 4..2", "5, 4", "1/0, 2", "a..b"]
    )
    def test_a_text_without_meaning_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="cannot be read; write 'layers 5"):
            read_rescaling(text)

    def test_the_number_of_factors_must_fit(self) -> None:
        recipe = Recipe(network="mlp-5-4", samples=20, test_samples=5)
        prepared = load_data(recipe, None)
        with pytest.raises(ValueError, match="factors of 2 layers, but the network has 3"):
            rescale_network(make_network(recipe, prepared), prepared.inputs[:2], "5, 1/5", seed=0)

    def test_a_network_without_free_scales_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no scale that is free"):
            rescale_network(nn.Linear(3, 2), torch.randn(2, 3), "layers 5..25", seed=0)
