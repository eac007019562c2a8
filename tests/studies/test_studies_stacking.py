"""Networks trained together are those trained alone, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, nn

from flatgauge.studies.networks import build
from flatgauge.studies.perceptrons import BACK, Perceptrons, Product, agree, linear_layers
from flatgauge.studies.preparing import prepare
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.stacking import stack_key, train_stacked, worth_stacking
from flatgauge.studies.training import Trained, train

BASE = Recipe(samples=75, test_samples=25, network="mlp-16-16", epochs=4, batch=16)

#: Sizes and batches at which numbers lie well in memory, and others.
KINDS = {
    "sgd": BASE,
    "momentum": BASE.but(momentum=0.9, weight_decay=1e-3, rate=0.02),
    "adam": BASE.but(optimizer="adam", rate=0.01, weight_decay=1e-3),
    "odd sizes": BASE.but(network="mlp-37-53-11", batch=7),
    "one sample": BASE.but(network="mlp-3-5", batch=1, samples=20),
    "full batch": BASE.but(batch=1000),
    "one layer": BASE.but(network="mlp-33", batch=13),
    "double": BASE.but(dtype="float64"),
    "double, odd sizes": BASE.but(dtype="float64", network="mlp-21-3", batch=9),
    "own inputs": BASE.but(data="noise", samples=40),
    "goal": BASE.but(loss_goal=1.0, accuracy_goal=0.8, gradient_goal=5.0, epochs=14, rate=0.3),
    "diverging": BASE.but(rate=1e30),
}


def jobs(recipe: Recipe, count: int = 5) -> list:
    """Networks with seeds, labels, lengths and rates of their own."""
    found = [
        recipe.but(
            seed=seed,
            random_labels=0.2 * (seed % 3),
            epochs=max(1, recipe.epochs - seed),
            rate=recipe.rate * (1 + seed % 2),
        )
        for seed in range(count)
    ]
    return [(one.seed, one, prepare(one, None)) for one in found]


def same(one: Trained, other: Trained) -> bool:
    facts, others = one.facts(), other.facts()
    del facts["seconds"], others["seconds"]
    states = one.model.state_dict(), other.model.state_dict()
    return repr(facts) == repr(others) and all(
        torch.equal(states[0][name].nan_to_num(), states[1][name].nan_to_num())
        for name in states[0].keys() | states[1].keys()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_does_not_depend_on_its_companions(kind):
    given = jobs(KINDS[kind])
    alone = {label: train(recipe, prepared) for label, recipe, prepared in given}
    for size in (1, 5):
        together = dict(train_stacked(given, size=size))
        assert together.keys() == alone.keys()
        assert all(same(together[label], alone[label]) for label in alone)
    backwards = dict(train_stacked(given[::-1], size=3))
    assert all(same(backwards[label], alone[label]) for label in alone)


def test_the_kinds_end_in_all_ways():
    ends = {
        trained.state
        for kind in ("sgd", "goal", "diverging")
        for _, trained in train_stacked(jobs(KINDS[kind].but(accuracy_goal=0.8), 3))
    }
    assert ends == {"reached", "not reached", "diverged"}


def test_sixteen_members_at_a_common_size():
    recipe = BASE.but(network="mlp-3x64", batch=32, epochs=2)
    given = [
        (seed, recipe.but(seed=seed), prepare(recipe.but(seed=seed), None)) for seed in range(16)
    ]
    together = dict(train_stacked(given))
    for label, recipe, prepared in given[::5]:
        assert same(together[label], train(recipe, prepared))


def test_gradients_are_those_of_autograd():
    models = [build("mlp-6-5", shape=(4,), classes=3).double() for _ in range(3)]
    generator = Generator().manual_seed(0)
    inputs = torch.randn(3, 7, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (3, 7), generator=generator)
    stack = Perceptrons(models)
    losses = stack.gradients(inputs, targets)
    for number, model in enumerate(models):
        loss = F.cross_entropy(model(inputs[number]), targets[number])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(losses[number], loss.detach(), rtol=1e-12, atol=0)
        for part, gradient in zip(stack.parameters[number], gradients, strict=True):
            torch.testing.assert_close(part.grad, gradient, rtol=1e-12, atol=1e-14)


def test_one_that_is_done_leaves_and_the_next_enters():
    taken = []

    def handing_out():
        for number, (label, recipe, prepared) in enumerate(jobs(BASE, 4)):
            taken.append(label)
            yield label, recipe.but(epochs=(5, 1, 1, 1)[number]), prepared

    seen = []
    for label, trained in train_stacked(handing_out(), size=2):
        seen.append((label, trained.epochs, list(taken)))
    assert seen == [(1, 1, [0, 1]), (2, 1, [0, 1, 2]), (3, 1, [0, 1, 2, 3]), (0, 5, [0, 1, 2, 3])]


def test_results_are_left_as_train_leaves_them():
    state = torch.get_rng_state()
    trained = dict(train_stacked(jobs(BASE, 2)))[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert not trained.model.training
    assert trained.seconds > 0
    assert all(part.grad is None and part.requires_grad for part in trained.model.parameters())
    assert list(train_stacked([])) == []


def test_products_that_differ_when_taken_together_are_taken_alone():
    wrong = Product(lambda a, b, out=None: torch.bmm(a, b) * 1.001, torch.mm)
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    out = torch.empty(3, 4, 6)
    expected = torch.stack([one @ other for one, other in zip(a, b, strict=True)])
    torch.testing.assert_close(wrong.of(a, b, out=out), expected)
    assert torch.equal(out, wrong.of(a, b))
    shapes = (3, 4, 5), (3, 5, 6)
    assert not agree(wrong, shapes, torch.float32, 1)
    assert BACK.of(a, b).shape == (3, 4, 6)


@pytest.mark.parametrize(
    ("network", "batch", "expected"),
    [
        ("mlp-3x64", 8, True),
        ("mlp-3x64", 256, True),
        ("mlp-3x512", 75, False),  # 64·512 + 2·512² + 512·10 weights, times 75 samples
        ("lenet5", 4, False),
    ],
)
def test_what_is_worth_stacking(network, batch, expected):
    recipe = BASE.but(network=network, batch=batch)
    assert worth_stacking(recipe, prepare(recipe, None)) is expected


def test_only_perceptrons_are_stacked():
    assert linear_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))) is not None
    for other in (
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(2, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2)),
        nn.Sequential(nn.Flatten(2), nn.Linear(2, 3)),
        build("lenet5"),
        nn.Sequential(),
    ):
        assert linear_layers(other) is None
    prepared = prepare(BASE, None)
    assert stack_key(BASE.but(network="lenet5"), prepared) is None
    assert stack_key(BASE.but(epochs=0), prepared) is None
    assert stack_key(BASE, prepared) == stack_key(BASE.but(seed=3, rate=0.5), prepared)
    assert stack_key(BASE, prepared) != stack_key(BASE.but(batch=17), prepared)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": "lenet5"}, "`lenet5` with `epochs=4` is not trained in a stack.*use `train`"),
        ({"epochs": 0}, "`epochs=0` is not trained in a stack"),
        ({"batch": 8}, "does not fit into a stack of .*what has one `stack_key`"),
    ],
)
def test_refusals(change, message):
    other = BASE.but(**change)
    both = [(0, BASE, prepare(BASE, None)), (1, other, prepare(other, None))]
    with pytest.raises(ValueError, match=message):
        list(train_stacked(both))


@pytest.mark.parametrize("size", [0, True, 1.5, math.nan])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=f"`size={size!r}` must be a whole number"):
        list(train_stacked([], size=size))
