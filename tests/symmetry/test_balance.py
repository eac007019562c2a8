"""The balanced form, against hand-written sums, other optimisers, and itself rewritten."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases import LAYER_CASES, build
from reference import error
from scipy.optimize import minimize
from torch import Tensor, nn
from zoo import CifarResNet, images, trained

import flatgauge as fg
from flatgauge.symmetry import find_gauge
from flatgauge.symmetry.balance import Balance, compute_balance

#: Cases in which some scales lie on no path of single weights: promised to 1e-12, not to the bit.
IRREGULAR = ("attention", "squared", "gated", "tied weights")

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def applied(found: Balance, model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    found.apply(twin)
    return twin


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for inner, outer in pairwise(widths):
            layers += [nn.Linear(inner, outer), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def norm(model: nn.Module) -> float:
    return float(flat(model).norm())


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.fixture(scope="module", params=LAYER_CASES)
def case(request):
    """A case, its group, and its balanced form."""
    found = build(request.param)
    gauge = find_gauge(found.model, found.inputs)
    return request.param, found, gauge, balanced(found.model, gauge)


def balanced(model: nn.Module, gauge: fg.symmetry.GaugeGroup) -> nn.Module:
    """As `fg.balance`, for a group already found."""
    result = compute_balance(gauge, dict(model.named_parameters()))
    assert result.has_converged
    assert (result.one_sided, result.empty) == ((), ())
    return applied(result, model)


# -- what balanced means -------------------------------------------------------------------------


def test_by_hand():
    """3² + 4² = 5² enters, 20² leaves: c = 2."""
    model = mlp(1, 1, 1)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), (3.0, 4.0, 20.0, 1.0), strict=True):
            parameter.fill_(value)
    even = fg.balance(model, torch.ones(1, 1).double())
    assert flat(even).tolist() == pytest.approx([6, 8, 10, 1], rel=1e-14)


def test_every_scale_is_balanced_sum_by_sum(case):
    _, found, gauge, even = case
    squares = {name: p.detach().square() for name, p in even.named_parameters()}
    for exponents in gauge.generators:
        parts = [(exponents[n] * squares[n]).flatten() for n in exponents if n in squares]
        terms = torch.cat(parts)
        enters, leaves = terms.clamp(min=0).sum(), -terms.clamp(max=0).sum()
        assert float(enters) == pytest.approx(float(leaves), rel=1e-12)
    found.model.eval(), even.eval()
    torch.testing.assert_close(even(found.inputs), found.model(found.inputs), rtol=1e-9, atol=1e-11)


def test_mlp_is_balanced_unit_by_unit():
    even = fg.balance(mlp(4, 5, 3, 2), X)
    for before, after in ((0, 2), (2, 4)):
        enters = even[before].weight.square().sum(1) + even[before].bias.square()
        leaves = even[after].weight.square().sum(0)
        torch.testing.assert_close(enters, leaves, rtol=1e-12, atol=0)


def test_norm_is_the_smallest_of_all(case):
    _, found, gauge, even = case
    assert norm(even) <= norm(found.model) * (1 + 1e-14)
    for seed in range(50):
        move = gauge.sample(generator=generator(seed), log2_range=0.2, powers_of_two=False)
        assert norm(gauge.rescale(even, move)) >= norm(even) * (1 - 1e-14)


def test_alternating_steps_reach_the_same():
    """c_h⁴ = leaves / enters, unit by unit, until nothing changes."""
    model = mlp(4, 5, 3, 2)
    first, second, third = (model[i] for i in (0, 2, 4))
    even = fg.balance(model, X)
    with torch.no_grad():
        for _ in range(400):
            for one, next_ in ((first, second), (second, third)):
                enters = one.weight.square().sum(1) + one.bias.square()
                factor = (next_.weight.square().sum(0) / enters) ** 0.25
                one.weight.mul_(factor[:, None])
                one.bias.mul_(factor)
                next_.weight.div_(factor)
    assert error(flat(model), flat(even)) < 1e-13


def test_another_optimiser_finds_the_same_norm_and_scales():
    """conv → pool → conv → flatten → linear, its norm as a function of log-scales by hand."""
    found = build("conv and max-pool")
    w1, b1, w2, b2, w3, b3 = (p.detach().square().numpy() for p in found.model.parameters())
    wide = w3.reshape(3, 2, 4).sum((0, 2))  # four positions of each of two channels

    def value(logs: np.ndarray) -> float:
        s, t = np.exp(2 * logs[:3]), np.exp(2 * logs[3:])
        kernel = w2.sum((2, 3))
        return float(
            (s * (w1.sum((1, 2, 3)) + b1)).sum()
            + (t[:, None] * kernel / s).sum()
            + (t * b2).sum()
            + (wide / t).sum()
            + b3.sum()
        )

    best = minimize(value, np.zeros(5), method="BFGS", options={"gtol": 1e-9})
    even = fg.balance(found.model, found.inputs)
    assert norm(even) ** 2 == pytest.approx(best.fun, rel=1e-12)
    ratio = even[0].bias / found.model[0].bias
    assert ratio.log().tolist() == pytest.approx(best.x[:3].tolist(), abs=1e-6)


# -- one form for all ways of writing a network --------------------------------------------------


def test_all_ways_of_writing_balance_to_the_same(case):
    _, found, gauge, even = case
    for seed in range(2):
        move = gauge.sample(generator=generator(seed), powers_of_two=False)
        again = balanced(gauge.rescale(found.model, move), gauge)
        assert error(flat(again), flat(even)) < 1e-12
    assert error(flat(balanced(even, gauge)), flat(even)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_give_the_same_bits(case, dtype):
    name, found, gauge, _ = case
    model = found.model.to(dtype)
    even = balanced(model, gauge)
    for seed in range(2):
        moved = gauge.rescale(model, gauge.sample(generator=generator(seed), log2_range=6))
        again = balanced(moved, gauge)
        if name in IRREGULAR:
            assert error(flat(again), flat(even)) < (1e-12 if dtype is torch.float64 else 1e-6)
        else:
            assert equal(again, even)
    found.model.double()


@pytest.mark.parametrize("spread", [15, 60])
def test_wide_ranges_of_scales_converge(spread):
    model = mlp(4, 6, 5, 3)
    gauge = find_gauge(model, X)
    even = balanced(model, gauge)
    factors = (
        10.0
        ** torch.linspace(-spread, spread, gauge.dim).double()[
            torch.randperm(11, generator=generator())
        ]
    )
    again = balanced(gauge.rescale(model, gauge.move(factors)), gauge)
    assert error(flat(again), flat(even)) < 1e-12
    with torch.no_grad():  # Weights that differ by many powers of ten whatever the gauge.
        model[2].weight.mul_(10.0 ** torch.linspace(-15, 15, 30).reshape(5, 6))
    balanced(model, gauge)


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_deep_networks_whose_paths_leave_the_range(size):
    """Thirty equal layers are balanced as they are, whatever the value of their paths."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(30))).double()
    turn = torch.linalg.qr(torch.randn(2, 2).double())[0]
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(size * turn)
    gauge = find_gauge(model, torch.ones(1, 2).double())
    move = gauge.sample(generator=generator(), powers_of_two=False)
    assert error(flat(balanced(gauge.rescale(model, move), gauge)), flat(model)) < 1e-11


