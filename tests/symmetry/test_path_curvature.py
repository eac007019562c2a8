"""The exact sweeps of path space against its own operator, which dense Hessians have checked."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import LAYER_CASES, build
from torch import Generator, Tensor, nn

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.geometry import PathValues
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.measures import psi_trace
from flatgauge.symmetry.basis_paths import surface_paths
from flatgauge.symmetry.path_curvature import path_second_derivatives

SKELETONS = ("strongest", "diagonal")

#: Cases with products of activations have no basis paths.
WITHOUT = ("attention", "squared", "gated")

#: What is left to products, by case: roots of residual streams, samples that do not lie in front.
LEFT = {"residual with batch-norm": 3, "sequence": 8}


def unknown_roots(surface: LossSurface, skeleton: str) -> int:
    paths = surface_paths(surface, skeleton)
    roots = torch.zeros(len(paths), dtype=torch.bool)
    roots[paths.roots] = True
    return int((roots & ~path_second_derivatives(surface, paths).known).sum())


def agrees(surface: LossSurface, skeleton: str) -> None:
    chart = PathValues(surface, skeleton=skeleton)
    found = path_second_derivatives(surface, chart.paths)
    diagonal = chart.curvature().dense().diagonal()
    error = (found.values - diagonal)[found.known].abs()
    assert float(error.max()) <= 1e-10 * float(diagonal.abs().max())
    _, gradient = chart.value_and_gradient(chart.origin)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "skeleton"),
    [(name, "strongest") for name in LAYER_CASES if name not in WITHOUT]
    + [(name, "diagonal") for name in ("mlp", "conv and max-pool", "grouped and dilated conv")],
)
def test_agree_with_the_operator(name, skeleton):
    surface = build(name).surface()
    agrees(surface, skeleton)
    assert unknown_roots(surface, skeleton) == LEFT.get(name, 0)


@pytest.mark.parametrize("name", WITHOUT)
def test_products_of_activations_have_no_paths(name):
    with pytest.raises(UnsupportedGraphError, match="depends on several units at once"):
        surface_paths(build(name).surface())


class Wide(nn.Module):
    """A unit that is read twice and written twice, a wide skip, a batch-norm with a late bias."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.left, self.right = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 2, 1)
        self.join = nn.Conv2d(4, 2, 2)
        self.head = nn.Linear(2 * 2 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.cat([torch.relu(self.left(x)), torch.relu(self.right(x))], dim=1)
        x = nn.functional.avg_pool2d(torch.relu(x), 2, stride=1)
        return self.head(torch.relu(self.join(x))[:, :, :2, :2].flatten(1))


class Summed(nn.Module):
    """Two parallel layers write into the same units, which are then read by two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.one, self.two = nn.Linear(5, 4), nn.Linear(5, 4, bias=False)
        self.up, self.down = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.one(x) + self.two(x))
        return self.up(x) + torch.relu(self.down(x))


class PreActivation(nn.Module):
    """The scale of a batch-norm on a shared stream is no free weight, and moves its bias along."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm, self.last = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.inner(torch.relu(self.norm(x)))
        return self.head(torch.relu(self.last(x)))


class Shortcut(nn.Module):
    """A unit that a batch-norm reads and another layer, too: its free weight may be the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.deep, self.short, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.relu(self.deep(torch.relu(self.norm(x))) + self.short(x)))


class Siamese(nn.Module):
    """A layer that is read twice, once in front of a batch-norm: its bias stays its own."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        other = torch.relu(self.twice(x.flip(1)))
        return self.one(torch.relu(self.norm(self.twice(x)))) + self.two(other)


class Scaled(nn.Module):
    """A batch-norm with stored statistics but no shift, or no scale, on a unit of two readers."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.stem, self.deep, self.short = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.kept = nn.Parameter(torch.zeros(4))
        self.role = kept
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        normal = nn.functional.batch_norm(x, self.mean, self.var, **{self.role: self.kept})
        return self.deep(torch.relu(normal)) + self.short(x)


def surface_of(model: nn.Module, shape: tuple[int, ...], seed: int = 0, **options) -> LossSurface:
    generator = Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.6)
    inputs = torch.randn(7, *shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, (7,), generator=generator)
    return LossSurface(model, options.pop("loss", "cross_entropy"), (inputs, labels), **options)


@pytest.mark.parametrize("skeleton", SKELETONS)
@pytest.mark.parametrize(
    ("build_model", "shape"),
    [(Wide, (1, 6, 6)), (Summed, (4,)), (PreActivation, (3,))],
)
def test_branches_sums_and_pre_activations(build_model, shape, skeleton):
    agrees(surface_of(build_model(), shape), skeleton)


@pytest.mark.parametrize("skeleton", SKELETONS)
@pytest.mark.parametrize("role", ["weight", "bias"])
def test_batch_norms_without_shift_or_scale(role, skeleton):
    surface = surface_of(Scaled(role), (3,))
    agrees(surface, skeleton)
    chart = PathValues(surface, skeleton=skeleton)
    u = 0.1 * chart.epsilon * chart.direction(Generator().manual_seed(0))
    weights = chart.paths.to_weights(chart.paths.values + u)
    twin = copy.deepcopy(surface.model)
    twin.load_state_dict(dict(twin.state_dict()) | weights)
    there = fg.basis_paths(twin, torch.zeros(2, 3).double(), skeleton=skeleton)
    torch.testing.assert_close(there.values, chart.paths.values + u, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("build_model", [Shortcut, Siamese])
def test_what_a_batch_norm_shares(build_model, seed):
    surface = surface_of(build_model(), (3,), seed=seed)
    agrees(surface, "strongest")
    paths = surface_paths(surface)
    assert len(paths) == paths.m - paths.hidden
    assert not paths.dropped


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.3},
        {"chunk": 2},
        {"loss": nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0]).double())},
    ],
)
def test_under_weight_decay_chunks_and_class_weights(options):
    agrees(surface_of(Summed(), (4,), **options), "strongest")


def deep(width: int) -> nn.Module:
    layers = [nn.Linear(width, width, bias=False) for _ in range(5)]
    return nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())), nn.Linear(width, 2))


def test_long_runs_are_exact_by_products_where_there_are_few():
    surface = surface_of(deep(5), (5,))
    found = psi_trace(surface, skeleton="diagonal")
    chart = PathValues(surface, skeleton="diagonal")
    trace = float(chart.curvature().dense().diagonal().sum())
    assert found.exact
    assert found.value == pytest.approx(trace, rel=1e-10)
    assert found.matvecs == 5  # one for every root: runs of five units
    assert not any("estimated" in note for note in found.notes)


def test_long_runs_are_estimated_with_their_error_where_there_are_many():
    surface = surface_of(deep(12), (12,))
    trace = float(PathValues(surface, skeleton="diagonal").curvature().dense().diagonal().sum())
    values, errors = [], []
    for seed in range(20):
        source = Generator().manual_seed(seed)
        found = psi_trace(surface, skeleton="diagonal", probes=9, generator=source)
        assert not found.exact
        values.append(found.value)
        errors.append(found.stderr)
    scores = (torch.tensor(values) - trace) / torch.tensor(errors)
    assert float(scores.abs().median()) < 2.0
    assert abs(float(torch.tensor(values).mean()) - trace) < 4 * max(errors)


@pytest.mark.parametrize("relative", [False, True])
def test_only_layers_move_the_others_stay(relative):
    surface = surface_of(Summed(), (4,))
    chart = PathValues(surface, "layers", relative=relative)
    dense = chart.curvature().dense()
    found = psi_trace(surface, parameters="layers", relative=relative)
    assert found.value == pytest.approx(float(dense.diagonal().sum()), rel=1e-10)
    biases = torch.cat([torch.full((len(p),), n.endswith("bias")) for n, p in chart.paths.entries])
    assert float(dense[biases].abs().max()) == 0.0


def test_frozen_parameters_are_refused():
    model = deep(3)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"`0\.weight` is frozen, but basis paths run through"):
        psi_trace(surface_of(model, (3,)))


def test_many_outputs_are_swept_on_request():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 70))
    surface = surface_of(model, (2,))
    source = Generator().manual_seed(0)
    rough = psi_trace(surface, generator=source)
    exact = psi_trace(surface, all_columns=True)
    assert (rough.exact, exact.exact) == (False, True)
    assert "`all_columns=True` sweeps them" in rough.notes[-1]
    assert abs(rough.value - exact.value) < 5 * rough.stderr
