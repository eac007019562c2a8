"""What the sweep promises beyond its definition: errors, many classes, precision, sharing."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from cases import Case, build
from reference import dense_blocks
from torch import Generator, nn

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.curvature import block_diagonal
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.block_eigenvalues import block_eigenvalues
from flatgauge.curvature.sweep.backprop import Sweep
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.runtime import resources

#: The module; the function of this name hides it in its package.
eigenvalues = sys.modules[block_eigenvalues.__module__]


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


# -- errors ------------------------------------------------------------------------------------


def test_data_errors_are_those_of_a_bootstrap():
    case = build("mlp")
    single = []  # The trace of every sample's own Hessian, layer by layer.
    for x, y in zip(case.inputs, case.targets, strict=True):
        alone = Case(case.model, case.loss, case.torch_loss, x[None], y[None])
        dense = dense_blocks(alone)
        single.append([dense[f"{i}.weight"].trace().item() for i in (0, 2, 4)])
    traces = torch.tensor(single, dtype=torch.float64)
    norms = torch.tensor([case.model[i].weight.detach().square().sum() for i in (0, 2, 4)])
    kappas = traces * norms
    draws = torch.randint(11, (20_000, 11), generator=seeded())
    resampled = kappas[draws].mean(1)  # (20 000, 3)
    correction = math.sqrt(11 / 10)
    report = fg.measure(case.surface(), measures=["kappa_trace_sum", "kappa_trace_max"])
    sums = resampled.sum(1).std().item() * correction
    assert report["kappa_trace_sum"].data_stderr == pytest.approx(sums, rel=0.03)
    largest = int(kappas.mean(0).argmax())
    expected = resampled[:, largest].std().item() * correction
    assert report["kappa_trace_max"].data_stderr == pytest.approx(expected, rel=0.03)


def test_data_errors_of_units_and_of_uneven_counts():
    case = build("mlp")
    labels = case.targets.clone()
    labels[:4] = -100  # These samples count nothing.
    whole = LossSurface(case.model, "cross_entropy", (case.inputs, labels))
    block = block_curvature(whole, ("trace", "outgoing"))["2.weight"]
    rest = LossSurface(case.model, "cross_entropy", (case.inputs[4:], labels[4:]))
    other = block_curvature(rest, ("trace", "outgoing"))["2.weight"]
    # A ratio over 11 samples, of which 7 count: nearly the mean over these 7.
    torch.testing.assert_close(block.values["outgoing"], other.values["outgoing"])
    ratio = block.data_stderr["outgoing"] / other.data_stderr["outgoing"]
    torch.testing.assert_close(ratio, torch.full_like(ratio, math.sqrt(11 / 10 * 6 / 7)))
    assert block.samples["trace"].mean().item() == pytest.approx(block.values["trace"].item())
    spread = block.samples["trace"].std().item() / math.sqrt(11)
    assert spread == pytest.approx(block.data_stderr["trace"].item())


def test_one_sample_has_no_data_error():
    surface = LossSurface(nn.Linear(3, 2).double(), "mse", (torch.randn(1, 3), torch.randn(1, 2)))
    estimate = fg.measure(surface, measures=["kappa_trace_sum"])["kappa_trace_sum"]
    assert estimate.exact
    assert estimate.data_stderr is None or math.isnan(estimate.data_stderr)


# -- many classes ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["classes", "positions", "mse"])
def many(request) -> LossSurface:
    """100 classes; 8 positions with 15 classes each; 100 numbers."""
    positions = request.param == "positions"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = 15 if positions else 100
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs)).double()
        shape = (300, 8) if positions else (300,)
        inputs, labels = torch.randn(*shape, 6).double(), torch.randint(0, outputs, shape)
    for parameter in model.parameters():
        parameter.data *= 2
    if request.param == "mse":
        return LossSurface(model, "mse", (inputs, F.one_hot(labels, 100).double()))
    return LossSurface(model, "cross_entropy", (inputs, labels))


@pytest.mark.parametrize("seed", range(5))
def test_many_classes_within_their_own_error(many, seed):
    exact = block_curvature(many, all_columns=True)
    hybrid = block_curvature(many, generator=seeded(seed))
    for name, block in hybrid.items():
        assert exact[name].exact
        assert not block.exact
        for part in block.stderr:
            right = exact[name].values[part]
            difference = (block.values[part] - right).abs()
            assert (difference <= 6 * block.stderr[part] + 1e-12).all()
        relative = (block.stderr["trace"] / exact[name].values["trace"]).item()
        assert relative < 0.05
        # Outputs of the last layer have weights of their own: their signs cannot matter.
        right = exact[name].values["trace"].item()
        assert relative > 1e-5 or block.values["trace"].item() == pytest.approx(right, rel=1e-12)


def test_all_columns_of_many_classes_are_the_hessian(many):
    exact = block_curvature(many, ("diagonal",), all_columns=True)
    found = torch.cat([block.values["diagonal"].reshape(-1) for block in exact.values()])
    generator = seeded()
    for index in torch.randint(many.size, (5,), generator=generator).tolist():
        vector = torch.zeros(many.size).double()
        vector[index] = 1
        assert many.hvp(vector)[index].item() == pytest.approx(found[index].item(), rel=1e-9)


def test_many_classes_need_a_generator(many):
    with pytest.raises(ValueError, match=r"needs a generator; pass .* all \d+ factors per sample"):
        block_curvature(many)


# -- small losses ------------------------------------------------------------------------------


def test_single_precision_at_small_losses():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 5))
        inputs, labels = torch.randn(60, 8), torch.randint(0, 5, (60,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(4000):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if loss < 1e-5:
            break
    assert loss < 1.1e-5
    single = LossSurface(model, "cross_entropy", (inputs, labels))
    double = LossSurface(model, "cross_entropy", (inputs, labels), dtype=torch.float64)
    found, right = block_curvature(single), block_curvature(double)
    for name, block in found.items():
        for part, values in block.values.items():
            expected = right[name].values[part]
            assert ((values - expected).norm() / expected.norm()).item() < 1e-5, (name, part)
    tops = [
        block_eigenvalues(s, ["0.weight"], tolerance=1e-6, max_matvecs=300, generator=seeded())
        for s in (single, double)
    ]
    assert tops[0]["0.weight"].value == pytest.approx(tops[1]["0.weight"].value, rel=1e-5)


# -- sharing -----------------------------------------------------------------------------------


def test_one_sweep_serves_all_measures_until_the_parameters_change(monkeypatch):
    case = build("mlp")
    surface = case.surface()
    sweeps = []
    swept = block_diagonal._sweep_blocks
    count = lambda *args: sweeps.append(args[1]) or swept(*args)  # noqa: E731
    monkeypatch.setattr(block_diagonal, "_sweep_blocks", count)
    names = ["hessian_trace", "kappa_trace_sum", "rho_max", "relative_flatness"]
    first = fg.measure(surface, measures=names)
    assert sweeps == [{"trace", "outgoing", "relative"}]
    again = fg.measure(surface, measures=names, seed=7)
    assert len(sweeps) == 1
    assert [again[n].value for n in names] == [first[n].value for n in names]
    with torch.no_grad():
        case.model[0].weight *= 1.5
    moved = fg.measure(surface, measures=names)
    assert len(sweeps) == 2
    assert moved["hessian_trace"].value != first["hessian_trace"].value
    fresh = fg.measure(build("mlp").surface(), measures=["kappa_trace_sum"])["kappa_trace_sum"]
    assert fresh.value == first["kappa_trace_sum"].value


def test_a_value_does_not_depend_on_what_is_measured_beside_it():
    together = fg.measure(build("gelu").surface(), measures=["kappa_trace_sum", "rho_sum"])
    for name in together:
        alone = fg.measure(build("gelu").surface(), measures=[name])
        assert alone[name].value == together[name].value
        assert alone[name].stderr == together[name].stderr


def test_the_same_generator_gives_the_same_trace_on_a_surface_that_was_swept_before():
    surface = build("gelu").surface()
    first, second = (
        fg.measures.hessian_trace(surface, probes=6, generator=seeded()) for _ in range(2)
    )
    assert not first.exact
    assert first.value == second.value


# -- eigenvalues -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "conv and max-pool", "grouped and dilated conv", "transposed conv", "3-d conv"),
        *("depthwise conv", "sequence", "gated", "gelu", "tied weights", "attention"),
    ],
)
def test_largest_eigenvalues_of_blocks(name):
    case = build(name)
    surface = case.surface(weight_decay=0.05)
    layers = list(block_curvature(surface, ("trace",), generator=seeded()).layers)
    tops = block_eigenvalues(surface, layers, tolerance=1e-9, max_matvecs=300, generator=seeded())
    dense = dense_blocks(case)
    for layer, top in tops.items():
        expected = torch.linalg.eigvalsh(dense[layer])[-1].item() + 0.05
        assert top.value == pytest.approx(expected, rel=1e-8)
        assert top.converged
        assert top.residual <= 1e-8 * expected
        if top.samples is not None:
            assert top.samples.mean().item() == pytest.approx(expected, rel=1e-8)


def test_eigenvalues_within_a_memory_budget(monkeypatch):
    case = build("conv and max-pool")
    layers = ["0.weight", "3.weight", "6.weight"]
    options = {"tolerance": 1e-9, "max_matvecs": 300}
    free = block_eigenvalues(case.surface(), layers, **options, generator=seeded())
    groups = []
    grouped = Sweep.group_layers

    def watch(sweeper, names):
        groups.append(grouped(sweeper, names))
        return groups[-1]

    monkeypatch.setattr(Sweep, "group_layers", watch)
    for share, parts in ((1e-5, 2), (1e-9, 0)):
        monkeypatch.setattr(resources, "_FACTOR_SHARE", share)
        surface = case.surface(memory="1GiB")
        tight = block_eigenvalues(surface, layers, **options, generator=seeded())
        assert len(groups[-1][0]) == parts
        for name in layers:
            assert tight[name].value == pytest.approx(free[name].value, rel=1e-8)
    assert groups[-1][1] == layers[::-1]  # by products with the whole Hessian


# -- what cannot be read -----------------------------------------------------------------------


class Branching(nn.Module):
    """Takes another way for some values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        if x.sum() > 0:
            return self.linear(x)
        return -self.linear(x)


