"""Feature robustness against features that are really perturbed, and against its bound."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases import Case, build
from reference import dense_blocks, dense_gradient
from torch import Generator, Tensor, nn

import flatgauge as fg
from flatgauge import LossSurface, feature_robustness
from flatgauge.surface.examples import linear_regression


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def random(units: int, groups: int = 1, count: int = 3) -> Tensor:
    """Random matrices over the input units that do not mix groups."""
    matrices = torch.randn(count, units, units, generator=seeded(), dtype=torch.float64)
    group = torch.arange(units) // (units // groups)
    return matrices * (group[:, None] == group[None])


def perturbed(case: Case, layer: nn.Module, matrix: Tensor, delta: float) -> float:
    """The change of the loss when a hook really perturbs the layer's input."""

    def hook(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        units = -1 if isinstance(layer, nn.Linear) else 1
        features = given[0].movedim(units, -1)
        return ((features + delta * features @ matrix.T).movedim(-1, units),)

    case.model.eval()
    before = case.torch_loss(case.model(case.inputs), case.targets).item()
    handle = layer.register_forward_pre_hook(hook)
    after = case.torch_loss(case.model(case.inputs), case.targets).item()
    handle.remove()
    return after - before


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("mlp", "0.weight"),
        ("mlp", "2.weight"),
        ("gelu", "2.weight"),
        ("conv and max-pool", "3.weight"),
        ("grouped and dilated conv", "0.weight"),
        ("grouped and dilated conv", "2.weight"),
        ("residual with batch-norm", "conv.weight"),
        ("transposed conv", "0.weight"),
        ("attention", "value.weight"),
        ("sequence", "wide.weight"),
    ],
)
def test_the_features_are_really_perturbed(name, layer):
    case = build(name)
    module = case.model.get_submodule(layer.removesuffix(".weight"))
    transposed = isinstance(module, nn.ConvTranspose2d)
    groups, weight = getattr(module, "groups", 1), module.weight
    matrices = random(len(weight) if transposed else weight.shape[1] * groups, groups)
    delta = 0.3
    found = feature_robustness(
        case.surface(), layer, delta=delta, matrices=matrices, generator=seeded()
    )
    right = [perturbed(case, module, matrix, delta) for matrix in matrices]
    assert found.changes.tolist() == pytest.approx(right, rel=1e-9, abs=1e-13)
    assert not found.drawn
    assert found.stderr == 0.0


def test_projections_and_rotations_are_matrices_of_norm_one():
    case = build("grouped and dilated conv")
    surface = case.surface()
    layer = case.model[0]
    found = feature_robustness(surface, "0.weight", delta=0.1, generator=seeded())
    units = torch.eye(2, dtype=torch.float64)
    right = [perturbed(case, layer, unit[:, None] * unit[None], 0.1) for unit in units]
    assert found.changes.tolist() == pytest.approx(right, rel=1e-9, abs=1e-13)
    assert not found.drawn
    # Rotations of one unit each are ±1.
    rotated = feature_robustness(
        surface, "0.weight", delta=0.1, matrices="orthogonal", draws=8, generator=seeded()
    )
    signs = torch.tensor([[a, b] for a in (1, -1) for b in (1, -1)], dtype=torch.float64)
    choices = torch.tensor([perturbed(case, layer, torch.diag(s), 0.1) for s in signs])
    nearest = (rotated.changes[:, None] - choices[None]).abs().min(1).values
    assert nearest.max() < 1e-8
    assert rotated.drawn
    assert rotated.stderr == pytest.approx(rotated.changes.std().item() / math.sqrt(8))
    assert rotated.bounds.tolist() == pytest.approx([found.bounds[0].item()] * 8, rel=1e-2)


def test_by_hand():
    # (3w - 1)² at w = 2: λ = 18, κ = 72; along w the slope is 30 · 2 δ.
    surface = linear_regression(2.0)
    found = feature_robustness(
        surface, "weight", delta=0.5, matrices=torch.tensor([[-2.0]]), generator=seeded()
    )
    assert found.changes.item() == 1 - 25.0
    assert found.first_order.item() == -60.0
    assert found.bounds.item() == pytest.approx(0.5 * 0.25 * 4 * 72)
    assert found.kappa == pytest.approx(72.0)
    assert found.excess.item() == pytest.approx(0.0, abs=1e-9)
    assert (found.layer, found.delta, found.mean) == ("weight", 0.5, -24.0)


