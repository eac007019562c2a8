"""Landscapes in path space and in weights: against the definition, point by point."""

from __future__ import annotations

import copy
import json
import re
import tracemalloc

import numpy as np
import pytest
import torch
from cases import build
from torch import nn
from torch.func import functional_call

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.analysis.landscapes import SPACES
from flatgauge.analysis.landscapes.checkpoint import LandscapeCheckpoint
from flatgauge.analysis.landscapes.grid import _FILLED, _fill_grid, check_points
from flatgauge.surface.examples import bowl, two_weights
from flatgauge.symmetry.basis_paths import surface_paths


def literal(case, weights) -> float:
    output = functional_call(case.model, weights, (case.inputs,))
    return float(nn.functional.cross_entropy(output, case.targets))


@pytest.mark.parametrize("skeleton", ["strongest", "diagonal"])
@pytest.mark.parametrize("name", ["mlp", "conv and max-pool", "residual with batch-norm"])
def test_path_space_is_the_loss_of_the_weights_that_belong_to_moved_paths(name, skeleton):
    case = build(name)
    case.model.eval()
    surface = case.surface()
    paths = surface_paths(surface, skeleton)
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
    found = fg.landscape(surface, dims=1, points=5, sigma=20.0, extent=1.0, seed=1)
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


def moved(surface, step):
    return surface.split(surface.point + step)


@pytest.mark.parametrize("space", ["weights", "filters", "layers"])
def test_straight_spaces_are_the_loss_at_moved_weights(space):
    case = build("residual with batch-norm")
    case.model.eval()
    surface = case.surface()
    found = fg.landscape(surface, space=space, dims=2, points=3, extent=0.5, seed=2)
    first, second = found.directions
    for i, one in enumerate(found.ticks):
        for j, two in enumerate(found.ticks):
            weights = moved(surface, one * first + two * second)
            assert found.loss[i, j] == pytest.approx(literal(case, weights), rel=1e-11)
    assert found.loss[1, 1] == surface.value()
    output = functional_call(case.model, moved(surface, 0.5 * first), (case.inputs,))
    right = (output.argmax(1) == case.targets).double().mean()
    assert found.accuracy[2, 1] == pytest.approx(float(right))


def test_filters_have_the_length_of_the_weights_and_the_rest_stays():
    case = build("residual with batch-norm")
    surface = case.surface()
    found = fg.landscape(surface, space="filters", dims=1, points=2)
    parts = surface.split(found.directions[0])
    for name, weight in surface.params.items():
        if weight.dim() < 2:
            assert not parts[name].any()
        else:
            lengths = [p.flatten(1).norm(dim=1) for p in (parts[name], weight)]
            torch.testing.assert_close(*lengths)
    assert "have no filters (biases, norms) and do not move" in found.notes[0]


def test_layers_have_the_length_of_the_weights_biases_too():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    nn.init.zeros_(model[1].bias)
    surface = LossSurface(model, "cross_entropy", (torch.ones(2, 4), torch.tensor([0, 1])))
    found = fg.landscape(surface, space="layers", dims=1, points=2)
    parts = surface.split(found.directions[0])
    for name, weight in surface.params.items():
        torch.testing.assert_close(parts[name].norm(), weight.norm())
    assert found.notes == ("1 of 4 parameter tensors are zero and do not move: 1.bias",)
    assert np.allclose(found.ticks, [-1, 1])


@pytest.mark.parametrize("space", ["filters", "layers"])
def test_normalised_spaces_do_not_see_layerwise_rescaling(space):
    case = build("mlp without biases")
    gauge = fg.find_gauge(case.model, case.inputs).layerwise()
    move = gauge.sample(generator=torch.Generator().manual_seed(0))
    twin = LossSurface(gauge.rescale(case.model, move), case.loss, (case.inputs, case.targets))
    one, other = (fg.landscape(s, space=space, points=3) for s in (case.surface(), twin))
    assert (one.loss == other.loss).all()
    plain = (fg.landscape(s, space="weights", points=3).loss for s in (case.surface(), twin))
    assert not np.allclose(*plain, rtol=1e-3)


def test_curvature_along_eigenvectors_is_the_eigenvalue():
    surface = bowl([3.0, 1.0, 0.5])
    found = fg.landscape(surface, space="eigenvectors", dims=2, points=3, extent=0.5)
    assert found.details == pytest.approx({"eigenvalue 1": 3.0, "eigenvalue 2": 1.0}, rel=1e-4)
    # ½ λ t² along each, and their sum between them: the loss is a bowl.
    assert found.loss[2, 1] == pytest.approx(0.5 * 3.0 * 0.25, rel=1e-4)
    assert found.loss[1, 0] == pytest.approx(0.5 * 1.0 * 0.25, rel=1e-4)
    assert found.loss[0, 2] == pytest.approx(0.5 * 4.0 * 0.25, rel=1e-4)
    assert np.allclose(found.directions @ found.directions.T, np.eye(2), atol=1e-6)


