"""The weight-space baselines against their definitions, written out densely."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CASES, build
from reference import dense_hessian, holds_smallest, loss_function, theta
from torch import Generator, nn

from flatgauge import LossSurface
from flatgauge.measures import (
    epsilon_sharpness,
    expected_sharpness,
    hessian_max_eigenvalue,
    hessian_trace,
    measure,
)
from flatgauge.surface.examples import bowl, two_weights


def source(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.mark.parametrize("name", CASES)
def test_trace_and_top_eigenvalue_are_those_of_the_dense_hessian(name):
    case = build(name)
    hessian, surface = dense_hessian(case), case.surface()
    for method in ("sweep", "hutch++"):
        exact = hessian_trace(surface, method=method, probes=surface.size)
        assert exact.exact
        assert exact.value == pytest.approx(hessian.trace().item(), rel=1e-10)
    spectrum = torch.linalg.eigvalsh(hessian)
    top = hessian_max_eigenvalue(surface, tolerance=1e-6, generator=source())
    assert abs(top.value - spectrum[-1].item()) <= top.bound + 1e-12
    assert top.bound <= 1e-6 * abs(top.value)
    assert holds_smallest(top.details, spectrum[0].item())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "leaky relu with mse"])
def test_estimates_agree_within_their_own_error_for_every_seed(name):
    case = build(name)
    surface, hessian = case.surface(), dense_hessian(case)
    exact, top = hessian.trace().item(), torch.linalg.eigvalsh(hessian)[-1].item()
    for seed in range(100):
        estimate = hessian_trace(surface, method="hutch++", probes=48, generator=source(seed))
        assert not estimate.exact
        assert abs(estimate.value - exact) < 5 * estimate.stderr
        assert estimate.stderr < 0.5 * abs(exact)
        eigenvalue = hessian_max_eigenvalue(surface, generator=source(seed))
        assert abs(eigenvalue.value - top) <= eigenvalue.bound + 1e-12


def test_by_hand():
    surface = two_weights(2.0, 3.0)  # Hessian [[18, 24], [24, 8]]
    assert hessian_trace(surface).value == 26.0
    top = hessian_max_eigenvalue(surface, tolerance=1e-10, generator=source())
    assert top.value == pytest.approx(13 + math.sqrt(601), rel=1e-9)
    assert top.details["smallest"] == pytest.approx(13 - math.sqrt(601), rel=1e-9)


def quadratic(curvatures: list[float]) -> LossSurface:
    """The loss Σ c w² / 2: curvatures of both signs, which are the eigenvalues."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(len(curvatures), dtype=torch.float64))

        def forward(self, x):
            return x * self.w

    c = torch.tensor(curvatures, dtype=torch.float64)
    ones = torch.ones(1, len(curvatures), dtype=torch.float64)
    return LossSurface(Weights(), lambda out, _: (c * out.square()).sum(1).mean() / 2, (ones, ones))


def test_the_smallest_eigenvalue_is_never_an_inner_one():
    """Far below zero for the bulk, and hidden from a search for the largest."""
    curvatures = [10.0, 5.0, 3.0, *torch.linspace(0, 0.01, 60).tolist(), -0.03]
    for seed in range(2):
        seen = hessian_max_eigenvalue(quadratic(curvatures), generator=source(seed))
        assert "smallest" not in seen.details
        assert holds_smallest(seen.details, -0.03)
        asked = hessian_max_eigenvalue(quadratic(curvatures), smallest=True, generator=source(seed))
        assert asked.details["smallest"] == pytest.approx(-0.03, rel=0.1)
        assert holds_smallest(asked.details, -0.03)
        assert asked.value == pytest.approx(10.0, rel=1e-6)
        assert (seen.notes, asked.notes) == ((), ())


def test_a_smallest_eigenvalue_that_cannot_be_told_from_zero_is_zero():
    flat = hessian_max_eigenvalue(quadratic([10.0, 5.0] + [0.0] * 30), generator=source())
    assert flat.details["smallest"] == 0.0
    assert flat.details["smallest bound"] < 1e-12


def test_what_is_not_known_of_the_smallest_eigenvalue_is_said():
    curvatures = torch.linspace(-8, 10, 400).tolist()
    found = hessian_max_eigenvalue(quadratic(curvatures), max_matvecs=12, generator=source())
    assert holds_smallest(found.details, -8.0)
    assert any("may lie as low as" in note for note in found.notes)
    asked = hessian_max_eigenvalue(
        quadratic(curvatures), smallest=True, max_matvecs=12, generator=source()
    )
    assert any("pass a larger `max_matvecs`" in note for note in asked.notes)


