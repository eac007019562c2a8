"""The direct form of normalized sharpness: noise, search, and what stands still."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from cases import Case, build
from torch import Generator, nn

from flatgauge import LossSurface
from flatgauge.measures import normalized_sharpness, normalized_sharpness_direct


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def trained() -> Case:
    """A small network next to a minimum of its own loss, where the loss rises under noise."""
    case = build("leaky relu with mse")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs, errors = torch.randn(200, 3).double(), 1e-3 * torch.randn(200, 2).double()
    with torch.no_grad():
        targets = case.model(inputs) + errors
    return replace(case, inputs=inputs, targets=targets)


def linear() -> LossSurface:
    """A quadratic loss in three times two weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False).double()
        inputs = torch.randn(40, 3).double()
    return LossSurface(model, "mse", (inputs, torch.zeros(40, 2).double()))


@pytest.mark.parametrize("lam", [1e2, 1e6])
def test_second_order_is_all_there_is_for_a_quadratic_loss(lam):
    surface = linear()
    found = normalized_sharpness_direct(
        surface, surrogate=None, lam=lam, pairs=400, generator=seeded()
    )
    second = normalized_sharpness(surface, surrogate=None).value / (2 * math.sqrt(lam))
    assert found.details["second order"] == pytest.approx(second, rel=1e-12)
    assert abs(found.value - second) < 4 * found.stderr + 0.02 * second
    assert found.stderr < 0.1 * second


def test_expectation_is_the_definition():
    """One weight, by hand: E (3(w + s ε) - 1)² - (3w - 1)² = 9 s², and w² / (2 λ s²)."""
    from flatgauge.examples import linear_regression

    lam, weight = 50.0, 2.0
    found = normalized_sharpness_direct(
        linear_regression(weight), surrogate=None, lam=lam, steps=0, pairs=3000, generator=seeded()
    )
    best = 2 * math.sqrt(9 * weight**2 / (2 * lam))  # the smallest 9 v + w² / (2 λ v)
    assert found.details["second order"] == pytest.approx(best)
    assert found.details["penalty"] == pytest.approx(best / 2)
    assert abs(found.value - best) < 4 * found.stderr


def test_small_noise_meets_second_order_at_a_minimum():
    surface = trained().surface()
    found = normalized_sharpness_direct(
        surface, surrogate=None, lam=1e11, steps=0, pairs=200, generator=seeded()
    )
    assert abs(found.value - found.details["second order"]) < 4 * found.stderr
    assert found.stderr < 0.1 * found.value


def test_the_search_finds_better_scales_where_second_order_is_not_enough():
    surface = trained().surface()
    options = {"surrogate": None, "lam": 10.0, "pairs": 64}
    start = normalized_sharpness_direct(surface, steps=0, generator=seeded(), **options)
    found = normalized_sharpness_direct(surface, steps=60, generator=seeded(), **options)
    assert found.details["gain of the search"] > 0
    assert found.value < start.value + 3 * math.hypot(found.stderr, start.stderr)


def test_powers_of_two_change_no_bit():
    case = build("mlp")
    model = copy.deepcopy(case.model)
    factors = torch.tensor([2.0, 0.25, 16.0, 1.0, 1 / 1024]).double()
    with torch.no_grad():
        model[0].weight.mul_(factors[:, None]), model[0].bias.mul_(factors)
        model[2].weight.div_(factors)
        model[4].weight.mul_(8), model[4].bias.mul_(8)
    before, after = (
        normalized_sharpness_direct(c.surface(), steps=5, pairs=4, generator=seeded())
        for c in (case, replace(case, model=model))
    )
    assert (after.value, after.stderr) == (before.value, before.stderr)


def test_what_costs_nothing_gets_no_noise():
    case = trained()
    model = copy.deepcopy(case.model)
    model[0] = nn.Linear(4, 5).double()
    with torch.no_grad():  # One more input, which is always zero.
        model[0].weight[:, :3], model[0].bias[:] = case.model[0].weight, case.model[0].bias
    inputs = torch.cat([case.inputs, torch.zeros(len(case.inputs), 1).double()], dim=1)
    wider = replace(case, model=model, inputs=inputs).surface()
    options = {"surrogate": None, "steps": 0, "pairs": 4, "generator": seeded()}
    found = normalized_sharpness_direct(wider, **options)
    right = normalized_sharpness_direct(case.surface(), **options)
    assert math.isfinite(found.value)
    assert found.details["second order"] == pytest.approx(right.details["second order"], rel=1e-9)
    assert found.details["penalty"] == pytest.approx(right.details["penalty"], rel=1e-9)


def test_a_point_that_is_no_minimum_is_told():
    found = normalized_sharpness_direct(
        build("gelu").surface(), lam=1e2, steps=40, pairs=8, generator=seeded()
    )
    assert any("the loss falls under the noise" in note for note in found.notes)


def test_noise_does_not_depend_on_what_was_measured_before():
    first, second = build("gelu").surface(), build("gelu").surface()
    options = {"steps": 2, "pairs": 2, "probes": 4}
    normalized_sharpness(second, probes=4, generator=seeded())
    values = [
        normalized_sharpness_direct(s, generator=seeded(), **options).value for s in (first, second)
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 0.0}, r"`lam=0.0` must be a positive"),
        ({"steps": -1}, r"`steps=-1` must be a whole number"),
        ({"pairs": 1}, r"`pairs=1` gives no standard error"),
        ({"surrogate": "hinge"}, r"`surrogate='hinge'` is unknown"),
        ({"layers": "no"}, r"matches no layer"),
        ({"generator": None}, r"needs a generator; pass"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        normalized_sharpness_direct(
            linear(), **({"generator": seeded(), "surrogate": None} | options)
        )
