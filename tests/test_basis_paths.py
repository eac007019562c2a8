"""Basis paths against their definition: values, count, skeletons, the way back to weights."""

from __future__ import annotations

import copy
import math
from functools import cache

import pytest
import torch
from path_graph import Graph
from path_networks import FORKED, GRAPHS, STREAMS, DeepFork, mlp, stream
from path_reference import Paths, numbers
from torch import Generator, Tensor, nn

import flatgauge as fg
from flatgauge.path_space import BasisPaths, paths_of

SKELETONS = ("strongest", "diagonal")
BOTH = [
    (name, skeleton)
    for name in GRAPHS
    for skeleton in SKELETONS
    if not (skeleton == "diagonal" and name in FORKED)
]


def source(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@cache
def known(name: str, skeleton: str) -> tuple[Graph, BasisPaths]:
    """A graph that no test changes, with its paths."""
    graph = GRAPHS[name]()
    return graph, found(graph, skeleton)


def found(graph: Graph, skeleton: str = "strongest") -> BasisPaths:
    return fg.basis_paths(graph.case.model, graph.case.inputs, skeleton=skeleton)


def assert_the_definition(graph: Graph, skeleton: str = "strongest") -> tuple[BasisPaths, Paths]:
    paths = found(graph, skeleton)
    return paths, compared(graph, paths, skeleton)


def compared(graph: Graph, paths: BasisPaths, skeleton: str) -> Paths:
    """Same coordinates, same values, same units left out."""
    reference = Paths(graph, skeleton)
    place = numbers(reference, paths.entries)
    torch.testing.assert_close(paths.values, reference.values[place], rtol=1e-12, atol=0)
    assert paths.values.isfinite().all()
    assert len(paths) == len(paths.values) == len(paths.names) == paths.m - paths.hidden
    assert len(paths.dropped) == len(reference.dropped)
    assert len(paths.roots) == len(reference.kept)
    assert paths.smallest == pytest.approx(reference.smallest, rel=1e-12)
    sizes = sorted(abs(reference.u(unit)) for unit in reference.kept)
    assert sorted(paths.values[paths.roots].abs().tolist()) == pytest.approx(sizes, rel=1e-12)
    return reference


def moved(values: Tensor, seed: int = 0) -> Tensor:
    """Values nearby, of the same signs."""
    return values * (1 + 0.2 * torch.rand(len(values), generator=source(seed)).double())


def written(paths: Paths, coordinate: int) -> str:
    """A path as the weights along it."""
    shapes = {name: p.shape for name, p in paths.graph.case.model.named_parameters()}
    steps = []
    for n in paths.path(paths.coordinates[coordinate]):
        name, index = paths.edges[n].name, paths.edges[n].index
        place = torch.unravel_index(torch.tensor(index), shapes[name])
        steps.append(f"{name}[{', '.join(str(int(i)) for i in place)}]")
    return " → ".join(steps)


# -- the definition ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "skeleton"), BOTH)
def test_values_are_products_along_the_paths(name, skeleton):
    graph, paths = known(name, skeleton)
    reference = compared(graph, paths, skeleton)
    free = {(reference.edges[n].name, reference.edges[n].index) for n in reference.free}
    assert {(edge.name, edge.index) for edge in paths.free} == free
    assert paths.skeleton == skeleton
    assert paths.m == len(graph.edges)
    assert paths.hidden == len(graph.units)
    assert not paths.dropped
    assert not paths.tied
    assert list(paths.names) == [written(reference, n) for n in numbers(reference, paths.entries)]
    assert skeleton in paths.describe()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "deep fork", *STREAMS])
def test_the_strongest_skeleton_at_other_weights(name, seed):
    assert_the_definition(GRAPHS[name](seed=seed))


@pytest.mark.parametrize("skeleton", SKELETONS)
@pytest.mark.parametrize("name", FORKED)
def test_branches_have_as_many_paths_whatever_the_skeleton(name, skeleton):
    """Which branch the diagonal follows is a convention; the count and the way back are not."""
    graph, paths = known(name, skeleton)
    assert len(paths) == len(graph.edges) - len(graph.units)
    assert paths.values[paths.roots].abs().min().item() == paths.smallest
    state = paths.to_weights(moved(paths.values))
    other = copy.deepcopy(graph.case.model)
    other.load_state_dict(state)
    # The free edges are the same ones, so the values there are the ones asked for.
    if skeleton == "diagonal":
        there = fg.basis_paths(other, graph.case.inputs, skeleton=skeleton)
        torch.testing.assert_close(there.values, moved(paths.values), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("name", "skeleton"), BOTH)
