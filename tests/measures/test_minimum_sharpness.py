"""The smallest trace on the orbit: by hand, by another optimiser on real Hessians, unattained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from cases import LAYER_CASES, Case, build
from reference import dense_hessian
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional as F

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.measures import (
    hessian_trace,
    minimum_sharpness,
    minimum_sharpness_nodewise,
)
from flatgauge.surface.examples import two_weights
from flatgauge.symmetry import find_gauge
from flatgauge.symmetry.balance import smallest_trace
from flatgauge.symmetry.find import surface_gauge
from flatgauge.symmetry.gauge import GaugeGroup, Move, multiply

MEASURES = (minimum_sharpness, minimum_sharpness_nodewise)
EXACT = tuple(name for name in LAYER_CASES if not build(name).curved)
FEW = ("mlp", "conv and max-pool", "grouped and dilated conv", "residual with batch-norm", "gated")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def shared(name: str, dtype: torch.dtype = torch.float64) -> tuple[Case, LossSurface]:
    """A case with one surface for all tests: reading the model anew for each would take long."""
    case = build(name)
    case = replace(case, model=case.model.to(dtype), inputs=case.inputs.to(dtype))
    return case, case.surface()


def group(measure, surface: LossSurface) -> GaugeGroup:
    return surface_gauge(surface, layerwise=measure is minimum_sharpness)


@contextmanager
def rewritten(case: Case, gauge: GaugeGroup, move: Move) -> Iterator[None]:
    """The case's own model, rescaled for a while."""
    before = copy.deepcopy(case.model.state_dict())
    multiply(case.model, gauge.factors(move))
    yield
    case.model.load_state_dict(before)


def moved(case: Case, gauge: GaugeGroup, move: Move) -> Case:
    return replace(case, model=gauge.rescale(case.model, move))


def trace(case: Case) -> float:
    """Of the dense Hessian."""
    return float(dense_hessian(case).trace())


def mlp(*values: list[list[float]], bias: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for rows in values:
        weight = torch.tensor(rows, dtype=torch.float64)
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias).double()
        layer.weight = nn.Parameter(weight)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def regression(model: nn.Module, inputs: list[list[float]]) -> Case:
    x = torch.tensor(inputs, dtype=torch.float64)
    return Case(model, "mse", F.mse_loss, x, torch.zeros_like(model(x).detach()))


# -- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize(("a", "b"), [(2.0, 3.0), (20.0, 0.3), (1e-30, 6e30), (1e30, 6e-30)])
def test_two_weights(measure, a, b):
    """2b² and 2a²: twice the root of their product, 4ab = 24."""
    found = measure(two_weights(a, b))
    assert found.value == pytest.approx(24, rel=1e-14)
    assert found.details["as it is"] == pytest.approx(2 * a**2 + 2 * b**2, rel=1e-14)
    assert found.details["gain"] == pytest.approx((2 * a**2 + 2 * b**2) / 24, rel=1e-13)
    assert found.exact
    assert found.converged
    assert found.bound is None
    assert found.details["gap"] < 1e-20