def test_second_differences_along_an_eigenvector_of_a_network():
    case = build("gelu")
    found = fg.landscape(case.surface(), space="eigenvectors", dims=1, points=3, extent=1e-3)
    bend = (found.loss[0] - 2 * found.loss[1] + found.loss[2]) / 1e-6
    assert bend == pytest.approx(found.details["eigenvalue 1"], rel=1e-3)


def test_default_extents():
    surface = bowl([3.0, 1.0])
    ends = {
        s: fg.landscape(surface, space=s, dims=1, points=2).ticks[1]
        for s in ("weights", "eigenvectors")
    }
    assert ends == {"weights": 1.0, "eigenvectors": 0.5}
    assert fg.landscape(two_weights(2.0, 3.0), dims=1, points=2).ticks[1] == 1.0


def test_by_default_path_space_is_seen_up_to_the_nearest_pole():
    case = build("mlp")
    surface = case.surface()
    near = fg.landscape(surface, points=2, sigma=1.0)
    far = fg.landscape(surface, points=9, sigma=1.0, extent=1.06 * near.options["extent"])
    assert near.options["extent"] < 1
    assert not near.beyond.any()
    assert far.beyond.any()


def test_the_line_to_another_model():
    one, other = two_weights(2.0, 3.0), two_weights(0.0, 1.0)
    found = fg.landscape(one, to=other, points=7)
    assert found.ticks.tolist() == [-0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
    t = found.ticks
    assert np.allclose(found.loss, ((2 - 2 * t).clip(min=0) * (3 - 2 * t)) ** 2)
    assert (found.space, found.dims) == ("between", 1)
    assert found.marks == {"model": (0.0,), "to": (1.0,)}


def test_both_ends_are_the_models_themselves_to_the_last_bit():
    case = build("mlp")
    case.model.eval()
    other = copy.deepcopy(case.model)
    for value in other.parameters():
        value.data.mul_(1.37)
    end = LossSurface(other, case.loss, (case.inputs, case.targets))
    for to in (other, end, other.state_dict()):
        found = fg.landscape(case.surface(), to=to, points=10)
        ends = dict(zip(found.ticks.tolist(), found.loss.tolist(), strict=True))
        assert (ends[0.0], ends[1.0]) == (case.surface().value(), end.value())


def test_the_plane_through_three_models():
    surface = bowl([1.0, 4.0])  # at (0, 0)
    ends = [{"weight": torch.tensor([[2.0, 0.0]])}, {"weight": torch.tensor([[0.0, 1.0]])}]
    found = fg.landscape(surface, to=ends, points=7)
    x, y = np.meshgrid(found.ticks, found.ticks, indexing="ij")
    assert np.allclose(found.loss, 0.5 * ((2 * x) ** 2 + 4 * y**2))
    assert found.marks == {"model": (0, 0), "to[0]": (1, 0), "to[1]": (0, 1)}


def test_buffers_that_stay_are_told():
    case = build("residual with batch-norm")
    other = copy.deepcopy(case.model)
    other.norm.running_mean += 1.0
    found = fg.landscape(case.surface(), to=other, points=2)
    assert (
        "1 buffers or frozen parameters of `to` differ (such as norm.running_mean)"
        in found.notes[0]
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"to": nn.Linear(2, 1)}, ValueError, "`weight` of `to` has shape .1, 2., but that of"),
        ({"to": nn.Conv1d(1, 1, 1)}, ValueError, "`weight` of `to` has shape .1, 1, 1."),
        ({"to": {"a": torch.ones(1)}}, ValueError, "`to` has no parameter `weight` .1 of 1 are"),
        ({"to": {"weight": torch.full((1, 3), torch.nan)}}, ValueError, "that are nan or infinite"),
        ({"to": "w.pt"}, TypeError, "`to` is a str; give a model, a LossSurface or a state dict"),
        ({"to": []}, ValueError, "`to` is a list of 0; give one model for a line, or two"),
        ({"to": {}, "dims": 2}, ValueError, "`dims=2` does not fit `to`"),
        ({"to": {}, "space": "layers"}, ValueError, "whatever `space='layers'`; leave one out"),
        ({"to": {}, "sigma": 0.1}, ValueError, "`sigma=0.1` means nothing here"),
        (
            {"to": {"weight": torch.ones(1, 3)}, "points": 3, "extent": 1.0},
            ValueError,
            "`points=3` are too few for both ends",
        ),
    ],
)
def test_ends_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        fg.landscape(bowl([1.0, 2.0, 3.0]), **options)