def test_weights_follow_from_values_and_at_home_to_the_bit(name, skeleton):
    graph, paths = known(name, skeleton)
    reference = compared(graph, paths, skeleton)
    place = numbers(reference, paths.entries)
    there = torch.empty_like(reference.values)
    there[place] = moved(paths.values)
    expected = graph.parameters(reference.to_weights(there))
    got = paths.to_weights(moved(paths.values))
    assert set(got) == set(expected)
    for parameter, tensor in expected.items():
        torch.testing.assert_close(got[parameter], tensor, rtol=1e-11, atol=1e-13)
    home = paths.to_weights(paths.values)
    assert all(torch.equal(home[n], p) for n, p in graph.case.model.named_parameters())


@pytest.mark.parametrize("name", ["mlp", "conv and batch-norm", "stream"])
def test_weights_are_differentiable_in_the_values(name):
    paths = known(name, "strongest")[1]
    values = moved(paths.values).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: tuple(paths.to_weights(v).values()), values)


# -- what does not change them -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "skeleton"),
    [
        *((name, "strongest") for name in ("mlp", "1-d conv", "transposed conv", "deep fork")),
        *((name, "strongest") for name in STREAMS),
        ("mlp", "diagonal"),
        ("1-d conv", "diagonal"),
    ],
)
def test_power_of_two_rescalings_change_no_bit(name, skeleton):
    graph, here = known(name, skeleton)
    case = graph.case
    gauge = fg.find_gauge(case.model, case.inputs)
    assert here.hidden == gauge.dim
    move = gauge.sample(generator=source(), log2_range=6, powers_of_two=True)
    other = gauge.rescale(case.model, move)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(case.model.parameters(), other.parameters(), strict=True)
    )
    there = fg.basis_paths(other, case.inputs, skeleton=skeleton)
    assert torch.equal(here.values, there.values)
    assert list(here.names) == list(there.names)
    assert torch.equal(here.roots, there.roots)
    assert here.smallest == there.smallest


def permuted(model: nn.Sequential) -> nn.Sequential:
    """The same function with both hidden layers in another order."""
    other = copy.deepcopy(model)
    one, two = torch.tensor([3, 0, 4, 2, 1]), torch.tensor([2, 3, 1, 0])
    with torch.no_grad():
        other[0].weight.copy_(model[0].weight[one])
        other[0].bias.copy_(model[0].bias[one])
        other[2].weight.copy_(model[2].weight[two][:, one])
        other[2].bias.copy_(model[2].bias[two])
        other[4].weight.copy_(model[4].weight[:, two])
    return other


@pytest.mark.parametrize("skeleton", SKELETONS)
def test_the_order_of_hidden_units_matters_to_the_diagonal_only(skeleton):
    case = mlp().case
    other = permuted(case.model)
    torch.testing.assert_close(other(case.inputs), case.model(case.inputs))
    here, there = (
        fg.basis_paths(model, case.inputs, skeleton=skeleton).values.sort().values
        for model in (case.model, other)
    )
    same = torch.allclose(here, there, rtol=1e-12, atol=0)
    assert same == (skeleton == "strongest")


class RightFirst(DeepFork):
    """The same network, its branches written down in the other order."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        right = torch.relu(self.right(x))
        left = torch.relu(self.deeper(torch.relu(self.left(x))))
        return self.head(torch.cat((left, right), 1))


def test_the_order_of_lines_does_not_matter():
    graph, paths = known("deep fork", "strongest")
    other = RightFirst().double()
    other.load_state_dict(graph.case.model.state_dict())
    there = fg.basis_paths(other, graph.case.inputs)
    assert torch.equal(there.values.sort().values, paths.values.sort().values)
    assert set(there.names) == set(paths.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_formed_in_float64(dtype):
    """Sixteen layers of weights of 1e-4: the values underflow float32."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(16)]
    for layer in layers:
        nn.init.constant_(layer.weight, 1e-4)
        layer.weight.data.fill_diagonal_(2e-4)
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))).to(dtype)
    paths = fg.basis_paths(model, torch.randn(3, 2, dtype=dtype, generator=source()))
    assert paths.values.dtype == torch.float64
    assert paths.values.abs().max().item() == pytest.approx(2e-4**16, rel=1e-5)
    assert paths.smallest > 0
    state = paths.to_weights(paths.values)
    assert all(torch.equal(state[name], p.detach()) for name, p in model.named_parameters())


# -- zeros, ties, dead units -------------------------------------------------------------------


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
    paths = paths_of(surface, skeleton="diagonal")
    assert paths_of(surface, skeleton="diagonal") is paths
    assert paths_of(surface, skeleton="strongest") is not paths
    with torch.no_grad():
        surface.model[0].weight[0, 0] *= 3
    again = paths_of(surface, skeleton="diagonal")
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