def test_a_model_that_is_no_graph_is_estimated_or_refused():
    surface = LossSurface(Branching(), F.mse_loss, (torch.ones(5, 3), torch.zeros(5, 2)))
    with pytest.raises(UnsupportedGraphError, match="cannot be exported as a graph"):
        fg.measure(surface, measures=["rho_max"])
    trace = fg.measure(surface, measures=["hessian_trace"])["hessian_trace"]
    assert trace.exact  # By one product for each of its eight parameters.
    assert not any("estimated" in note for note in trace.notes)
    linear = LossSurface(Branching().linear, F.mse_loss, (torch.ones(5, 3), torch.zeros(5, 2)))
    right = fg.measure(linear, measures=["hessian_trace"])["hessian_trace"]
    assert trace.value == pytest.approx(right.value, rel=1e-5)


def test_parts_are_checked():
    with pytest.raises(ValueError, match=r"the parts are trace, .*, but got \['eigenvalue'\]"):
        block_curvature(build("mlp").surface(), ("eigenvalue",))


def test_what_cannot_be_swept_needs_a_generator():
    with pytest.raises(ValueError, match=r"`0.weight` cannot be swept \(the output is curved in"):
        block_curvature(build("gelu").surface())
    with pytest.raises(ValueError, match="gives no standard error; use at least 2"):
        block_curvature(build("gelu").surface(), probes=1, generator=seeded())