def test_worst_case_at_the_bottom_of_a_bowl():
    estimate = epsilon_sharpness(bowl([1.0, 9.0, 4.0]), epsilon=0.2, generator=source())
    assert estimate.value == pytest.approx(9 * 0.2**2 / 2, rel=1e-3)
    assert estimate.options["epsilon"] == 0.2
    assert "a lower bound" in estimate.notes[0]


def test_worst_case_is_never_above_the_true_one_and_close_to_it():
    case = build("mlp")
    surface, loss, point = case.surface(), loss_function(case), theta(case)
    estimate = epsilon_sharpness(surface, epsilon=0.5, steps=30, starts=4, generator=source())
    # A brute-force search that knows nothing of ascent: the best of many random directions.
    draws = torch.randn(3000, len(point), generator=source(1), dtype=torch.float64)
    gradient = surface.gradient()
    draws += 3 * gradient / gradient.norm()
    rises = [loss(point + 0.5 * draw / draw.norm()).item() for draw in draws[:300]]
    brute = (max(rises) - surface.value()) / (1 + surface.value())
    assert estimate.value >= brute
    first_order = 0.5 * gradient.norm().item() / (1 + surface.value())
    assert 0.9 * first_order < estimate.value < 2 * first_order


def test_worst_case_counts_its_gradients():
    case = build("mlp")
    calls = []
    surface = case.surface(chunk=11)
    surface.value_and_gradient()
    hessian_max_eigenvalue(surface, generator=source())  # Its eigenvector is a start: shared.
    spent = surface.matvecs
    handle = case.model.register_forward_hook(lambda *_: calls.append(1))
    epsilon_sharpness(surface, starts=3, steps=7, generator=source())
    handle.remove()
    assert surface.matvecs == spent
    assert len(calls) <= 3 * 7 + 1 + 2  # and both sides of the eigenvector


@pytest.mark.parametrize(("shift", "fine"), [(-0.5, True), (-1.0, False), (-3.0, False)])
def test_worst_case_of_a_negative_loss_is_marked_or_refused(shift, fine):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = (torch.ones(3, 1), torch.ones(3, 1))
    surface = LossSurface(model, lambda o, _: o.square().mean() + shift, data)
    if fine:
        estimate = epsilon_sharpness(surface, epsilon=0.1, generator=source())
        assert estimate.value == pytest.approx(0.01 / 0.5, rel=1e-4)
        assert any(note.startswith("the loss is negative") for note in estimate.notes)
    else:
        with pytest.raises(ValueError, match=r"divides by 1 \+ loss, but the loss here is -"):
            epsilon_sharpness(surface, epsilon=0.1, generator=source())


def test_expectation_of_a_bowl_is_half_sigma_squared_times_the_trace():
    for seed in range(20):
        estimate = expected_sharpness(
            bowl([1.0, 9.0, 4.0]), sigma=0.3, pairs=100, generator=source(seed)
        )
        assert abs(estimate.value - 0.3**2 * 14 / 2) < 5 * estimate.stderr
        assert estimate.stderr < 0.2 * estimate.value


def test_expectation_is_reported_in_size_with_its_sign_beside():
    class Downhill(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            return x * self.w.square().sum()

    ones = torch.ones(4, 1).double()
    surface = LossSurface(Downhill(), lambda o, _: -o.mean(), (ones, ones))
    estimate = expected_sharpness(surface, sigma=0.1, generator=source())
    assert estimate.value == -estimate.details["signed"] > 0


def test_expectation_that_overflows_is_infinite_and_marked():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    surface = LossSurface(
        model, lambda o, _: o.exp().exp().mean(), (torch.ones(3, 2), torch.ones(3))
    )
    estimate = expected_sharpness(surface, sigma=50.0, generator=source())
    assert estimate.value == math.inf
    assert not estimate.converged
    assert "overflows" in estimate.notes[0]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (epsilon_sharpness, {"epsilon": 0.0}, r"`epsilon=0\.0` must be a positive"),
        (epsilon_sharpness, {"epsilon": math.inf}, "`epsilon=inf` must be a positive"),
        (epsilon_sharpness, {"starts": 0}, "`starts=0` and `steps=10` must be at least 1"),
        (expected_sharpness, {"sigma": -1.0}, r"`sigma=-1\.0` must be a positive"),
        (expected_sharpness, {"pairs": 1}, "`pairs=1` gives no standard error"),
        (expected_sharpness, {"pairs": 10**9}, "asks for 2,000,000,000 passes over all samples"),
    ],
)
def test_settings_out_of_range(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(bowl([1.0, 2.0]), generator=source(), **options)


def test_needs_of_the_wrong_kind_are_refused():
    with pytest.raises(TypeError, match=r"`needs` must be a .*Needs.* got \('trace',\); write"):
        measure(
            symbol="s", paper="", geometry="", functional="", invariant_to=(), cost="",
            needs=("trace",),
        )  # fmt: skip