@pytest.mark.parametrize("matrices", ["projections", "orthogonal"])
@pytest.mark.parametrize(
    ("name", "layer"), [("mlp", "2.weight"), ("conv and max-pool", "3.weight")]
)
def test_gradient_and_bound_are_the_definition(name, layer, matrices):
    case = build(name)
    found = feature_robustness(
        case.surface(), layer, matrices=matrices, draws=5, generator=seeded()
    )
    weight = case.model.get_parameter(layer).detach()
    top = torch.linalg.eigvalsh(dense_blocks(case)[layer])[-1]
    kappa = (weight.square().sum() * top).item()
    assert found.kappa == pytest.approx(kappa, rel=1e-3)
    assert found.bounds.tolist() == pytest.approx([0.5e-6 * kappa] * len(found.bounds), rel=2e-3)
    parts = case.surface().split(dense_gradient(case))
    if matrices == "projections":
        slopes = [1e-3 * (weight[:, j] * parts[layer][:, j]).sum() for j in range(weight.shape[1])]
        assert found.first_order.tolist() == pytest.approx(torch.stack(slopes).tolist(), rel=1e-9)
    assert (found.excess <= 1e-3 * found.bounds).all()


def trained() -> LossSurface:
    """A smooth network, trained until nothing is left of the gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        inputs, targets = torch.randn(60, 3).double(), torch.randn(60, 2).double()
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=3000,
        tolerance_grad=1e-8,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    return LossSurface(model, "mse", (inputs, targets))


def test_the_bound_holds_at_a_minimum():
    surface = trained()
    assert surface.gradient().norm() < 1e-4
    for layer in ("0.weight", "2.weight"):
        for matrices in ("projections", "orthogonal"):
            found = feature_robustness(
                surface, layer, delta=1e-3, matrices=matrices, draws=6, generator=seeded()
            )
            assert found.first_order.abs().max() < 0.05 * found.bounds.min()
            assert (found.changes <= found.first_order + 1.01 * found.bounds).all()
            assert (found.changes > -0.05 * found.bounds).all()


def test_single_precision_is_compared_in_double():
    case = build("mlp")
    fine = feature_robustness(case.surface(), "2.weight", generator=seeded())
    model = copy.deepcopy(case.model).float()
    surface = LossSurface(model, case.loss, (case.inputs, case.targets))
    coarse = feature_robustness(surface, "2.weight", generator=seeded())
    torch.testing.assert_close(coarse.changes, fine.changes, rtol=1e-4, atol=1e-9)
    assert next(model.parameters()).dtype is torch.float32


def test_weight_decay_is_no_function_of_the_features():
    case = build("mlp")
    plain, decayed = (
        feature_robustness(case.surface(weight_decay=d), "2.weight", generator=seeded())
        for d in (0.0, 0.5)
    )
    assert decayed.changes.tolist() == pytest.approx(plain.changes.tolist(), abs=1e-14)
    assert decayed.first_order.tolist() == pytest.approx(plain.first_order.tolist(), abs=1e-14)
    assert decayed.kappa == pytest.approx(plain.kappa, rel=2e-2)


def test_fewer_projections_than_units_are_drawn():
    surface = build("mlp").surface()
    every = feature_robustness(surface, "0.weight", generator=seeded()).changes.tolist()
    some = feature_robustness(surface, "0.weight", draws=2, generator=seeded())
    assert some.drawn
    assert len(some.changes) == 2
    assert set(some.changes.tolist()) < set(every)
    assert fg.feature_robustness is feature_robustness


def test_errors_teach():
    surface = build("grouped and dilated conv").surface()

    def call(layer: str = "0.weight", **options) -> None:
        feature_robustness(surface, layer, **({"generator": seeded()} | options))

    with pytest.raises(ValueError, match=r"not a layer of the model. Did you mean `0.weight`\?"):
        call("0.weigth")
    with pytest.raises(ValueError, match=r"Did you mean `5.weight`\? The layers are 0.weight, 2"):
        call("5")
    with pytest.raises(ValueError, match=r"needs a generator; pass `generator=torch\.Generator"):
        call(generator=None)
    with pytest.raises(ValueError, match=r"`delta=0` must be a finite number above 0"):
        call(delta=0)
    with pytest.raises(ValueError, match=r"`draws=0` must be at least 1"):
        call(draws=0)
    with pytest.raises(ValueError, match=r"`matrices='random'` is unknown; use 'projections'"):
        call(matrices="random")
    with pytest.raises(ValueError, match=r"has shape \(3, 3\), but the layer has 2 input units"):
        call(matrices=torch.eye(3))
    with pytest.raises(ValueError, match=r"mix input units of different groups.* 2 groups reads"):
        call(matrices=torch.ones(2, 2))
    with pytest.raises(ValueError, match="`matrices` holds values that are nan or infinite"):
        call(matrices=torch.full((2, 2), torch.nan))
    with pytest.raises(ValueError, match=r"`first.weight` is read 2 times"):
        feature_robustness(build("tied weights").surface(), "first.weight", generator=seeded())
