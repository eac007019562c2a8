"""Basis paths of networks with zeros, ties and dead units, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from path_checks import SKELETONS, assert_the_definition, found, moved, source
from path_networks import GRAPHS, mlp, stream
from path_reference import Paths, numbers
from torch import nn

import flatgauge as fg
from flatgauge.symmetry.basis_paths import surface_paths


def test_equal_candidates_are_noted():
    graph = mlp()
    with torch.no_grad():
        for parameter in graph.case.model.parameters():
            parameter.copy_(parameter.sign() * 0.5)
    paths, reference = found(graph), Paths(graph, "strongest")
    assert len(paths) == len(reference.coordinates)
    assert reference.tied
    assert paths.tied
    assert sorted(paths.values.abs().tolist()) == sorted(reference.values.abs().tolist())
    state = paths.to_weights(paths.values)
    for name, parameter in graph.case.model.named_parameters():
        assert torch.equal(state[name], parameter)


def test_a_weight_of_zero_is_a_path_of_value_zero():
    graph = mlp()
    paths = Paths(graph, "strongest")
    on_skeleton = {
        n for unit in paths.kept for n in (*paths.in_route(unit), *paths.out_route(unit))
    }
    off = next(n for n in paths.coordinates if n not in on_skeleton)
    with torch.no_grad():
        parameter = dict(graph.case.model.named_parameters())[graph.edges[off].name]
        parameter.view(-1)[graph.edges[off].index] = 0
    assert_the_definition(graph)
    assert (found(graph).values == 0).sum() == 1
    state = found(graph).to_weights(found(graph).values)
    assert all(torch.equal(state[n], p) for n, p in graph.case.model.named_parameters())


@pytest.mark.parametrize("side", ["in", "out", "both"])
@pytest.mark.parametrize("skeleton", SKELETONS)
def test_a_unit_on_no_path_is_left_out_and_named(side, skeleton):
    graph = mlp()
    model = graph.case.model
    with torch.no_grad():
        if side in ("in", "both"):
            model[0].weight[3] = 0
            model[0].bias[3] = 0
        if side in ("out", "both"):
            model[2].weight[:, 3] = 0
    paths, reference = assert_the_definition(graph, skeleton)
    assert "hidden 0[3]" in reference.dropped
    assert paths.dropped
    assert any("3" in unit for unit in paths.dropped)
    state = paths.to_weights(moved(paths.values))
    assert all(tensor.isfinite().all() for tensor in state.values())
    torch.testing.assert_close(state["0.weight"][3], model[0].weight[3].detach())


def test_a_zero_on_the_diagonal_takes_its_unit_away_there_only():
    graph = mlp()
    with torch.no_grad():
        graph.case.model[2].weight[1, 1] = 0
    assert assert_the_definition(graph, "diagonal")[0].dropped
    assert not assert_the_definition(graph, "strongest")[0].dropped


@pytest.mark.parametrize("skeleton", SKELETONS)
@pytest.mark.parametrize(("seed", "share"), [(0, 0.3), (3, 0.8)])
def test_pruned_networks(skeleton, seed, share):
    graph = mlp(seed=seed)
    generator = source(seed)
    with torch.no_grad():
        for parameter in graph.case.model.parameters():
            parameter.mul_(torch.rand(parameter.shape, generator=generator) > share)
    paths, reference = assert_the_definition(graph, skeleton)
    place = numbers(reference, paths.entries)
    step = 0.3 * min(paths.smallest, 1.0)
    values = paths.values + step * torch.rand(len(paths), generator=generator)
    there = torch.empty_like(values)
    there[place] = values  # Zeros move, too.
    state = paths.to_weights(values)
    for name, tensor in graph.parameters(reference.to_weights(there)).items():
        assert tensor.isfinite().all()
        torch.testing.assert_close(state[name], tensor, rtol=1e-11, atol=1e-13)


def test_a_pruned_stream():
    graph = stream()
    with torch.no_grad():
        graph.case.model.head.weight[:, 1] = 0
        graph.case.model.first.weight[0] = 0
        graph.case.model.first.bias[0] = 0
    _, reference = assert_the_definition(graph)
    assert len(reference.dropped) == 2


def test_a_network_of_zeros_has_no_hidden_units_to_speak_of():
    graph = mlp()
    with torch.no_grad():
        for parameter in graph.case.model[:4].parameters():
            parameter.zero_()
    paths, _ = assert_the_definition(graph)
    assert paths.smallest == math.inf
    assert len(paths.dropped) == 9
    assert set(dict(paths.entries)) == {"4.bias"}


def test_without_hidden_units_the_values_are_the_weights():
    model = nn.Linear(3, 2).double()
    paths = fg.basis_paths(model, torch.randn(4, 3, dtype=torch.float64, generator=source()))
    assert (paths.m, paths.hidden, paths.smallest) == (8, 0, math.inf)
    expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).sort().values
    assert torch.equal(paths.values.sort().values, expected)


# -- manners -----------------------------------------------------------------------------------


def test_the_model_is_left_as_found():
    case = GRAPHS["conv and batch-norm"]().case
    model = case.model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    paths = fg.basis_paths(model, case.inputs)
    paths.to_weights(moved(paths.values))
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_surface_reads_its_paths_once():
    surface = mlp().case.surface()
    paths = surface_paths(surface, skeleton="diagonal")
    assert surface_paths(surface, skeleton="diagonal") is paths
    assert surface_paths(surface, skeleton="strongest") is not paths
    with torch.no_grad():
        surface.model[0].weight[0, 0] *= 3
    again = surface_paths(surface, skeleton="diagonal")
    assert not torch.equal(again.values, paths.values)


def test_parameters_on_no_path_stay_as_they_are():
    model = mlp().case.model
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    paths = fg.basis_paths(model, mlp().case.inputs)
    state = paths.to_weights(moved(paths.values))
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert torch.equal(state["unused"], model.unused.detach())
    assert "unused" not in dict(paths.entries)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_named(value):
    case = mlp().case
    with torch.no_grad():
        case.model[2].weight[0, 0] = value
    with pytest.raises(ValueError, match=r"2\.weight"):
        fg.basis_paths(case.model, case.inputs)


def test_an_unknown_skeleton_lists_the_two():
    case = mlp().case
    with pytest.raises(ValueError, match=r"dagonal.*") as caught:
        fg.basis_paths(case.model, case.inputs, skeleton="dagonal")
    assert "strongest" in str(caught.value)
    assert "diagonal" in str(caught.value)


def test_values_of_the_wrong_length_are_refused():
    paths = found(mlp())
    with pytest.raises(ValueError, match=str(len(paths))):
        paths.to_weights(paths.values[:-1])
    with pytest.raises(ValueError, match=str(len(paths))):
        paths.to_weights(paths.values[None])


def test_values_that_are_not_numbers_are_refused():
    paths = found(mlp())
    values = paths.values.clone()
    values[7] = math.nan
    with pytest.raises(ValueError, match=r"(?i)nan|finite"):
        paths.to_weights(values)


@pytest.mark.parametrize("skeleton", SKELETONS)
def test_the_loss_is_a_function_of_the_values_alone(skeleton):
    """Another gauge, the same values asked for: the same outputs."""
    case = mlp().case
    gauge = fg.find_gauge(case.model, case.inputs)
    other = gauge.rescale(case.model, gauge.sample(generator=source()))
    outputs = []
    for model in (case.model, other):
        paths = fg.basis_paths(model, case.inputs, skeleton=skeleton)
        outputs.append(
            torch.func.functional_call(model, paths.to_weights(moved(paths.values)), case.inputs)
        )
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("skeleton", SKELETONS)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_zero_the_count_and_the_way_back_hold(skeleton, seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()),
        nn.Linear(4, 3),
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(drawn * (torch.rand(p.shape, generator=generator) < 0.45))
    paths = fg.basis_paths(model, torch.zeros(2, 4).double(), skeleton=skeleton)
    assert len(paths) == paths.m - paths.hidden
    assert paths.hidden + len(paths.dropped) == 13
    assert len(paths.free) == len(paths.roots) == paths.hidden
    assert not paths.hidden or paths.smallest > 0
    weights = paths.to_weights(moved(paths.values))
    assert all(bool(w.isfinite().all()) for w in weights.values())
    again = paths.to_weights(paths.values)
    assert all(torch.equal(again[n], p.detach()) for n, p in model.named_parameters())
