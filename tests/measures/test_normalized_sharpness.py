"""Normalized sharpness against its definition, written out, and what it says."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from cases import LAYER_CASES, Case, build
from reference import dense_blocks, module_of, rows_and_columns
from scipy.optimize import minimize
from torch import Generator, nn

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.measures import matrix_normalized_sharpness, normalized_sharpness
from flatgauge.measures.registry import sweep_blocks
from flatgauge.surface.examples import linear_regression

BOTH = [matrix_normalized_sharpness, normalized_sharpness]
EXACT = [name for name in LAYER_CASES if not build(name).curved]
#: Under both losses, where there are class labels.
DEFINED = [
    (name, surrogate)
    for name in EXACT
    for surrogate in ("normalized_cross_entropy", None)
    if surrogate is None or build(name).loss != "mse"
]


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


# -- the definition ----------------------------------------------------------------------------


def normalized_loss(output, target):
    """Equations (20) to (22) for one sample."""
    (f,) = output
    mu = f.sum() / len(f)
    scaled = f / ((f - mu) ** 2 / len(f)).sum().sqrt()
    return -(scaled[target[0]] - torch.logsumexp(scaled, 0))


def under_normalized_loss(case: Case) -> Case:
    """The case under the normalized loss, without samples of constant logits."""
    with torch.no_grad():
        logits = case.model(case.inputs)
    kept = logits.std(1) > 0
    inputs, targets = case.inputs[kept], case.targets[kept]
    return replace(case, torch_loss=normalized_loss, inputs=inputs, targets=targets)


def layers_of(case: Case) -> dict[str, torch.Tensor]:
    layers = {name: w.detach() for name, w in case.model.named_parameters() if w.dim() > 1}
    layers.pop("places", None)
    return layers


def literal_matrix(weight, block):
    return math.sqrt(float(weight.square().sum()) * max(float(block.trace()), 0.0))


def literal_normalized(module, weight, block):
    """Equation (17): one x per output unit, one y per input unit, a term for every weight."""
    rows, columns = rows_and_columns(module, weight)
    curvature = block.diagonal().clamp_min(0).reshape(weight.shape)
    row = sum(k * mask.long() for k, mask in enumerate(rows)).reshape(-1).numpy()
    column = sum(k * mask.long() for k, mask in enumerate(columns)).reshape(-1).numpy()
    h, w = curvature.reshape(-1).numpy(), weight.square().reshape(-1).numpy()

    def total(point):
        logs = point[row] + point[len(rows) + column]
        out, back = h * np.exp(logs), w * np.exp(-logs)
        slope = np.zeros_like(point)
        np.add.at(slope, row, out - back)
        np.add.at(slope, len(rows) + column, out - back)
        return (out + back).sum(), slope

    start = np.zeros(len(rows) + len(columns))
    bounds = [(-60, 60)] * len(start)
    options = {"maxiter": 50_000, "maxfun": 500_000, "ftol": 1e-16, "gtol": 1e-13, "maxcor": 40}
    result = minimize(total, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return result.fun


@pytest.mark.parametrize(("name", "surrogate"), DEFINED)
def test_values_are_the_definition(name, surrogate):
    case = build(name)
    blocks = dense_blocks(under_normalized_loss(case) if surrogate else case)
    surface = case.surface()
    matrix = matrix_normalized_sharpness(surface, surrogate=surrogate)
    rowwise = normalized_sharpness(surface, surrogate=surrogate)
    layers = layers_of(case)
    assert set(matrix.layers) == set(rowwise.layers) == set(layers)
    for layer, weight in layers.items():
        right = literal_matrix(weight, blocks[layer])
        assert matrix.layers[layer] == pytest.approx(right, rel=1e-8, abs=1e-8)
        right = literal_normalized(module_of(case.model, layer), weight, blocks[layer])
        assert rowwise.layers[layer] == pytest.approx(right, rel=1e-5, abs=1e-6)
        assert rowwise.layers[layer] <= right * (1 + 1e-7) + 1e-9
    for estimate in (matrix, rowwise):
        assert estimate.value == pytest.approx(sum(estimate.layers.values()))
        assert estimate.exact
        assert estimate.converged
        assert estimate.stderr == 0
    assert rowwise.bound is None or rowwise.bound <= 1e-8 * rowwise.value
    assert rowwise.details["relative gap"] <= 1e-8


@pytest.mark.parametrize("surrogate", ["normalized_cross_entropy", None])
def test_biases_have_terms_of_their_own_on_request(surrogate):
    """Footnote 1 of the paper: other hyperpriors for biases, likewise."""
    case = build("mlp")
    blocks = dense_blocks(under_normalized_loss(case) if surrogate else case)
    found = matrix_normalized_sharpness(case.surface(), surrogate=surrogate, biases=True)
    parameters = dict(case.model.named_parameters())
    assert list(found.layers) == list(parameters)  # every layer, followed by its bias
    for name, value in found.layers.items():
        right = literal_matrix(parameters[name].detach(), blocks[name])
        assert value == pytest.approx(right, rel=1e-8, abs=1e-8)
    assert found.value == pytest.approx(sum(found.layers.values()))
    assert found.options["biases"] is True
    claimed = fg.measures.registry["matrix_normalized_sharpness"].claims(found.options)
    assert "layerwise" in claimed
    assert "output_shift" not in claimed
    only = matrix_normalized_sharpness(
        case.surface(), surrogate=surrogate, biases=True, layers="0.*"
    )
    assert list(only.layers) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("name", ["gelu", "tied weights", "squared"])
@pytest.mark.parametrize("surrogate", ["normalized_cross_entropy", None])
def test_what_cannot_be_swept_agrees_within_its_own_error(name, surrogate):
    case = build(name)
    blocks = dense_blocks(under_normalized_loss(case) if surrogate else case)
    surface = case.surface()
    for function in BOTH:
        found = function(surface, surrogate=surrogate, probes=512, generator=seeded())
        assert not found.exact
        assert any("estimated" in note for note in found.notes)
        right = 0.0
        for layer, weight in layers_of(case).items():
            if function is matrix_normalized_sharpness:
                right += literal_matrix(weight, blocks[layer])
            else:
                right += literal_normalized(module_of(case.model, layer), weight, blocks[layer])
        assert abs(found.value - right) <= 5 * found.stderr
        assert math.isfinite(found.stderr)


def test_estimates_count_their_products():
    surface = build("gelu").surface()
    found = normalized_sharpness(surface, probes=8, generator=seeded())
    assert found.matvecs == 8 == surface.matvecs
    again = normalized_sharpness(surface, probes=8, generator=seeded())
    assert (again.matvecs, again.value) == (0, found.value)


def test_data_error_is_that_of_many_data_sets():
    """The spread of the value over data sets of the same kind, by the jackknife."""
    case = build("conv and max-pool")
    found = matrix_normalized_sharpness(case.surface(), surrogate=None)
    values = []
    for left in range(len(case.inputs)):
        kept = [k for k in range(len(case.inputs)) if k != left]
        part = replace(case, inputs=case.inputs[kept], targets=case.targets[kept])
        values.append(matrix_normalized_sharpness(part.surface(), surrogate=None).value)
    count = len(values)
    jackknife = math.sqrt((count - 1) ** 2 / count * np.var(values, ddof=1))
    assert found.data_stderr == pytest.approx(jackknife, rel=0.1)
    assert normalized_sharpness(case.surface()).data_stderr is None


# -- by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [2.0, -3.0])
def test_one_weight(weight):
    surface = linear_regression(weight)  # The second derivative is 18.
    matrix = matrix_normalized_sharpness(surface, surrogate=None).value
    assert matrix == pytest.approx(abs(weight) * math.sqrt(18), rel=1e-14)
    rowwise = normalized_sharpness(surface, surrogate=None).value
    assert rowwise == pytest.approx(2 * abs(weight) * math.sqrt(18), rel=1e-14)


def test_two_inputs_have_a_scale_each():
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data[:] = torch.tensor([[1.0, 10.0]])
    inputs = torch.diag(torch.tensor([3.0, 0.5])).double()
    surface = LossSurface(model, "mse", (inputs, torch.zeros(2, 1).double()))
    # h = 2 x² / 2: 9 and 1/4.
    found = normalized_sharpness(surface, surrogate=None).value
    assert found == pytest.approx(2 * (3 * 1 + 0.5 * 10), rel=1e-14)
    found = matrix_normalized_sharpness(surface, surrogate=None).value
    assert found == pytest.approx(math.sqrt(101 * 9.25), rel=1e-14)


def test_dead_rows_and_silent_inputs_cost_nothing():
    case = build("mlp")
    before = normalized_sharpness(case.surface()).value
    wider = copy.deepcopy(case.model)
    wider[0], wider[2] = nn.Linear(5, 6).double(), nn.Linear(6, 4).double()
    with torch.no_grad():
        wider[0].weight[:5, :4], wider[0].bias[:5] = case.model[0].weight, case.model[0].bias
        wider[2].weight[:, :5], wider[2].bias[:] = case.model[2].weight, case.model[2].bias
        wider[0].bias[5] = -100.0
    inputs = torch.cat([case.inputs, torch.zeros(len(case.inputs), 1).double()], dim=1)
    found = normalized_sharpness(replace(case, model=wider, inputs=inputs).surface())
    assert found.value == pytest.approx(before, rel=1e-10)


# -- samples without a loss --------------------------------------------------------------------


def silent(case: Case, count: int) -> Case:
    """Add inputs of zeros, whose logits are constant in a network without biases."""
    inputs = torch.cat([torch.zeros(count, *case.inputs.shape[1:]).double(), case.inputs])
    targets = torch.cat([torch.zeros(count, dtype=torch.long), case.targets])
    return replace(case, inputs=inputs, targets=targets)


class Smooth(nn.Module):
    """No biases, and curved in its first layer: zero inputs give constant logits."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("smooth", [False, True])