def test_two_units_by_hand():
    """x = (1, 2) into b₁ relu(a₁x₁) + b₂ relu(a₂x₂), one output, target 0: units do not mix.

    h(a₁) = 2b₁², h(b₁) = 2a₁², h(a₂) = 8b₂², h(b₂) = 8a₂²; the weights that are zero have
    h(a₁₂) = 2·4b₁² and h(a₂₁) = 2b₂². By units: 2√(10b₁² · 2a₁²) + 2√(10b₂² · 8a₂²).
    """
    case = regression(mlp([[3.0, 0.0], [0.0, 5.0]], [[7.0, 0.5]]), [[1.0, 2.0]])
    one, two = np.sqrt(10 * 49 * 2 * 9), np.sqrt(10 * 0.25 * 8 * 25)
    found = minimum_sharpness_nodewise(case.surface())
    assert found.value == pytest.approx(2 * (one + two), rel=1e-13)
    assert found.layers == pytest.approx({"0.weight": one + two, "2.weight": one + two}, rel=1e-12)
    by_layers = 2 * np.sqrt((10 * 49 + 10 * 0.25) * (2 * 9 + 8 * 25))
    assert minimum_sharpness(case.surface()).value == pytest.approx(by_layers, rel=1e-13)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_chains_without_biases_have_a_closed_form(depth):
    torch.manual_seed(depth)
    layers = [m for _ in range(depth) for m in (nn.Linear(3, 3, bias=False), nn.LeakyReLU())]
    model = nn.Sequential(*layers[:-1]).double()
    case = Case(model, "mse", F.mse_loss, torch.randn(6, 3).double(), torch.randn(6, 3).double())
    traces = [
        float(b.trace())
        for b in dense_hessian(case).unfold(0, 9, 9).unfold(1, 9, 9).diagonal().permute(2, 0, 1)
    ]
    found = minimum_sharpness(case.surface())
    assert found.value == pytest.approx(depth * np.prod(traces) ** (1 / depth), rel=1e-12)
    shares = list(found.layers.values())
    assert shares == pytest.approx([found.value / depth] * depth, rel=1e-11)


def test_weight_decay_adds_the_same_everywhere():
    surface = build("mlp").surface(weight_decay=0.25)
    for measure in MEASURES:
        plain = measure(build("mlp").surface()).value
        assert measure(surface).value == pytest.approx(plain + 0.25 * surface.size, rel=1e-12)


# -- against real Hessians -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", FEW)
def test_another_optimiser_finds_the_same(name, measure):
    case, surface = shared(name)
    gauge = group(measure, surface)
    found = measure(surface)
    diagonal = torch.split(
        dense_hessian(case).diagonal(), [p.numel() for p in case.model.parameters()]
    )
    names = [n for n, _ in case.model.named_parameters()]

    def value(logs: np.ndarray) -> float:
        factors = gauge.factors(Move(torch.from_numpy(logs)))
        total = 0.0
        for n, h, p in zip(names, diagonal, case.model.parameters(), strict=True):
            total += float((h.view(p.shape) / factors.get(n, torch.ones(())).square()).sum())
        return total

    best = minimize(value, np.zeros(gauge.dim), method="BFGS", options={"gtol": 1e-9})
    assert found.value == pytest.approx(best.fun, rel=1e-10)
    # And the trace really is that there.
    there = moved(case, gauge, Move(torch.from_numpy(best.x)))
    assert trace(there) == pytest.approx(found.value, rel=1e-8)
    assert found.details["as it is"] == pytest.approx(trace(case), rel=1e-10)
    for seed in range(100):
        move = gauge.sample(generator=generator(seed), log2_range=2, powers_of_two=False)
        assert value(move.log2.numpy()) >= found.value
        assert value(best.x + 1e-3 * move.log2.numpy()) >= found.value * (1 - 1e-14)


@pytest.mark.parametrize("name", EXACT)
def test_units_reach_at_most_what_layers_reach(name):
    _, surface = shared(name)
    by_units, by_layers = minimum_sharpness_nodewise(surface), minimum_sharpness(surface)
    whole = hessian_trace(surface).value
    assert by_units.value <= by_layers.value * (1 + 1e-13) <= whole * (1 + 1e-12)
    assert by_units.exact
    assert by_layers.exact
    assert by_layers.value > 0


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", ["mlp", "residual with batch-norm", "gated", "attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_give_the_same_bits(name, measure, dtype):
    case, surface = shared(name, dtype)
    gauge = group(measure, surface)
    before = measure(surface, generator=generator())
    for seed in range(3):
        with rewritten(case, gauge, gauge.sample(generator=generator(seed), log2_range=6)):
            after = measure(surface, generator=generator())
        assert after.value == before.value
        assert after.layers == before.layers


