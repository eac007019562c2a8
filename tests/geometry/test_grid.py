"""Every cell of geometry × functional against its definition, written out densely."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from cases import CASES, Case, build
from reference import dense_blocks, dense_hessian, holds_smallest, loss_function, theta
from scipy.optimize import minimize
from torch import Generator, Tensor

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.estimators.density import spectral_density
from flatgauge.estimators.eigenvalues import power_method
from flatgauge.estimators.estimate import Estimate
from flatgauge.geometry import GEOMETRIES, Diagonal, chart
from flatgauge.geometry.functionals import FUNCTIONALS, cell, functional
from flatgauge.measures import registry, riemannian_max_eigenvalue
from flatgauge.surface.examples import bowl, two_weights

DIAGONAL = ("weights", "per tensor", "per weight")


def source(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def units(case: Case, geometry: str, *, layers: bool = False) -> Tensor:
    """The diagonal of D, literally."""
    found = []
    for name, parameter in case.model.named_parameters():
        value = parameter.detach()
        unit = {
            "weights": torch.ones_like(value),
            "per tensor": value.square().sum().sqrt() * torch.ones_like(value),
            "per weight": value.abs(),
        }[geometry]
        is_layer = name.endswith("weight") and value.dim() > 1
        found.append((unit if is_layer or not layers else 0 * unit).reshape(-1))
    return torch.cat(found)


@cache
def written_out(name: str) -> tuple[Case, LossSurface, Tensor]:
    case = build(name)
    return case, case.surface(), dense_hessian(case)


@pytest.mark.parametrize("parameters", ["all", "layers"])
@pytest.mark.parametrize("geometry", DIAGONAL)
@pytest.mark.parametrize("name", CASES)
def test_top_eigenvalue_and_trace_are_those_of_d_h_d(name, geometry, parameters):
    case, surface, hessian = written_out(name)
    diagonal = units(case, geometry, layers=parameters == "layers")
    scaled = diagonal[:, None] * hessian * diagonal
    spectrum = torch.linalg.eigvalsh(scaled)
    where = {"geometry": geometry, "parameters": parameters}
    top = cell(surface, **where, functional="top eigenvalue", tolerance=1e-6, generator=source())
    assert abs(top.value - spectrum[-1].item()) <= top.bound + 1e-12
    assert holds_smallest(top.details, spectrum[0].item())
    for method in ("sweep", "hutch++"):
        total = cell(surface, **where, functional="trace", method=method, probes=surface.size)
        assert total.exact
        assert total.value == pytest.approx(scaled.trace().item(), rel=1e-10)
    assert ("parameters" in total.options) == (parameters == "layers")
    chosen = chart(surface, geometry, parameters)
    torch.testing.assert_close(chosen.curvature().dense(), scaled, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["mlp", "conv and max-pool", "residual with batch-norm"])
def test_balanced_cells_are_those_of_the_balanced_model(name):
    case = build(name)
    even = LossSurface(fg.balance(case.model, case.inputs), case.loss, (case.inputs, case.targets))
    for kind in FUNCTIONALS:
        here = cell(case.surface(), geometry="balanced", functional=kind, generator=source())
        there = cell(even, geometry="weights", functional=kind, generator=source())
        assert here.value == pytest.approx(there.value, rel=1e-9)
        assert any("balanced gauge" in note for note in here.notes)


@pytest.mark.parametrize("geometry", DIAGONAL)
@pytest.mark.parametrize("name", ["mlp", "mlp without biases", "leaky relu with mse", "gelu"])
def test_worst_case_is_what_another_optimiser_finds(name, geometry):
    case = build(name)
    loss, point, diagonal = loss_function(case), theta(case), units(case, geometry)
    radius = {"weights": 0.3, "per tensor": 0.1, "per weight": 0.5}[geometry]

    def negative(flat: np.ndarray) -> tuple[float, np.ndarray]:
        u = torch.from_numpy(flat).requires_grad_()
        value = loss(point + diagonal * u)
        (gradient,) = torch.autograd.grad(value, u)
        return -value.item(), -gradient.numpy()

    ball = {
        "type": "ineq",
        "fun": lambda u: radius**2 - u @ u,
        "jac": lambda u: -2 * u,
    }
    rng = np.random.default_rng(0)
    best = -math.inf
    for _ in range(3):
        start = rng.normal(size=len(point))
        start *= 0.9 * radius / np.linalg.norm(start)
        found = minimize(negative, start, jac=True, constraints=ball, method="SLSQP")
        if np.linalg.norm(found.x) <= radius * (1 + 1e-6):
            best = max(best, -found.fun)
    base = loss(point).item()
    rise = (best - base) / (1 if geometry == "per weight" else 1 + base)
    estimate = cell(
        case.surface(),
        geometry=geometry,
        functional="worst case in a ball",
        epsilon=radius,
        generator=source(),
    )
    assert estimate.lower_bound
    assert estimate.value >= 0.98 * rise
    # It is a rise that really occurs within the ball: a generous scan finds nothing far above.
    assert estimate.value <= 1.05 * max(rise, estimate.details["start 0"])


def test_worst_case_and_its_predictions_at_the_bottom_of_a_bowl():
    estimate = cell(
        bowl([1.0, 9.0, 4.0]),
        geometry="weights",
        functional="worst case in a ball",
        epsilon=0.2,
        generator=source(),
    )
    assert estimate.details["second order"] == pytest.approx(9 * 0.2**2 / 2, rel=1e-3)
    assert estimate.details["first order"] == 0
    assert estimate.value == pytest.approx(estimate.details["second order"], rel=1e-3)
    assert estimate.options == {"epsilon": 0.2, "starts": 3, "steps": 10}


def test_worst_case_where_nothing_can_move_is_zero():
    for geometry in ("per tensor", "per weight"):  # All weights of the bowl are zero.
        estimate = cell(
            bowl([1.0, 2.0]),
            geometry=geometry,
            functional="worst case in a ball",
            generator=source(),
        )
        assert estimate.value == 0


@pytest.mark.parametrize("geometry", ["per tensor", "per weight"])
def test_expectation_by_hand(geometry):
    """The loss is 36 (1 + su)² (1 + sv)², and E (1 + su)² = 1 + s²."""
    sigma = 0.3
    expected = 36 * ((1 + sigma**2) ** 2 - 1)
    for seed in range(5):
        estimate = cell(
            two_weights(2.0, 3.0),
            geometry=geometry,
            functional="expectation",
            sigma=sigma,
            pairs=300,
            generator=source(seed),
        )
        # A negative a is cut off by the ReLU, which is rare: a fraction of a per mille.
        assert abs(estimate.value - expected) < 5 * estimate.stderr
        assert estimate.stderr < 0.2 * expected


@pytest.mark.parametrize("geometry", DIAGONAL)
def test_expectation_is_to_second_order_half_the_noise_times_the_curvature(geometry):
    case = build("gelu")  # Smooth: the kinks of a ReLU add to the mean.
    diagonal = dense_hessian(case).diagonal()
    scales = units(case, geometry).square()
    if geometry == "per tensor":  # Noise of expected squared length σ² ‖θ_i‖² on every tensor.
        scales = scales / torch.cat(
            [torch.full((p.numel(),), p.numel()) for p in case.model.parameters()]
        )
    sigma = 1e-2
    second = 0.5 * sigma**2 * float((scales * diagonal).sum())
    estimate = cell(
        case.surface(),
        geometry=geometry,
        functional="expectation",
        sigma=sigma,
        pairs=2000,
        generator=source(),
    )
    assert abs(estimate.details["signed"] - second) < 5 * estimate.stderr
    assert estimate.stderr < 0.3 * abs(second)


@pytest.mark.parametrize("geometry", DIAGONAL)
def test_the_spectral_density_of_a_chart_has_the_moments_of_d_h_d(geometry):
    case = build("mlp")
    diagonal = units(case, geometry)
    scaled = diagonal[:, None] * dense_hessian(case) * diagonal
    found = spectral_density(
        chart(case.surface(), geometry).curvature(), probes=40, steps=30, generator=source()
    )
    low, high = torch.linalg.eigvalsh(scaled)[[0, -1]].tolist()
    assert found.extremes == (pytest.approx(low, rel=1e-6), pytest.approx(high, rel=1e-6))
    for order in (1, 2):
        exact = torch.linalg.matrix_power(scaled, order).trace().item() / len(scaled)
        moment = found.moment(order)
        assert abs(moment.value - exact) < 5 * moment.stderr


NAMED = [
    item for item in registry if item.geometry in GEOMETRIES and item.functional in FUNCTIONALS
]


@pytest.mark.parametrize("item", NAMED, ids=lambda item: item.name)
def test_named_measures_are_cells_with_their_defaults(item):
    surface = build("mlp").surface()
    named = item.function(surface, generator=source())
    found = cell(surface, geometry=item.geometry, functional=item.functional, generator=source())
    assert named.value == found.value
    assert list(named.options.values()) == list(found.options.values())


def test_every_cell_of_the_grid_has_a_name():
    named = {(item.geometry, item.functional) for item in NAMED}
    assert named >= {(g, f) for g in DIAGONAL for f in FUNCTIONALS}
    for item in NAMED:
        if item.geometry == "weights":
            assert registry[f"balanced:{item.name}"].gauge == "balanced"


def test_over_layers_the_per_tensor_trace_is_kappa():
    surface = build("conv and max-pool").surface()
    traced = cell(surface, geometry="per tensor", functional="trace", parameters="layers")
    assert traced.value == pytest.approx(fg.measures.kappa_trace_sum(surface).value, rel=1e-12)
    assert traced.data_stderr == pytest.approx(
        fg.measures.kappa_trace_sum(surface).data_stderr, rel=1e-9
    )


def test_a_new_geometry_and_a_new_functional_are_one_class_and_one_function():
    class Doubled(Diagonal):
        geometry = "doubled"
        epsilon = sigma = 0.1

        def units(self, value):
            return torch.full_like(value, 2.0)

        def share(self, value):
            return 4.0

    @functional("slope")
    def slope(chart, *, generator=None):
        return Estimate(float(chart.value_and_gradient(chart.origin)[1].norm()))

    try:
        surface = build("mlp").surface()
        plain = cell(surface, geometry="weights", functional="trace").value
        assert cell(surface, geometry="doubled", functional="trace").value == 4 * plain
        steep = cell(surface, geometry="doubled", functional="slope").value
        assert steep == pytest.approx(2 * surface.gradient().norm().item(), rel=1e-12)
    finally:
        del GEOMETRIES["doubled"], FUNCTIONALS["slope"]


def test_what_does_not_exist_is_told():
    surface = two_weights(2.0, 3.0)
    with pytest.raises(ValueError, match="no geometry 'flat'; the geometries are weights, per te"):
        cell(surface, geometry="flat", functional="trace")
    with pytest.raises(ValueError, match="no functional 'mean'; the functionals are top eigenv"):
        cell(surface, geometry="weights", functional="mean")
    with pytest.raises(ValueError, match=r"`parameters='weights'` must be 'all' .* or 'layers'"):
        cell(surface, geometry="weights", functional="trace", parameters="weights")
    with pytest.raises(ValueError, match="no layers; pass `parameters='all'`"):
        cell(surface, geometry="weights", functional="trace", parameters="layers")
    with pytest.raises(ValueError, match="`solver='arnoldi'` is unknown; use 'lanczos' or 'power'"):
        riemannian_max_eigenvalue(surface, solver="arnoldi", generator=source())


# -- signs of the spectrum, and the power method --------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "conv and max-pool", "residual with batch-norm"])
def test_the_whole_hessian_is_indefinite_while_its_layer_blocks_are_not(name):
    case = build(name)
    surface = case.surface()
    where = {"geometry": "weights", "functional": "top eigenvalue"}
    whole = cell(surface, **where, smallest=True, generator=source())
    spectrum = torch.linalg.eigvalsh(dense_hessian(case))
    assert spectrum[0] < -1e-3 * spectrum[-1]
    assert whole.details["smallest"] < -1e-3 * whole.value  # and it is reported
    assert holds_smallest(whole.details, spectrum[0].item())
    for block in dense_blocks(case).values():
        values = torch.linalg.eigvalsh(block)
        assert values[0] > -1e-9 * max(values[-1].item(), 1e-9)


def test_the_power_method_finds_what_lanczos_finds():
    surface = build("leaky relu with mse").surface()
    for geometry in DIAGONAL:
        where = {"geometry": geometry, "functional": "top eigenvalue", "generator": source()}
        lanczos = cell(surface, **where, tolerance=1e-8)
        power = cell(surface, **where, solver="power", tolerance=1e-6, max_matvecs=5000)
        assert power.converged
        assert power.value == pytest.approx(lanczos.value, rel=1e-6)
        assert abs(power.value - lanczos.value) <= power.bound + 1e-9
        assert power.options["solver"] == "power"


def test_the_power_method_does_not_converge_where_the_largest_eigenvalue_is_negative():
    matrix = torch.diag(torch.tensor([-5.0, 3.0, 1.0]).double())
    run = power_method(matrix, tolerance=1e-6, generator=source())
    assert run.negative
    assert not run.converged
    assert run.value == pytest.approx(-5.0, rel=1e-9)
    assert run.change == pytest.approx(2.0, rel=1e-6)
    assert run.matvecs < 100  # It does not go on to the end.


def test_a_saddle_is_told_by_both_solvers():
    """L = a b at (1, 1): [[0, 1], [1, 0]] plus -a² makes λ_min the larger in size."""

    class Saddle(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x):
            return x * (self.w[0] * self.w[1] - self.w[0] ** 2)

    ones = torch.ones(2, 1).double()
    surface = LossSurface(Saddle(), lambda o, _: o.mean(), (ones, ones))
    smallest, largest = np.linalg.eigvalsh([[-2.0, 1.0], [1.0, 0.0]]) * 2  # D = ‖w‖ = √2
    lanczos = riemannian_max_eigenvalue(surface, generator=source())
    assert lanczos.value == pytest.approx(largest, rel=1e-9)
    assert lanczos.details["smallest"] == pytest.approx(smallest, rel=1e-9)
    assert any("not a minimum: the Hessian has an eigenvalue of" in n for n in lanczos.notes)
    power = riemannian_max_eigenvalue(surface, solver="power", generator=source())
    assert not power.converged
    assert power.value == pytest.approx(smallest, rel=1e-3)
    assert any("changes sign at every step" in note for note in power.notes)


def test_the_power_method_that_runs_out_of_products_says_so():
    matrix = torch.diag(torch.tensor([1.0, 0.999]).double())
    run = power_method(matrix, tolerance=1e-8, max_matvecs=5, generator=source())
    assert not run.converged
    assert not run.negative
    surface = build("mlp").surface()
    short = riemannian_max_eigenvalue(surface, solver="power", max_matvecs=2, generator=source())
    assert any("raise `max_matvecs`" in note for note in short.notes)
    with pytest.raises(ValueError, match="`tolerance=0` must lie between 0 and 1"):
        power_method(matrix, tolerance=0, generator=source())