def test_constant_logits_are_left_out_and_told(function, smooth):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Smooth() if smooth else nn.Sequential(nn.Linear(4, 3, bias=False))
        inputs, targets = torch.randn(9, 4).double(), torch.randint(0, 3, (9,))
    case = Case(model.double(), "cross_entropy", F.cross_entropy, inputs, targets)
    before, after = (function(c.surface(), generator=seeded()) for c in (case, silent(case, 2)))
    assert after.value == pytest.approx(before.value, rel=1e-11)
    assert not any("left out" in note for note in before.notes)
    assert any(note.startswith("2 samples left out: constant logits") for note in after.notes)


@pytest.mark.parametrize("smooth", [False, True])
def test_ignored_labels_are_left_out(smooth):
    case = build("gelu" if smooth else "mlp")
    some = [0, 2, 3, 5, 6, 8]
    targets = torch.full_like(case.targets, -100)
    targets[some] = case.targets[some]
    part = replace(case, inputs=case.inputs[some], targets=case.targets[some])
    for function in BOTH:
        masked = function(replace(case, targets=targets).surface(), generator=seeded())
        right = function(part.surface(), generator=seeded())
        assert masked.value == pytest.approx(right.value, rel=1e-9)
        assert not any("left out" in note for note in masked.notes)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("smooth", [False, True])