@pytest.mark.parametrize("measure", MEASURES)
def test_factors_of_any_size(measure):
    case, surface = shared("mlp")
    gauge = group(measure, surface)
    before = measure(surface).value
    with rewritten(case, gauge, gauge.move(10.0 ** torch.linspace(-15, 15, gauge.dim).double())):
        after = measure(surface).value
    assert after == pytest.approx(before, rel=1e-12)


# -- infima that are not attained ----------------------------------------------------------------


def test_a_dead_unit_costs_nothing():
    """Unit 1 is never on: nothing enters or leaves with curvature."""
    alive = regression(mlp([[3.0]], [[7.0]]), [[1.0]])
    dead = regression(mlp([[3.0], [-1.0]], [[7.0, 4.0]]), [[1.0]])
    for measure in MEASURES:
        found = measure(dead.surface())
        assert found.value == measure(alive.surface()).value
        assert found.notes == ()


def test_curvature_on_one_side_only():
    """b = (7, 0): unit 1 can be made small at no cost, h(b₂) = 2·(a₂x)² goes with it."""
    whole = regression(mlp([[3.0]], [[7.0]]), [[1.0]])
    case = regression(mlp([[3.0], [2.0]], [[7.0, 0.0]]), [[1.0]])
    found = minimum_sharpness_nodewise(case.surface())
    assert found.value == minimum_sharpness_nodewise(whole.surface()).value
    (note,) = found.notes
    assert note.startswith(
        "the infimum is not attained: scales run off to zero or infinity (1 of 2)"
    )
    assert found.converged
    # By layers it cannot go alone: 2·7² enters, 2·(9 + 4) leaves.
    expected = 2 * np.sqrt(2 * 49 * 2 * 13)
    assert minimum_sharpness(case.surface()).value == pytest.approx(expected, rel=1e-13)


def test_nothing_leaves_the_last_unit():
    case = regression(mlp([[3.0]], [[2.0]], [[0.0]]), [[1.0]])
    for measure in MEASURES:
        found = measure(case.surface())
        assert found.value == 0
        assert "(1 of 2)" in found.notes[0]  # Only the last weight has curvature, 2 · (3 · 2)².
        assert found.details["as it is"] == 72
    gauge = find_gauge(case.model, case.inputs)
    assert trace(moved(case, gauge, gauge.move([1.0, 2.0**-20]))) == 72 * 2.0**-40


def test_again_and_again():
    """Once a unit without curvature on one side has run off, so does the next one."""
    model = mlp([[3.0]], [[2.0]], [[5.0]], [[1.0]])
    gauge = find_gauge(model, torch.ones(2, 1).double())
    sizes = {"0.weight": 7.0, "2.weight": 11.0, "4.weight": 13.0, "6.weight": 0.0}
    full = lambda values: {n: torch.full((1, 1), h).double() for n, h in values.items()}  # noqa: E731
    found = smallest_trace(gauge, full(sizes))
    assert (sum(found.shares.values()), found.running) == (0.0, 3)
    assert all((found.factors[name] == 0).all() for name in ("0.weight", "2.weight", "4.weight"))
    found = smallest_trace(gauge, full(sizes | {"6.weight": 3.0}))
    assert found.running == 0
    assert sum(found.shares.values()) == pytest.approx(4 * (7 * 11 * 13 * 3) ** 0.25, rel=1e-14)


