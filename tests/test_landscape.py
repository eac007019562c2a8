"""Landscapes in path space and in weights: against the definition, point by point."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import build
from torch import nn
from torch.func import functional_call

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.examples import two_weights
from flatgauge.path_space import paths_of


def literal(case, weights) -> float:
    output = functional_call(case.model, weights, (case.inputs,))
    return float(nn.functional.cross_entropy(output, case.targets))


@pytest.mark.parametrize("skeleton", ["strongest", "diagonal"])
@pytest.mark.parametrize("name", ["mlp", "conv and max-pool", "residual with batch-norm"])
def test_path_space_is_the_loss_of_the_weights_that_belong_to_moved_paths(name, skeleton):
    case = build(name)
    case.model.eval()
    surface = case.surface()
    paths = paths_of(surface, skeleton)
    sigma = 0.2 * paths.smallest
    found = fg.landscape(surface, dims=2, points=3, sigma=sigma, skeleton=skeleton, seed=3)
    first, second = found.directions
    for i, one in enumerate(found.ticks):
        for j, two in enumerate(found.ticks):
            weights = paths.to_weights(paths.values + one * first + two * second)
            assert found.loss[i, j] == pytest.approx(literal(case, weights), rel=1e-12)
    assert found.loss[1, 1] == surface.value()  # the way back is exact at the point itself
    assert found.options["skeleton"] == skeleton


def test_directions_are_normal_of_the_paper_s_size_and_the_same_for_a_seed():
    case = build("conv and max-pool")
    one, other = (fg.landscape(case.surface(), dims=1, points=3, seed=5) for _ in range(2))
    assert torch.equal(one.directions, other.directions)
    assert (one.loss == other.loss).all()
    assert float(one.directions.std()) == pytest.approx(0.05, rel=0.2)
    assert one.options["sigma"] == 0.05


def test_free_weights_keep_their_values():
    case = build("mlp")
    paths = fg.basis_paths(case.model, case.inputs)
    generator = torch.Generator().manual_seed(0)
    moved = paths.to_weights(
        paths.values + 0.05 * torch.randn(len(paths), generator=generator, dtype=torch.float64)
    )
    state = dict(case.model.named_parameters())
    for edge in paths.free:
        before = state[edge.name].detach().reshape(-1)[edge.index]
        assert moved[edge.name].reshape(-1)[edge.index] == before


def test_beyond_a_pole_is_marked():
    surface = two_weights(2.0, 3.0)  # L = v² at v = 6
    found = fg.landscape(surface, dims=1, points=5, sigma=20.0, seed=1)
    (step,) = found.directions[0].tolist()
    values = 6 + found.ticks * step
    assert (found.beyond == (values <= 0)).all()
    assert found.beyond.any()
    assert "beyond a pole" in found.notes[-1]
    # b stays 3: a negative path has a negative a, which the ReLU cuts off.
    assert np.allclose(found.loss, np.where(values > 0, values**2, 0.0))


def test_at_a_pole_the_loss_is_infinite():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False))
    for p in model.parameters():
        nn.init.constant_(p, 1.0)
    surface = LossSurface(model, "mse", (torch.ones(1, 1), torch.zeros(1, 2)))
    from flatgauge.geometry import PathValues

    chart = PathValues(surface)
    root = int(chart.paths.roots[0])
    u = chart.origin
    u[root] = -float(chart.paths.values[root])
    assert chart.anywhere(u) == float("inf")
    assert chart.value(u) == float("inf")


def test_weights_are_plain():
    case = build("mlp")
    surface = case.surface()
    found = fg.landscape(surface, space="weights", dims=1, points=3, sigma=0.1)
    ahead = surface.value(surface.point + found.directions[0])
    assert found.loss[2] == pytest.approx(ahead, rel=1e-12)
    assert found.loss[1] == surface.value()
    assert not found.beyond.any()


def test_the_frame_has_every_point():
    frame = fg.landscape(two_weights(2.0, 3.0), dims=2, points=3).to_frame()
    assert list(frame.columns) == ["t1", "t2", "loss", "beyond"]
    assert len(frame) == 9
    assert frame.loss.iloc[4] == 36.0


def test_invariant_under_powers_of_two():
    case = build("mlp")
    gauge = fg.find_gauge(case.model, case.inputs)
    move = gauge.sample(generator=torch.Generator().manual_seed(0))
    twin = LossSurface(gauge.rescale(case.model, move), case.loss, (case.inputs, case.targets))
    one, other = (fg.landscape(s, points=3, sigma=0.01) for s in (case.surface(), twin))
    assert (one.loss == other.loss).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"space": "moon"},
            "there is no space 'moon'; the spaces are basis_paths, weights, filters",
        ),
        ({"dims": 3}, "`dims=3` must be 1 or 2"),
        ({"points": 1}, "`points=1` must be a whole number, at least 2"),
        ({"seed": -1}, "`seed=-1` must be a whole number"),
        ({"extent": 0.0}, "`extent=0.0` must be a positive finite number"),
        ({"sigma": float("nan")}, "`sigma=nan` must be a positive finite number"),
        ({"skeleton": "weak"}, "`skeleton='weak'` is unknown"),
    ],
)
def test_errors_teach(options, message):
    with pytest.raises(ValueError, match=message):
        fg.landscape(two_weights(2.0, 3.0), **options)


def test_needs_a_surface():
    with pytest.raises(TypeError, match="`landscape` needs a LossSurface, but got a Linear"):
        fg.landscape(nn.Linear(1, 1))