def test_several_models_share_ticks_and_directions():
    surfaces = {"sharp": bowl([9.0, 9.0]), "flat": bowl([1.0, 1.0])}
    found = fg.landscape(surfaces, space="weights", points=5, sigma=0.3)
    assert isinstance(found, fg.analysis.Landscapes)
    assert list(found) == ["sharp", "flat"]
    assert torch.equal(found["sharp"].directions, found["flat"].directions)
    assert np.allclose(found["sharp"].loss, 9 * found["flat"].loss)
    frame = found.to_frame()
    assert list(frame.columns) == ["model", "t1", "t2", "loss", "beyond"]
    assert len(frame) == 50
    with pytest.raises(KeyError, match="there is no 'round'; there are sharp, flat"):
        found["round"]


def test_several_models_are_seen_no_further_than_the_nearest_pole_of_all():
    both = {"near": two_weights(0.2, 0.1), "far": two_weights(2.0, 3.0)}
    found = fg.landscape(both, dims=1, points=3)
    alone = fg.landscape(both["near"], dims=1, points=3)
    assert alone.options["extent"] < 1
    assert (found["far"].ticks == alone.ticks).all()


def test_classification_by_a_loss_of_ones_own_has_an_accuracy():
    case = build("mlp")

    def own(output, target):
        return nn.functional.cross_entropy(output, target)

    surface = LossSurface(case.model, own, (case.inputs, case.targets))
    found = fg.landscape(surface, space="weights", dims=1, points=3)
    assert (found.accuracy >= 0).all()
    assert fg.landscape(bowl([1.0]), space="weights", dims=1, points=3).accuracy is None


def test_dicts_are_plain():
    found = fg.landscape({"a": two_weights(2.0, 3.0)}, dims=1, points=3)
    object.__setattr__(found["a"], "loss", np.array([1.0, np.inf, 2.0]))
    contents = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert contents["landscapes"]["a"]["loss"] == [1.0, "inf", 2.0]
    assert contents["title"] == "The loss in the space of basis paths: a"


def test_nothing_to_move():
    with pytest.raises(ValueError, match="no parameter of the model has filters"):
        fg.landscape(two_weights(2.0, 3.0), space="filters")
    with pytest.raises(ValueError, match="every parameter of the model is zero"):
        fg.landscape(bowl([1.0]), space="layers")


def test_filters_of_zeros_are_refused():
    """Nothing would move, and the picture of a flat minimum would be a lie."""
    with pytest.raises(ValueError, match="that are not zero, so that nothing would move"):
        fg.landscape(bowl([1.0]), space="filters")


def test_names_and_kinds_of_surfaces():
    with pytest.raises(ValueError, match="an empty mapping; give at least one surface"):
        fg.landscape({})
    with pytest.raises(TypeError, match="but got a Linear as 'a'"):
        fg.landscape({"a": nn.Linear(1, 1)})


def test_the_model_is_left_as_it_was():
    case = build("residual with batch-norm")
    case.model.train()
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    random = torch.get_rng_state()
    for space in ("filters", "eigenvectors"):
        fg.landscape(case.surface(), space=space, dims=1, points=3)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in case.model.modules())
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all(value.grad is None for value in case.model.parameters())


@pytest.mark.parametrize(("dims", "points"), [(1, 10**8), (2, 10**8), (2, 10**5)])
def test_a_grid_beyond_the_memory_is_refused_before_anything_is_computed(dims, points):
    model = torch.nn.Linear(2, 2)
    data = (torch.ones(3, 2), torch.tensor([0, 1, 1]))
    surface = fg.LossSurface(model, "cross_entropy", data, memory="100MiB")
    told = rf"`points={points}` with `dims={dims}` is a grid of {points**dims:,} points.*100.0 MiB"
    with pytest.raises(MemoryError, match=told) as caught:
        fg.landscape(surface, space="weights", dims=dims, points=points)
    fitting = int(re.search(r"give `points=(\d+)`", str(caught.value))[1])
    assert 2 < fitting < points
    check_points(fitting, dims, {"": surface})


def test_what_a_point_of_a_grid_takes_is_what_is_foreseen():
    surface = two_weights(2.0, 3.0)
    space = SPACES["weights"](surface, 2, torch.Generator().manual_seed(0), sigma=0.1)
    ticks = np.linspace(-1, 1, 301)
    part = LandscapeCheckpoint(None, {}, (301, 301), 1).parts[0]
    part.done[...] = True  # Nothing is evaluated, but all is prepared.
    tracemalloc.start()
    for _ in _fill_grid(space, ticks, part):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.5 * _FILLED < peak / 301**2 < _FILLED