# -- units without a balance ---------------------------------------------------------------------


def test_one_sided_units_get_norm_one_and_are_named():
    model = mlp(4, 5, 3, 2)
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = 0.0, 0.0  # unit 0: nothing enters
        model[2].weight[:, 1] = 0.0  # unit 1: nothing leaves
        model[0].weight[2], model[0].bias[2], model[2].weight[:, 2] = 0.0, 0.0, 0.0  # unit 2: empty
    with pytest.warns(UserWarning, match=r"2 units have weights on one side only.*1 have none"):
        even = fg.balance(model, X)
    result = compute_balance(find_gauge(model, X), dict(model.named_parameters()))
    assert result.one_sided == ("0.weight[0]", "0.weight[1]")
    assert result.empty == ("0.weight[2]",)
    assert even[2].weight[:, 0].norm().item() == pytest.approx(1, rel=1e-13)
    entering = even[0].weight[1].square().sum() + even[0].bias[1].square()
    assert entering.item() == pytest.approx(1, rel=1e-13)
    # Their edges stay out of the sums of their neighbours.
    enters = even[2].weight[:, 3:].square().sum(1) + even[2].bias.square()
    torch.testing.assert_close(enters, even[4].weight.square().sum(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(even(X), model(X), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_chain_of_one_sided_units(side):
    """Nothing enters the first (or leaves the last) layer: no unit of the chain is balanced."""
    model = mlp(4, 2, 2, 3)
    with torch.no_grad():
        if side == "in":
            for parameter in (model[0].weight, model[0].bias, model[2].bias):
                parameter.zero_()
        else:
            model[4].weight.zero_()
    gauge = find_gauge(model, X)
    found = compute_balance(gauge, dict(model.named_parameters()))
    assert found.one_sided == ("0.weight[0]", "0.weight[1]", "2.weight[0]", "2.weight[1]")
    even = applied(found, model)
    middle, outer = even[2].weight, even[4].weight if side == "in" else even[0].weight
    bias = 0.0 if side == "in" else even[0].bias.square()
    sums = outer.square().sum(0) if side == "in" else outer.square().sum(1) + bias
    torch.testing.assert_close(sums, torch.ones(2).double(), rtol=1e-12, atol=0)
    axis = 0 if side == "in" else 1
    bias = 0.0 if side == "in" else even[2].bias.square()
    sums = middle.square().sum(axis) + bias
    torch.testing.assert_close(sums, torch.ones(2).double(), rtol=1e-12, atol=0)
    moved = gauge.rescale(model, gauge.sample(generator=generator(3)))
    assert equal(applied(compute_balance(gauge, dict(moved.named_parameters())), moved), even)


def test_a_unit_whose_only_edge_leads_to_a_dead_one():
    model = mlp(4, 2, 2, 3)
    with torch.no_grad():
        model[4].weight[:, 0] = 0.0  # second layer, unit 0: nothing leaves
        model[2].weight[1, 0] = 0.0  # first layer, unit 0: leads to that one only
    found = compute_balance(find_gauge(model, X), dict(model.named_parameters()))
    assert found.one_sided == ("0.weight[0]", "2.weight[0]")
    even = applied(found, model)
    first = even[0].weight.square().sum(1) + even[0].bias.square()
    assert first.tolist() == pytest.approx([1, even[2].weight[1, 1].item() ** 2], rel=1e-12)


def test_an_edge_from_a_unit_to_itself_does_not_count():
    """h + W h: the diagonal of W enters and leaves the same unit."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.mix, self.head = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.stem(x))
            return self.head(h + self.mix(h))

    torch.manual_seed(0)
    model = Stream().double()
    even = fg.balance(model, X)
    off = even.mix.weight.square() * (1 - torch.eye(3))
    enters = even.stem.weight.square().sum(1) + even.stem.bias.square() + even.mix.bias.square()
    leaves = even.head.weight.square().sum(0)
    torch.testing.assert_close(enters + off.sum(1), leaves + off.sum(0), rtol=1e-12, atol=0)
    diagonals = (even.mix.weight.diagonal(), model.mix.weight.diagonal())
    torch.testing.assert_close(*diagonals, rtol=1e-14, atol=0)
    with torch.no_grad():
        for tensor in (model.stem.weight[0], model.stem.bias[0:1], model.mix.bias[0:1]):
            tensor.zero_()
        model.mix.weight[0, 1:] = 0.0
    with pytest.warns(UserWarning, match=r"one side only.*stem.weight\[0\]"):
        fg.balance(model, X)


class Powers(nn.Module):
    """A power between two layers, and hidden units without a way out."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.first, self.last, self._power = nn.Linear(6, 5), nn.Linear(5, 3), power
        with torch.no_grad():
            self.last.weight[:, :2] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)) ** self._power)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