def test_leaving_out_what_cannot_be_swept():
    blocks = block_curvature(build("gelu").surface(), ("trace",), estimate=False)
    assert list(blocks) == ["4.weight", "4.bias"]
    assert set(blocks.missing) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("measures", "swept"),
    [
        (["rho_sum"], {"outgoing"}),
        ({"rho_sum": {"side": "incoming"}}, {"incoming"}),
        ({"rho_sum": {"side": "incoming"}, "rho_max": {}}, {"incoming", "outgoing"}),
        ({"rho_sum": {}, "hessian_trace": {}, "rho_max": {}}, {"outgoing", "trace"}),
    ],
)
def test_a_shared_sweep_gathers_what_is_asked_for_and_no_more(monkeypatch, measures, swept):
    asked = []
    chunks = Sweep.chunks

    def listening(self, names, wanted, **options):
        asked.append(set(wanted))
        return chunks(self, names, wanted, **options)

    monkeypatch.setattr(Sweep, "chunks", listening)
    case = build("conv and max-pool")
    report = fg.measure(case.surface(), measures=measures)
    assert asked == [swept]
    for side in swept & {"incoming", "outgoing"}:
        alone = fg.measures.rho_sum(case.surface(), side=side).value
        if report["rho_sum"].options["side"] == side:
            assert report["rho_sum"].value == alone
