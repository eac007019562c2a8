"""Normalized sharpness does not see how a network is written: its invariances one by one."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import Branches, Case, build
from torch import Generator, nn

from flatgauge import LossSurface
from flatgauge.measures import matrix_normalized_sharpness, normalized_sharpness

BOTH = [matrix_normalized_sharpness, normalized_sharpness]


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def changed(case: Case, change) -> Case:
    model = copy.deepcopy(case.model)
    with torch.no_grad():
        change(model)
    return replace(case, model=model)


@pytest.mark.parametrize("function", BOTH)
def test_layerwise(function):
    def rescale(model):
        model[0].weight.mul_(8), model[0].bias.mul_(8)
        model[2].weight.mul_(1 / 64), model[2].bias.mul_(1 / 8)
        model[4].weight.mul_(8)

    case = build("mlp")
    moved = changed(case, rescale)
    assert function(moved.surface()).value == function(case.surface()).value


def test_nodewise_and_rows():
    def rescale(model):
        factors = torch.tensor([2.0, 0.25, 16.0, 1.0, 1 / 1024]).double()
        model[0].weight.mul_(factors[:, None]), model[0].bias.mul_(factors)
        model[2].weight.div_(factors)

    case = build("mlp")
    before, after = (c.surface() for c in (case, changed(case, rescale)))
    assert normalized_sharpness(after).value == normalized_sharpness(before).value
    one, other = (matrix_normalized_sharpness(s).value for s in (before, after))
    assert abs(one - other) > 1e-3 * one


def test_rows_of_a_convolution_are_channels():
    def rescale(model):
        factors = torch.tensor([2.0, 0.25, 16.0]).double()
        model[0].weight.mul_(factors[:, None, None, None]), model[0].bias.mul_(factors)
        model[3].weight.div_(factors[:, None, None])

    case = build("conv and max-pool")
    before, after = (c.surface() for c in (case, changed(case, rescale)))
    assert normalized_sharpness(after).value == normalized_sharpness(before).value


@pytest.mark.parametrize("function", BOTH)
def test_permutation(function):
    def permute(model):
        order = torch.tensor([3, 1, 4, 0, 2])
        model[0].weight.copy_(model[0].weight[order]), model[0].bias.copy_(model[0].bias[order])
        model[2].weight.copy_(model[2].weight[:, order])

    case = build("mlp")
    after = function(changed(case, permute).surface()).value
    assert after == pytest.approx(function(case.surface()).value, rel=1e-11)


@pytest.mark.parametrize("function", BOTH)
def test_output_scale_and_shift(function):
    case = build("mlp")
    before = function(case.surface()).value
    bigger = changed(case, lambda m: (m[4].weight.mul_(32), m[4].bias.mul_(32)))
    assert function(bigger.surface()).value == before
    shifted = changed(case, lambda m: m[4].bias.add_(3.7))
    assert function(shifted.surface()).value == pytest.approx(before, rel=1e-10)
    own = function(case.surface(), surrogate=None).value
    assert abs(function(bigger.surface(), surrogate=None).value - own) > 1e-3 * own


class TwoBranches(nn.Module):
    """ReLU(W₁ x) + ReLU(W₂ x), equation (26)."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = (nn.Linear(4, 3, bias=False).double() for _ in range(2))
        self.first.weight.data[:], self.second.weight.data[:] = first, second

    def forward(self, x):
        return torch.relu(self.first(x)) + torch.relu(self.second(x))


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("surrogate", ["normalized_cross_entropy", None])
def test_branches_as_in_the_paper(function, surrogate):
    """W₁ = W₂ = W/2 becomes W, 0 (equations 27 to 30); the Fisher-Rao norm doubles."""
    generator = seeded(1)
    weight = torch.randn(3, 4, generator=generator).double()
    inputs = torch.randn(30, 4, generator=generator).double()
    targets = torch.randint(0, 3, (30,), generator=generator)
    halves, merged = TwoBranches(weight / 2, weight / 2), TwoBranches(weight, 0 * weight)
    surfaces = [LossSurface(m, "cross_entropy", (inputs, targets)) for m in (halves, merged)]
    before, after = (function(s, surrogate=surrogate) for s in surfaces)
    assert before.value == pytest.approx(after.value, rel=1e-12)
    assert after.layers["second.weight"] == 0
    norms = []
    for model in (halves, merged):
        squares = 0.0
        for x, y in zip(inputs, targets, strict=True):
            loss = F.cross_entropy(model(x[None]), y[None])
            slopes = torch.autograd.grad(loss, list(model.parameters()))
            squares += sum(
                float(((p.detach() * g) ** 2).sum())
                for p, g in zip(model.parameters(), slopes, strict=True)
            )
        norms.append(squares / len(inputs))
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-12)


