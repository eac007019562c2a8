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
        surface, surrogate=None, lam=lam, pairs=200, generator=seeded()
    )
    second = normalized_sharpness(surface, surrogate=None).value / (2 * math.sqrt(lam))
    assert found.details["second order"] == pytest.approx(second, rel=1e-12)
    assert abs(found.value - second) < 4 * found.stderr + 0.02 * second
    assert found.stderr < 0.15 * second


def test_expectation_is_the_definition():
    """One weight, by hand: E (3(w + s ε) - 1)² - (3w - 1)² = 9 s², and w² / (2 λ s²)."""
    from flatgauge.surface.examples import linear_regression

    lam, weight = 50.0, 2.0
    found = normalized_sharpness_direct(
        linear_regression(weight), surrogate=None, lam=lam, steps=0, pairs=1000, generator=seeded()
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


def literal_minimum(case: Case, lam: float, steps: int = 1500) -> tuple[float, float]:
    """Equation (62) by autograd on the logarithms of all scales, from small noise; with error."""
    layers = [m for m in case.model if isinstance(m, nn.Linear)]
    weights = [layer.weight.detach() for layer in layers]
    rows = [torch.full((len(w), 1), -3.0).double().requires_grad_() for w in weights]
    columns = [torch.zeros(1, w.shape[1]).double().requires_grad_() for w in weights]
    names = [n for n, p in case.model.named_parameters() if p.dim() > 1]
    source = seeded(7)

    def value() -> tuple[torch.Tensor, torch.Tensor]:
        scales = [(r + c).exp() for r, c in zip(rows, columns, strict=True)]
        noise = [s * torch.randn(s.shape, generator=source).double() for s in scales]
        ends = []
        for sign in (1, -1):
            moved = {n: w + sign * e for n, w, e in zip(names, weights, noise, strict=True)}
            output = torch.func.functional_call(case.model, moved, (case.inputs,))
            ends.append(case.torch_loss(output, case.targets))
        terms = [(w / s).square().sum() for w, s in zip(weights, scales, strict=True)]
        return sum(ends) / 2, sum(terms) / (2 * lam)

    descent = torch.optim.Adam([*rows, *columns], lr=0.05)
    for step in range(steps):
        descent.zero_grad()
        sum(value()).backward()
        descent.param_groups[0]["lr"] = 0.05 * (1 - step / steps)
        descent.step()
    with torch.no_grad():
        origin = case.torch_loss(case.model(case.inputs), case.targets)
        draws = torch.stack([sum(value()) - origin for _ in range(300)])
    return float(draws.mean()), float(draws.std()) / math.sqrt(300)


def test_the_value_is_the_minimum_where_second_order_is_not_enough():
    case = trained()
    options = {"surrogate": None, "lam": 10.0, "pairs": 100}
    found = normalized_sharpness_direct(case.surface(), steps=400, generator=seeded(), **options)
    start = normalized_sharpness_direct(case.surface(), steps=0, generator=seeded(), **options)
    right, error = literal_minimum(case, 10.0)
    assert found.converged
    assert found.notes == ()
    assert abs(found.value - right) < 0.05 * right + 3 * math.hypot(found.stderr, error)
    assert start.value > 1.2 * right  # The best scales to second order are far from the best.


@pytest.mark.parametrize("steps", [0, 20])
def test_what_was_not_searched_long_enough_has_not_converged(steps):
    found = normalized_sharpness_direct(
        trained().surface(), surrogate=None, lam=10.0, steps=steps, generator=seeded()
    )
    assert not found.converged
    assert any(note.startswith("not minimized") for note in found.notes)


def test_a_small_lambda_has_its_minimum_at_infinite_noise():
    """The normalized loss is bounded, so that nothing is better than noise without a penalty."""
    case = build("mlp")
    labels = case.model(case.inputs).argmax(1)  # Its own: noise can only make it worse.
    surface = replace(case, targets=labels).surface()
    found = normalized_sharpness_direct(surface, lam=1e-2, generator=seeded())
    assert found.converged
    assert any("at or near infinite noise and says nothing" in note for note in found.notes)
    assert abs(found.value - found.details["pure noise"]) < 0.25 * found.details["pure noise"]
    assert found.details["second order"] > found.details["pure noise"]
    large = normalized_sharpness_direct(surface, lam=1e8, generator=seeded())
    assert not any("pure noise costs" in note for note in large.notes)


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
        build("gelu").surface(), lam=1e2, steps=50, pairs=8, generator=seeded()
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
        ({"tolerance": 0.0}, r"`tolerance=0.0` must lie between 0 and 1"),
        ({"steps": -1}, r"`steps=-1` must be a whole number"),
        ({"pairs": 1}, r"`pairs=1` gives no standard error"),
        ({"pairs": 10**9}, r"asks for 2,000,000,000 passes over all samples; draw at most"),
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