def test_only_constant_logits_is_an_error(function, smooth):
    model = (Smooth() if smooth else nn.Linear(4, 3, bias=False)).double()
    data = torch.zeros(5, 4).double(), torch.arange(5) % 3
    surface = LossSurface(model, "cross_entropy", data)
    with pytest.raises(ValueError, match="the logits of every sample are constant"):
        function(surface, generator=seeded())


# -- what is shared, told, refused -------------------------------------------------------------


def test_both_share_one_sweep_of_the_surrogate(monkeypatch):
    swept = []

    def spied(surface, needs, *, surrogate, **options):
        swept.append((surrogate, set(needs.parts)))
        return sweep_blocks(surface, needs, surrogate=surrogate, **options)

    monkeypatch.setattr("flatgauge.analysis.measurement.sweep_blocks", spied)
    surface = build("mlp").surface()
    seen = []
    with surface.on_progress(seen.append):
        names = ["matrix_normalized_sharpness", "normalized_sharpness", "rho_sum"]
        fg.measure(surface, measures=names)
    assert sorted(swept, key=str) == [
        ("normalized_cross_entropy", {"trace", "diagonal"}),
        (None, {"outgoing"}),
    ]
    swept.clear()
    options = {"normalized_sharpness": {"surrogate": None}, "kappa_trace_sum": {}}
    fg.measure(surface, measures=options)
    assert swept == [(None, {"trace", "diagonal"})]