@pytest.mark.parametrize("function", BOTH)
def test_branches_of_other_proportions(function):
    case = build("proportional branches")  # right = 2 · left

    def move(model: Branches):
        for left, right in zip(model.left.parameters(), model.right.parameters(), strict=True):
            total = left + right
            left.copy_(0.9 * total), right.copy_(0.1 * total)

    after = function(changed(case, move).surface()).value
    assert after == pytest.approx(function(case.surface()).value, rel=1e-10)


def test_the_running_example():
    """Appendix A.1: norms grow without limit, normalized sharpness stands still.

    The paper has √6101.13 and 78.11 for the second matrix; they are √7401.00 and 86.03.
    """
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2))).double()
    model.insert(1, nn.ReLU())
    model[0].weight.data[:] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    model[2].weight.data[:] = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    inputs = torch.randn(20, 2, generator=seeded()).double()
    surface = LossSurface(model, "mse", (inputs, torch.zeros(20, 2).double()))
    before = normalized_sharpness(surface, surrogate=None).value
    with torch.no_grad():
        for unit, alpha in ((0, 10.0), (1, 0.1)):
            model[0].weight[unit] /= alpha
            model[2].weight[:, unit] *= alpha
    first, second = model[0].weight.detach(), model[2].weight.detach()
    assert float(first.square().sum()) == pytest.approx(2500.05)
    assert float(torch.linalg.matrix_norm(first, 2)) == pytest.approx(50.0, abs=5e-3)
    assert float(second.square().sum()) == pytest.approx(7401.00, abs=5e-3)
    assert float(torch.linalg.matrix_norm(second, 2)) == pytest.approx(86.03, abs=5e-3)
    after = normalized_sharpness(surface, surrogate=None).value
    assert after == pytest.approx(before, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_classes_have_no_normalized_curvature(dtype):
    """Two logits over their standard deviation are ±1, whatever they are: all is flat."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.ReLU()
        model = nn.Sequential(*layers, nn.Linear(5, 2)).to(dtype)
        data = torch.randn(40, 1, 6, 6).to(dtype), torch.randint(0, 2, (40,))
    surface = LossSurface(model, "cross_entropy", data)
    assert normalized_sharpness(surface).value == 0
    assert matrix_normalized_sharpness(surface).value == 0
    assert normalized_sharpness(surface, surrogate=None).value > 0


def test_an_estimate_is_as_invariant_as_what_it_estimates():
    """Before a tanh nothing can be swept: curvature comes from random vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    ).double()
    twin, factors = copy.deepcopy(model), torch.tensor([2.0, 0.25, 64.0, 1.0, 1 / 1024]).double()
    with torch.no_grad():
        twin[0].weight.mul_(factors[:, None]), twin[0].bias.mul_(factors)
        twin[2].weight.div_(factors)
    data = torch.randn(9, 6, dtype=torch.float64, generator=seeded()), torch.arange(9) % 3
    one, other = (
        normalized_sharpness(LossSurface(m, "cross_entropy", data), generator=seeded(1))
        for m in (model, twin)
    )
    assert not one.exact
    assert one.stderr > 0
    assert other.value == pytest.approx(one.value, rel=1e-10)
    assert other.stderr == pytest.approx(one.stderr, rel=1e-10)
