"""Theorem 5.1 of Yi et al. 2019 beside the worst case that a search finds."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from cases import build
from torch import nn
from torch.func import functional_call

import flatgauge as fg
from flatgauge.analysis.bounds.theorem51 import ROOM


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def mlp(*widths, bias=False, seed=0, spread=0.2):
    """Weights of size about one and of both signs: the theorem is at its sharpest there."""
    generator, layers = seeded(seed), []
    for inner, outer in pairwise(widths):
        layer = nn.Linear(inner, outer, bias=bias).double()
        for p in layer.parameters():
            signs = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
            sizes = 1 + spread * (torch.rand(p.shape, generator=generator).double() - 0.5)
            p.data.copy_(signs * sizes)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def surface_of(model, *, samples=12, inputs=3, classes=3, seed=1):
    x = torch.randn(samples, inputs, generator=seeded(seed), dtype=torch.float64)
    return fg.LossSurface(model, "cross_entropy", (x, torch.arange(samples) % classes)), x


def theorem(surface, **options):
    frame = fg.bounds(surface, only="theorem 5.1", **options)
    return frame.set_index("term")


def literal_paths(model):
    """The values of the basis paths of equally wide layers, by the definition."""
    weights = [p.detach() for p in model.parameters()]
    width = len(weights[0])
    found = []
    for layer, weight in enumerate(weights):
        for i in range(width):
            for j in range(width):
                if layer and i == j:
                    continue  # A free skeleton weight.
                before = [weights[k][j, j] for k in range(layer)]
                after = [weights[k][i, i] for k in range(layer + 1, len(weights))]
                found.append(math.prod(map(float, [*before, weight[i, j], *after])))
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_value_is_the_formula(depth):
    model = mlp(*[3] * (depth + 1))
    surface, x = surface_of(model)
    found = theorem(surface, skeleton="diagonal", epsilon=1e-3).value
    values = [abs(v) for v in literal_paths(model)]
    assert (found["max |v|"], found["min |v|"]) == pytest.approx((max(values), min(values)))
    psi = max(
        1e-3 ** (s - 1) * max(values) ** (2 * depth + 1 - s) / min(values) ** (2 * depth)
        for s in range(1, depth + 1)
    )
    norm = float(x.norm(dim=1).max())
    rest = 1 + 2 ** ((3 * depth + 4) / 2) * (depth - 1) * 3 * 3 * psi
    expected = 2 * norm * math.sqrt(2) * 3 * 3 ** (depth - 1) * 3 * rest * 1e-3
    assert found["max l(v') - l(v) at most"] == pytest.approx(expected, rel=1e-12)
    assert found["log10 of it"] == pytest.approx(math.log10(expected))
    assert (found["C"], found["C_L"]) == pytest.approx((norm, math.sqrt(2)))


def climbed(surface, x, skeleton, epsilon, seed):
    """The largest rise of the loss that gradient ascent finds within epsilon of the paths."""
    paths = fg.basis_paths(surface.model, x[:4], skeleton=skeleton)
    labels = torch.arange(len(x)) % 3

    def loss(v):
        return F.cross_entropy(functional_call(surface.model, paths.to_weights(v), x), labels)

    start, best = float(loss(paths.values)), 0.0
    generator = seeded(seed)
    for restart in range(3):
        step = torch.randn(len(paths), generator=generator, dtype=torch.float64)
        if restart == 0:  # Against the smallest divisor: towards a pole.
            step = torch.zeros_like(step)
            root = paths.roots[paths.values[paths.roots].abs().argmin()]
            step[root] = -paths.values[root].sign()
        step *= epsilon / step.norm()
        for _ in range(12):
            v = (paths.values + step).requires_grad_()
            value = loss(v)
            best = max(best, float(value.detach()) - start)
            (gradient,) = torch.autograd.grad(value, v)
            step = step + 0.5 * epsilon * gradient / gradient.norm().clamp_min(1e-300)
            step = step * min(1.0, epsilon / float(step.norm()))
    return best


@pytest.mark.parametrize(
    ("depth", "bias", "skeleton"),
    [
        (2, False, "diagonal"),
        (2, True, "strongest"),
        (3, False, "strongest"),
        (3, True, "diagonal"),
    ],
)
def test_no_search_finds_more_than_the_bound(depth, bias, skeleton):
    surface, x = surface_of(mlp(*[3] * (depth + 1), bias=bias))
    allowed = theorem(surface, skeleton=skeleton).value["ε allowed"]
    for part in (1e-4, 0.1, 1.0):  # At the largest, activations do change.
        bound = theorem(surface, skeleton=skeleton, epsilon=part * allowed)
        rise = climbed(surface, x, skeleton, part * allowed, seed=depth)
        assert 0 < rise < bound.value["max l(v') - l(v) at most"]


def all_paths(weights):
    """The value of every path from an input to an output."""
    values = weights[0].T  # (paths so far, unit)
    for weight in weights[1:]:
        values = (values[:, :, None] * weight.T).flatten(0, 1)
    return values.reshape(-1)


@pytest.mark.parametrize("skeleton", ["diagonal", "strongest"])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_every_path_moves_as_little_as_the_repaired_proof_says(depth, skeleton):
    model = mlp(*[3] * (depth + 1), spread=1.0)
    paths = fg.basis_paths(model, torch.zeros(4, 3, dtype=torch.float64), skeleton=skeleton)
    sizes, reach = paths.values.abs(), ROOM * paths.smallest
    ratio = (1 + ROOM) * math.sqrt(2) * float(sizes.max() / sizes.min())
    most = (2 * depth - 1) * ratio**depth
    before = all_paths(list(paths.to_weights(paths.values).values()))
    assert len(before) == 3 ** (depth + 1)
    generator, moved = seeded(depth), 0.0
    for _ in range(200):
        step = torch.randn(len(paths), generator=generator, dtype=torch.float64)
        step[torch.rand(len(paths), generator=generator) < 0.9] = 0.0
        step *= reach / step.norm().clamp_min(1e-9)
        after = all_paths(list(paths.to_weights(paths.values + step).values()))
        moved = max(moved, float((after - before).abs().max()))
    assert 0.5 * reach < moved <= most * reach


def test_non_basis_paths_are_more_than_printed():
    paths = fg.basis_paths(mlp(3, 3, 3, 3), torch.zeros(4, 3, dtype=torch.float64))
    assert 3**4 - len(paths) == 60  # Printed: (L - 1) d_1 = 6.


def test_beyond_the_allowed_distance_there_is_a_pole_and_no_value():
    surface, x = surface_of(mlp(3, 3, 3))
    smallest = fg.basis_paths(surface.model, x[:4]).smallest
    allowed = theorem(surface).value["ε allowed"]
    assert allowed == pytest.approx(ROOM * smallest)
    assert climbed(surface, x, "strongest", (1 - 1e-12) * smallest, seed=0) > 1e9
    found = theorem(surface, epsilon=(1 - 1e-12) * smallest)
    assert math.isnan(found.value["max l(v') - l(v) at most"])
    assert "beyond the ε allowed" in found.note["max l(v') - l(v) at most"]


def test_the_printed_step_37_fails_where_the_note_says():
    def holds(v, d):
        return abs(v + d) >= math.sqrt((v * v + d * d) / 2)

    edge = 2 - math.sqrt(3)
    assert holds(1.0, -0.999 * edge)
    assert not holds(1.0, -1.001 * edge)
    assert abs(1 - ROOM) == pytest.approx(math.sqrt(0.5))


def test_first_layer_margin_is_where_activations_begin_to_change():
    model = mlp(3, 3, 3)
    surface, x = surface_of(model)
    margin = theorem(surface, skeleton="diagonal").value["ε of fixed activations"]
    first, second = (p.detach() for p in model.parameters())
    rows = first * second.diagonal()[:, None]  # The paths of the first layer.
    reach = (x @ rows.T).abs() / x.norm(dim=1)[:, None]
    assert margin == pytest.approx(float(reach.min()))


def test_huge_values_do_not_overflow():
    surface, _ = surface_of(mlp(3, 6, 6, 6, 6, 6, 3))
    with torch.no_grad():
        surface.model[0].weight[0, 0] = 1e-40
    found = theorem(surface, epsilon=1e-6)
    assert found.value["max l(v') - l(v) at most"] == math.inf
    assert 400 < found.value["log10 of it"] < 600
    assert "see log10" in found.note["max l(v') - l(v) at most"]


def test_a_path_of_value_zero_makes_it_infinite():
    surface, _ = surface_of(mlp(3, 3, 3))
    with torch.no_grad():
        surface.model[0].weight[0, 0] = 0.0
    found = theorem(surface)
    assert found.value["log10 of it"] == math.inf
    assert "a path has value zero" in found.note["max l(v') - l(v) at most"]


def test_what_is_substituted_is_told():
    surface, x = surface_of(mlp(3, 4, 5, 3, bias=True))
    found = theorem(surface)
    assert "largest of the widths [4, 5]" in found.note["d_1"]
    assert "3 biases count as that many inputs" in found.note["d_0"]
    assert (found.value["d_0"], found.value["d_1"]) == (6, 5)
    assert found.value["C"] == pytest.approx(math.sqrt(float(x.square().sum(1).max()) + 3))
    assert theorem(surface_of(mlp(3, 3, 3))[0]).note["d_0"] == "bias-free, equal widths, as stated"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("conv and max-pool", "conv2d"),
        ("residual with batch-norm", "add"),
        ("gelu", "gelu"),
        ("tied weights", "weights of their own"),
    ],
)
def test_what_the_theorem_does_not_cover_has_no_value(case, reason):
    found = theorem(build(case).surface())
    assert found.value.isna().all()
    assert reason in found.note.iloc[0]


def test_other_losses_have_an_estimated_slope():
    model = mlp(3, 3, 2)
    x = torch.randn(8, 3, generator=seeded(2), dtype=torch.float64)
    y = torch.randn(8, 2, generator=seeded(3), dtype=torch.float64)
    found = theorem(fg.LossSurface(model, "mse", (x, y)))
    slopes = (model(x).detach() - y).norm(dim=1)  # 2 (f - y) / 2 outputs
    assert found.value["C_L"] == pytest.approx(float(slopes.max()))
    assert "an estimate" in found.note["C_L"]


def test_images_that_are_flattened_first_are_inputs_all_the_same():
    plain = mlp(4, 3, 3)
    surface, x = surface_of(plain, inputs=4)
    images = (x.reshape(-1, 1, 2, 2), torch.arange(len(x)) % 3)
    flattened = fg.LossSurface(nn.Sequential(nn.Flatten(), *plain), "cross_entropy", images)
    assert theorem(flattened).value.tolist() == theorem(surface).value.tolist()
