"""Flatness in the values of basis paths against dense Hessians of the reference."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from path_networks import GRAPHS, mlp
from path_reference import Paths
from torch import Generator, Tensor, nn

import flatgauge as fg
from flatgauge.measures import (
    basis_path_ratio,
    psi_epsilon_sharpness,
    psi_expected_sharpness,
    psi_max_eigenvalue,
    psi_trace,
)
from flatgauge.surface.examples import two_weights

MANY = [
    *((name, "strongest") for name in GRAPHS),
    *((name, "diagonal") for name in ("equal width", "mlp", "conv and max-pool", "crossroads")),
    *((name, "diagonal") for name in ("residual with batch-norm", "grouped and dilated conv")),
]
FEW = [
    ("mlp", "strongest"),
    ("mlp", "diagonal"),
    ("conv and batch-norm", "strongest"),
    ("pre-activation", "strongest"),
    ("leaky relu with mse", "strongest"),
]


def source(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@cache
def known(name: str, skeleton: str) -> tuple[fg.LossSurface, Paths]:
    """A surface that no test changes, with its reference."""
    graph = GRAPHS[name]()
    return graph.case.surface(), Paths(graph, skeleton)


@cache
def hessian(name: str, skeleton: str) -> Tensor:
    return known(name, skeleton)[1].hessian()


# -- trace -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "skeleton"), MANY)
def test_the_trace_is_that_of_the_dense_hessian(name, skeleton):
    surface, paths = known(name, skeleton)
    diagonal = hessian(name, skeleton).diagonal()
    estimate = psi_trace(surface, skeleton=skeleton)
    size = diagonal.abs().sum().item()
    assert estimate.exact
    assert estimate.stderr == 0
    assert estimate.value == pytest.approx(diagonal.sum().item(), rel=1e-10, abs=1e-10 * size)
    first_order = paths.second_derivatives()[1]
    assert estimate.details["first order"] == pytest.approx(first_order, rel=1e-9, abs=1e-10 * size)


@pytest.mark.parametrize(("name", "skeleton"), FEW)
def test_the_relative_trace_is_that_in_logarithms_of_values(name, skeleton):
    surface, paths = known(name, skeleton)
    diagonal = paths.relative_hessian().diagonal()
    estimate = psi_trace(surface, skeleton=skeleton, relative=True)
    assert estimate.value == pytest.approx(
        diagonal.sum().item(), rel=1e-10, abs=1e-10 * diagonal.abs().sum().item()
    )


def test_values_of_zero_do_not_move_relatively():
    graph = mlp()
    nn.init.zeros_(graph.case.model[4].bias)
    nn.init.zeros_(graph.case.model[2].bias)
    paths = Paths(graph, "strongest")
    assert (paths.values == 0).sum() == 7
    for relative, dense in ((True, paths.relative_hessian()), (False, paths.hessian())):
        estimate = psi_trace(graph.case.surface(), relative=relative)
        assert estimate.value == pytest.approx(dense.trace().item(), rel=1e-10)


def test_a_dead_unit_leaves_the_numbers_finite():
    graph = mlp()
    with torch.no_grad():
        graph.case.model[0].weight[3] = 0
        graph.case.model[0].bias[3] = 0
    surface, paths = graph.case.surface(), Paths(graph, "strongest")
    trace = psi_trace(surface)
    assert trace.value == pytest.approx(paths.hessian().trace().item(), rel=1e-10)
    assert any("left out" in note or "dropped" in note for note in trace.notes)


# -- top eigenvalue ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "skeleton"), FEW)
def test_the_top_eigenvalue_is_that_of_the_dense_hessian(name, skeleton):
    surface, _ = known(name, skeleton)
    spectrum = torch.linalg.eigvalsh(hessian(name, skeleton))
    top = psi_max_eigenvalue(surface, skeleton=skeleton, tolerance=1e-8, generator=source())
    assert abs(top.value - spectrum[-1].item()) <= top.bound + 1e-10 * spectrum.abs().max().item()
    assert top.bound <= 1e-8 * abs(top.value)


# -- by hand -----------------------------------------------------------------------------------


def test_two_weights_by_hand():
    """One path, v = ab = 6, and L = v²: trace and eigenvalue 2 in every gauge."""
    for surface in (two_weights(2.0, 3.0), two_weights(16.0, 0.375)):
        assert psi_trace(surface).value == pytest.approx(2.0, rel=1e-12)
        assert psi_trace(surface).details["first order"] == 0.0
        assert psi_trace(surface, relative=True).value == pytest.approx(4 * 36, rel=1e-12)
        top = psi_max_eigenvalue(surface, generator=source())
        assert top.value == pytest.approx(2.0, rel=1e-9)
        assert basis_path_ratio(surface).value == 1.0
        # Half of the smallest |u| is 3: from 36 up to (6 + 3)², over 1 + 36.
        worst = psi_epsilon_sharpness(surface, generator=source())
        assert worst.value == pytest.approx(45 / 37, rel=1e-9)
        assert worst.options["epsilon"] == pytest.approx(3.0, rel=1e-12)
        noisy = psi_expected_sharpness(surface, sigma=0.1, generator=source())
        assert abs(noisy.value - 0.01) < 5 * noisy.stderr + 1e-9  # E (6 + 0.1 z)² - 36


# -- worst case --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "skeleton"), FEW[:3])
def test_the_worst_case_beats_what_the_reference_finds_at_random(name, skeleton):
    surface, paths = known(name, skeleton)
    estimate = psi_epsilon_sharpness(surface, skeleton=skeleton, generator=source())
    radius = estimate.options["epsilon"]
    assert radius == pytest.approx(paths.smallest / 2, rel=1e-12)
    values, here = paths.values, paths.loss(paths.values).item()
    directions = [paths.gradient(), *torch.randn(50, len(values), generator=source()).double()]
    rises = [paths.loss(values + radius * d / d.norm()).item() - here for d in directions]
    assert estimate.lower_bound
    assert estimate.value >= max(rises) / (1 + here) * (1 - 1e-9)


def test_beyond_the_smallest_unit_the_worst_case_is_infinite():
    surface, paths = known("mlp", "strongest")
    for factor in (1.0, 2.0):
        estimate = psi_epsilon_sharpness(
            surface, epsilon=factor * paths.smallest * (1 + 1e-9), generator=source()
        )
        assert estimate.value == math.inf
        assert estimate.notes
    within = psi_epsilon_sharpness(surface, epsilon=0.99 * paths.smallest, generator=source())
    assert math.isfinite(within.value)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan])
def test_a_radius_must_be_positive(epsilon):
    with pytest.raises(ValueError, match="epsilon"):
        psi_epsilon_sharpness(known("mlp", "strongest")[0], epsilon=epsilon, generator=source())


# -- expectation -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "skeleton"), FEW[:3])
def test_small_noise_sees_half_the_trace(name, skeleton):
    surface, paths = known(name, skeleton)
    sigma = 1e-3 * paths.smallest
    estimate = psi_expected_sharpness(surface, skeleton=skeleton, sigma=sigma, generator=source())
    expected = abs(sigma**2 / 2 * hessian(name, skeleton).trace().item())
    assert abs(estimate.value - expected) < 5 * estimate.stderr + 0.05 * expected
    assert estimate.stderr < expected


def test_noise_is_cut_off_before_the_poles():
    """With noise far above the smallest |u| the mean would be infinite; truncated it is not."""
    surface, paths = known("mlp", "strongest")
    estimate = psi_expected_sharpness(surface, sigma=10 * paths.smallest, generator=source())
    assert math.isfinite(estimate.value)
    assert math.isfinite(estimate.stderr)


# -- ratio -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "skeleton"), FEW)
def test_the_ratio_of_the_largest_to_the_smallest_value(name, skeleton):
    surface, paths = known(name, skeleton)
    sizes = paths.values.abs()
    expected = (sizes.max() / sizes.min()).item()
    assert basis_path_ratio(surface, skeleton=skeleton).value == pytest.approx(expected, rel=1e-10)


# -- what does not change them -----------------------------------------------------------------


@pytest.mark.parametrize(("name", "skeleton"), FEW[1:4])
def test_power_of_two_rescalings_change_no_bit(name, skeleton):
    case = GRAPHS[name]().case
    gauge = fg.find_gauge(case.model, case.inputs)
    other = gauge.rescale(case.model, gauge.sample(generator=source(), powers_of_two=True))
    surfaces = [
        fg.LossSurface(m, case.loss, (case.inputs, case.targets)) for m in (case.model, other)
    ]
    options = {"skeleton": skeleton}
    for measure in (psi_trace, basis_path_ratio):
        assert len({measure(surface, **options).value for surface in surfaces}) == 1
    for measure in (psi_max_eigenvalue, psi_epsilon_sharpness, psi_expected_sharpness):
        values = {measure(surface, generator=source(), **options).value for surface in surfaces}
        assert len(values) == 1


def test_the_diagonal_depends_on_the_order_of_hidden_units():
    case = mlp().case
    order = torch.tensor([3, 0, 4, 2, 1])
    other = mlp().case
    with torch.no_grad():
        other.model[0].weight.copy_(case.model[0].weight[order])
        other.model[0].bias.copy_(case.model[0].bias[order])
        other.model[2].weight.copy_(case.model[2].weight[:, order])
    here, there = case.surface(), other.surface()
    assert psi_trace(there).value == pytest.approx(psi_trace(here).value, rel=1e-10)
    diagonal = psi_trace(here, skeleton="diagonal")
    assert psi_trace(there, skeleton="diagonal").value != pytest.approx(diagonal.value, rel=1e-2)


def test_an_unknown_skeleton_lists_the_two():
    with pytest.raises(ValueError, match=r"strongest.*diagonal|diagonal.*strongest"):
        psi_trace(known("mlp", "strongest")[0], skeleton="longest")