def test_one_sided_units_get_norm_one_whatever_their_power(power):
    torch.manual_seed(0)
    model, x = Powers(power).double(), torch.randn(4, 6).double()
    gauge = find_gauge(model, x)
    move = gauge.sample(generator=generator(), powers_of_two=False)
    with pytest.warns(UserWarning, match="2 units have weights on one side only"):
        even, again = (fg.balance(m, x) for m in (model, gauge.rescale(model, move)))
    entering = torch.cat([even.first.weight, even.first.bias[:, None]], 1).norm(dim=1)
    torch.testing.assert_close(entering[:2], torch.ones(2).double())
    for one, other in zip(even.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=0)
    torch.testing.assert_close(even(x), model(x))


def test_weights_that_are_not_finite_have_no_balance():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"`2.weight` of the model holds values that are nan"):
        fg.balance(model, torch.randn(2, 3))


# -- real networks -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "resnet20", "resnet2b"])
def test_published_networks(name):
    model, inputs = trained(name), images(name, 4).inputs
    gauge = find_gauge(model, inputs)
    found = compute_balance(gauge, dict(model.named_parameters()))
    assert found.has_converged
    even = applied(found, model)
    assert norm(even) < norm(model)
    torch.testing.assert_close(even(inputs), model(inputs), rtol=1e-4, atol=1e-4)
    moved = gauge.rescale(model, gauge.sample(generator=generator()))
    assert equal(applied(compute_balance(gauge, dict(moved.named_parameters())), moved), even)


def test_a_deep_residual_network():
    torch.manual_seed(0)
    model = CifarResNet(56).eval()
    inputs = torch.randn(2, 3, 32, 32)
    even = fg.balance(model, inputs)
    assert norm(even) < norm(model)
    assert math.isfinite(norm(even))
    torch.testing.assert_close(even(inputs), model(inputs), rtol=1e-3, atol=1e-4)
