"""Relative flatness with normalized features, against networks that are really normalized."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import LAYER_CASES, Case, build
from reference import dense_blocks, relative, rows_and_columns
from torch import Generator, Tensor, nn

from flatgauge import LossSurface, find_gauge
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.sweep.accumulate import Moments
from flatgauge.measures import relative_flatness, relative_flatness_normalized


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


class Divided(nn.Module):
    """A layer whose input units are divided by numbers, and its weights multiplied."""

    def __init__(self, layer: nn.Module, spread: Tensor) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.spread = torch.where(spread == 0, 1.0, spread)  # Left out by a weight of zero.
        weight = self.layer.weight
        if isinstance(layer, nn.Linear):
            factors = spread
        elif isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d)):
            factors = spread.view(-1, *[1] * (weight.dim() - 1))
        else:
            groups, inner = layer.groups, weight.shape[1]
            each = spread.view(groups, 1, inner).expand(groups, len(weight) // groups, inner)
            factors = each.reshape(len(weight), inner, *[1] * (weight.dim() - 2))
        weight.data *= factors

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Linear):
            return self.layer(x / self.spread)
        return self.layer(x / self.spread.view(-1, *[1] * (x.dim() - 2)))


def spread_of(case: Case, layer: nn.Module) -> Tensor:
    """Standard deviations of a layer's input units, over samples and positions."""
    seen = []
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    case.model.eval()(case.inputs)
    hook.remove()
    inputs = seen[0] if isinstance(layer, nn.Linear) else seen[0].movedim(1, -1)
    rows = inputs.reshape(-1, inputs.shape[-1])
    spread = rows.std(0, correction=0)
    constant = (rows == rows[0]).all(0)
    return torch.where(constant, rows[0].abs(), spread)


def normalized(case: Case, name: str) -> float:
    """Relative flatness of one layer of the normalized network, by its dense Hessian."""
    path = name.removesuffix(".weight")
    model = copy.deepcopy(case.model)
    layer = model.get_submodule(path)
    spread = spread_of(Case(model, case.loss, case.torch_loss, case.inputs, case.targets), layer)
    changed = Divided(layer, spread)
    owner, _, last = path.rpartition(".")
    setattr(model.get_submodule(owner), last, changed)
    other = Case(model, case.loss, case.torch_loss, case.inputs, case.targets)
    weight = changed.layer.weight.detach().clone()
    blocks = dense_blocks(other)
    rows, _ = rows_and_columns(layer, weight)
    return relative(weight, rows, blocks[f"{path}.layer.weight"], getattr(layer, "groups", 1))


@pytest.mark.parametrize("name", [name for name in LAYER_CASES if name not in ("3-d conv",)])
def test_the_definition_on_the_normalized_network(name):
    case = build(name)
    blocks = block_curvature(case.surface(), ("normalized",), probes=64, generator=seeded())
    tried = 0
    for layer, block in blocks.layers.items():
        module = case.model.get_submodule(layer.rpartition(".")[0])
        if not hasattr(module, "weight") or "normalized" not in block.values:
            continue
        tried += 1
        right = normalized(case, layer)
        got = block.values["normalized"].item()
        if block.exact:
            assert got == pytest.approx(right, rel=1e-9)
            assert block.samples["normalized"].mean().item() == pytest.approx(got, rel=1e-10)
        else:
            assert abs(got - right) <= 5 * block.stderr["normalized"].item()
    assert tried or name == "tied weights"


@pytest.mark.parametrize("name", ["conv and max-pool", "grouped and dilated conv", "mlp"])
def test_weight_decay(name):
    case = build(name)
    plain, decayed = (
        block_curvature(case.surface(weight_decay=d), ("normalized",)) for d in (0.0, 0.7)
    )
    for layer, block in plain.layers.items():
        module = case.model.get_submodule(layer.rpartition(".")[0])
        spread, weight = spread_of(case, module), module.weight.detach()
        groups = getattr(module, "groups", 1)
        spread = spread.view(groups, -1)
        added = 0.0
        for group, part in enumerate(weight.unflatten(0, (groups, -1))):
            sigma = spread[group].view(1, -1, *[1] * (weight.dim() - 2))
            inverse = torch.where(sigma == 0, 0.0, 1 / sigma.square()).expand(part[:1].shape).sum()
            added += 0.7 * float((part * sigma).square().sum() * inverse)
        gained = decayed[layer].values["normalized"] - block.values["normalized"]
        assert gained.item() == pytest.approx(added, rel=1e-9)