def test_a_surface_under_another_loss_follows_the_model():
    case = build("mlp")
    surface = case.surface()
    before = normalized_sharpness(surface).value
    with torch.no_grad():
        case.model[0].weight[0, 0] += 1
    after = normalized_sharpness(surface).value
    assert after != before
    assert after == normalized_sharpness(case.surface()).value
    assert normalized_sharpness(surface.copy()).value == after


def test_weight_decay_is_no_part_of_the_surrogate():
    case = build("mlp")
    plain, decayed = case.surface(), case.surface(weight_decay=0.3)
    assert normalized_sharpness(decayed).value == normalized_sharpness(plain).value
    own = [normalized_sharpness(s, surrogate=None).value for s in (plain, decayed)]
    assert own[1] > own[0]


def test_layers_may_be_chosen():
    surface = build("mlp").surface()
    for function in BOTH:
        whole, part = (
            function(surface, surrogate=None),
            function(surface, layers="[24].*", surrogate=None),
        )
        assert part.layers == {k: v for k, v in whole.layers.items() if not k.startswith("0")}
        assert part.options == {"surrogate": None, "layers": "[24].*"}


def test_negative_curvature_is_told():
    found = normalized_sharpness(build("mlp").surface())
    assert 0 < found.details["negative curvature"] < 1
    assert any("count as zero" in note for note in found.notes)
    found = matrix_normalized_sharpness(build("mlp").surface())
    assert any("is negative and counts as zero" in note for note in found.notes)


@pytest.mark.parametrize("function", BOTH)
def test_errors(function):
    mse = build("leaky relu with mse").surface()
    with pytest.raises(
        ValueError, match=r"targets are torch.float64 of shape .4, 2.; pass `surrog"
    ):
        function(mse)
    with pytest.raises(ValueError, match=r"`surrogate='hinge'` is unknown; use 'normalized_cross"):
        function(mse, surrogate="hinge")
    with pytest.raises(ValueError, match="matches no layer"):
        function(mse, surrogate=None, layers="nothing")
    with pytest.raises(ValueError, match=r"needs a generator; pass `generator=torch\.Gen"):
        function(build("gelu").surface())


def test_labels_at_every_position_are_refused():
    model = nn.Linear(3, 3)
    surface = LossSurface(model, "cross_entropy", (torch.randn(4, 5, 3), torch.ones(4, 5).long()))
    with pytest.raises(ValueError, match=r"outputs have shape .4, 5, 3. and the targets are torch"):
        normalized_sharpness(surface)


@pytest.mark.parametrize(("name", "count"), [("resnet20", 8), ("lenet", 60)])
def test_trained_networks(name, count):
    surface = LossSurface(zoo.trained(name), "cross_entropy", zoo.images(name, count))
    report = fg.measure(surface, measures=[function.__name__ for function in BOTH])
    for function in BOTH:
        found = report[function.__name__]
        assert found.exact
        assert found.converged
        assert math.isfinite(found.value)
        assert found.value > 0
    assert report["normalized_sharpness"].details["relative gap"] < 1e-8
