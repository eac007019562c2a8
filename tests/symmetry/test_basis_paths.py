"""Basis paths against their definition: values, count, skeletons, the way back to weights."""

from __future__ import annotations

import copy
import itertools
import math
from functools import cache

import pytest
import torch
from path_checks import SKELETONS, assert_the_definition, compared, found, moved, source
from path_graph import Graph
from path_networks import FORKED, GRAPHS, STREAMS, DeepFork, equal_width, mlp
from path_reference import Paths, numbers
from torch import Tensor, nn

import flatgauge as fg
from flatgauge.symmetry.basis_paths import BasisPaths

BOTH = [
    (name, skeleton)
    for name in GRAPHS
    for skeleton in SKELETONS
    if not (skeleton == "diagonal" and name in FORKED)
]


@cache
def known(name: str, skeleton: str) -> tuple[Graph, BasisPaths]:
    """A graph that no test changes, with its paths."""
    graph = GRAPHS[name]()
    return graph, found(graph, skeleton)


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


# -- the papers' own words ---------------------------------------------------------------------


def test_the_way_back_is_equations_20_and_21():
    graph = equal_width()
    weights = [p.detach() for p in graph.case.model.parameters()]
    paths = found(graph, "diagonal")
    change = 0.1 * torch.randn(len(paths), generator=source()).double() * paths.values
    moved_weights = paths.to_weights(paths.values + change)
    width, place = len(weights[0]), 0
    steps: list[float] = []  # δ_i / w_i of the first layer's skeleton weights
    for layer, (weight, new) in enumerate(zip(weights, moved_weights.values(), strict=True)):
        for row in range(width):
            for column in range(width):
                if layer and row == column:
                    assert new[row, column] == weight[row, column]  # free
                    continue
                w, v, e = weight[row, column], paths.values[place], change[place]
                place += 1
                if not layer:  # (20); off the skeleton (21) says the same
                    expected = w * (v + e) / v
                    steps += [float(expected / w - 1)] if row == column else []
                else:  # (21): the path comes in over the skeleton weight of its column
                    expected = (w + e * w / v) / (1 + steps[column])
                assert float(new[row, column]) == pytest.approx(float(expected), rel=1e-12)
    assert place == len(paths) == 27 - 6


@pytest.mark.parametrize("skeleton", SKELETONS)
def test_every_other_path_is_a_ratio_as_lemma_5_1_says(skeleton):
    """L + 1 values above and L below, with L the number of hidden layers."""
    graph = equal_width()
    first, second, third = (p.detach() for p in graph.case.model.parameters())
    paths = found(graph, skeleton)
    value = {
        (name, int(index)): float(v)
        for (name, indices), vs in zip(
            paths.entries, paths.values.split([len(i) for _, i in paths.entries]), strict=True
        )
        for index, v in zip(indices, vs, strict=True)
    }
    root = paths.values[paths.roots].tolist()  # in the order of the units, layer by layer
    for i, j, k, o in itertools.product(range(3), repeat=4):
        above = [value["0.weight", 3 * j + i]]
        above.append(value.get(("2.weight", 3 * k + j), root[j]))  # a free weight: its root's
        above.append(value.get(("4.weight", 3 * o + k), root[3 + k]))
        expected = math.prod(above) / (root[j] * root[3 + k])
        product = float(first[j, i] * second[k, j] * third[o, k])
        assert product == pytest.approx(expected, rel=1e-10)