def test_exponents_of_any_kind_are_left_out_by_a_linear_program():
    """A product of two units: only both sides together can vanish."""
    case = build("gated")
    with torch.no_grad():
        case.model.matrix[0] = 0.0  # unit 0 leads nowhere: its scale and shift cost something
    found = minimum_sharpness_nodewise(case.surface())
    assert "not attained" in found.notes[0]
    smaller = copy.deepcopy(case.model)
    kept = [1, 2, 3, 4]
    for layer in (smaller.value, smaller.gate):
        layer.weight = nn.Parameter(layer.weight.detach()[kept])
        layer.bias = nn.Parameter(layer.bias.detach()[kept])
    for name in ("scale", "shift", "matrix"):
        setattr(smaller, name, nn.Parameter(getattr(case.model, name).detach()[kept]))
    smaller.slope.weight = nn.Parameter(case.model.slope.weight.detach()[kept])
    rest = minimum_sharpness_nodewise(replace(case, model=smaller).surface())
    assert found.value == pytest.approx(rest.value, rel=1e-12)


def test_units_that_hang_on_each_other_only():
    """a → b and b → a without an outside: one scale of the two is of no use."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.mix, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            return self.head(h + self.mix(h))

    torch.manual_seed(0)
    model = Stream().double()
    gauge = find_gauge(model, torch.randn(2, 2).double())
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    mix = torch.tensor([[5.0, 2.0], [32.0, 7.0]], dtype=torch.float64)
    found = smallest_trace(gauge, zeros | {"mix.weight": mix})
    assert sum(found.shares.values()) == pytest.approx(5 + 7 + 2 * 8, rel=1e-14)
    assert found.running == 0


# -- what is not exact ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gelu", "tied weights"])
def test_without_a_gauge_it_is_the_trace(name):
    case, surface = shared(name)
    expected = trace(case)
    for measure in MEASURES:
        found = measure(surface, generator=generator(), probes=400)
        assert abs(found.value - expected) < 5 * found.stderr
        assert 0 < found.stderr < 0.2 * found.value
        assert not found.exact
        assert found.details["scales"] == 0


@pytest.mark.parametrize("measure", MEASURES)
def test_estimated_diagonals_lead_near_the_exact_infimum(measure):
    case, surface = shared("attention")
    gauge = group(measure, surface)
    parts = dense_hessian(case).diagonal().split([p.numel() for p in case.model.parameters()])
    named = zip(case.model.named_parameters(), parts, strict=True)
    exact = smallest_trace(gauge, {n: h.view(p.shape) for (n, p), h in named})
    found = measure(surface, generator=generator(), probes=2000)
    assert found.value == pytest.approx(sum(exact.shares.values()), abs=5 * found.stderr, rel=2e-2)


def test_negative_sums_are_clipped_and_told():
    case, surface = shared("mlp")
    gauge = surface_gauge(surface, layerwise=False)
    diagonals = {n: torch.ones_like(p) for n, p in case.model.named_parameters()}
    diagonals["0.bias"] = -100 * torch.ones(5)
    found = smallest_trace(gauge, diagonals)
    assert found.clipped == 5
    assert sum(found.shares.values()) > 0


# -- sharing and errors --------------------------------------------------------------------------


def test_the_gauge_is_read_once_and_outlives_a_change_of_weights():
    case = build("mlp")
    surface = case.surface()
    minimum_sharpness(surface)
    gauge = surface_gauge(surface, layerwise=False)
    with torch.no_grad():
        case.model[0].weight.mul_(2)
    minimum_sharpness_nodewise(surface)
    assert surface_gauge(surface, layerwise=False) is gauge


def test_both_measures_share_their_products():
    surface = build("attention").surface()
    report = fg.measure(surface, measures=["minimum_sharpness", "minimum_sharpness_nodewise"])
    assert [report[m.__name__].matvecs for m in MEASURES] == [48, 0]


@pytest.mark.parametrize("measure", MEASURES)
def test_what_it_refuses(measure):
    with pytest.raises(ValueError, match=r"`0.weight` cannot be swept .*gelu.* needs a generator"):
        measure(build("gelu").surface())
    with pytest.raises(ValueError, match=r"`probes=1` gives no standard error; use at least 2"):
        measure(build("mlp").surface(), probes=1)
    with pytest.raises(TypeError, match=rf"`{measure.__name__}` measures a LossSurface"):
        measure(nn.Linear(2, 2))