# -- by hand -----------------------------------------------------------------------------------


def line(inputs: Tensor, weight: Tensor) -> LossSurface:
    """One linear map, squared error against zero: the Hessian is 2 E[x xᵀ]."""
    model = nn.Linear(len(weight), 1, bias=False).double()
    model.weight.data = weight[None].double()
    return LossSurface(model, "mse", (inputs.double(), torch.zeros(len(inputs), 1).double()))


def test_by_hand():
    # σ² = 1 and 16: inputs over σ have the squares 10/2 and 40/16, weights times σ 4 and 144.
    inputs = torch.tensor([[1.0, -1.0], [3.0, 7.0]])
    surface = line(inputs, torch.tensor([2.0, 3.0]))
    expected = 2 * ((1 + 9) / 2 / 1 + (1 + 49) / 2 / 16) * (4 * 1 + 9 * 16)
    assert relative_flatness_normalized(surface).value == pytest.approx(expected, rel=1e-12)
    assert relative_flatness(surface).value == pytest.approx(2 * (10 + 50) / 2 * 13, rel=1e-12)


def test_units_that_never_vary():
    # The second unit is always -5: its square over 25 is one. The third is always zero.
    inputs = torch.tensor([[1.0, -5.0, 0.0], [3.0, -5.0, 0.0]])
    surface = line(inputs, torch.tensor([2.0, 3.0, 7.0]))
    expected = 2 * (10 / 2 + 1) * (4 + 9 * 25)
    assert relative_flatness_normalized(surface).value == pytest.approx(expected, rel=1e-12)


def test_one_sample_has_no_spread_but_a_size():
    surface = line(torch.tensor([[2.0, 4.0]]), torch.tensor([1.0, 1.0]))
    assert relative_flatness_normalized(surface).value == pytest.approx(2 * 2 * 20, rel=1e-12)


def test_samples_that_the_loss_leaves_out_do_not_count():
    case = build("mlp")
    targets = case.targets.clone()
    targets[::3] = -100
    kept = targets != -100
    values = [
        relative_flatness_normalized(LossSurface(case.model, "cross_entropy", data, chunk=2)).value
        for data in ((case.inputs, targets), (case.inputs[kept], targets[kept]))
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_moments_of_pieces_are_those_of_the_whole():
    rows = torch.randn(1000, 3, generator=seeded(), dtype=torch.float64) * 1e-3
    rows += torch.tensor([0.0, 1e6, -1e3], dtype=torch.float64)
    moments = None
    for piece in rows.split([1, 499, 300, 200]):
        moments = Moments.of_rows(piece).join(moments)
    torch.testing.assert_close(moments.std(1e-14), rows.std(0, correction=0), rtol=1e-7, atol=0)


def test_many_outputs_within_their_own_error():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 100)).double()
        inputs, labels = torch.randn(200, 6).double(), torch.randint(0, 100, (200,))
    surface = LossSurface(model, "cross_entropy", (inputs, labels))
    exact = relative_flatness_normalized(surface, all_columns=True)
    mixed = relative_flatness_normalized(surface, generator=seeded())
    assert exact.exact
    assert not mixed.exact
    for name, value in exact.layers.items():
        assert mixed.layers[name] == pytest.approx(value, rel=0.1)
    assert abs(mixed.value - exact.value) <= 5 * mixed.stderr + 1e-9 * exact.value


# -- invariance --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "conv and max-pool", "residual with batch-norm"])
@pytest.mark.parametrize("powers", [True, False])
def test_rescaling_every_unit(name, powers):
    case = build(name)
    gauge = find_gauge(case.model, case.inputs)
    move = gauge.sample(generator=seeded(), powers_of_two=powers)
    moved = LossSurface(gauge.rescale(case.model, move), case.loss, (case.inputs, case.targets))
    before, after = (relative_flatness_normalized(s).layers for s in (case.surface(), moved))
    assert len(before) >= 3
    assert after == before if powers else after == pytest.approx(before, rel=1e-10)
    plain = relative_flatness(case.surface()).value
    assert abs(relative_flatness(moved).value / plain - 1) > 1e-3


# -- what it says ------------------------------------------------------------------------------


def test_a_weight_that_is_read_twice_has_no_one_spread():
    with pytest.raises(
        ValueError, match=r"inputs of `first.weight` have no one standard deviation.*layers="
    ):
        relative_flatness_normalized(build("tied weights").surface(), generator=seeded())
