"""The certificate: what it proves, and what it must reject."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from cases import build
from torch import Tensor, nn
from torch.nn.utils import prune
from zoo import images, trained

import flatgauge as fg
from flatgauge import LossSurface, certify
from flatgauge.estimators.estimate import Estimate
from flatgauge.graph.ops import OPS
from flatgauge.measures import Measure, registry


def verdicts(certificate: fg.analysis.Certificate) -> dict[tuple[str, str], str]:
    return {(row.measure, row.group): row.verdict for row in certificate.rows}


@pytest.fixture
def claiming(monkeypatch):
    """Lets a measure claim other groups than it does."""

    def claim(name: str, *groups: str) -> None:
        changed = replace(registry[name], invariant_to=frozenset(groups))
        monkeypatch.setitem(registry._measures, name, changed)

    return claim


# -- what it must reject ----------------------------------------------------------------------


@pytest.mark.parametrize("group", ["layerwise", "nodewise", "rows"])
def test_the_trace_is_rejected_under_every_rescaling(group, claiming):
    claiming("hessian_trace", group)
    certificate = certify(build("mlp").surface(), measures=["hessian_trace"], trials=1)
    assert not certificate.passed
    (row,) = certificate.failures
    assert (row.measure, row.group) == ("hessian_trace", group)
    assert abs(row.after) > 2 * row.before
    assert f"FAILED: 1 of 1 claims do not hold: hessian_trace under {group}" in repr(certificate)


@pytest.mark.parametrize("name", ["kappa_trace_sum", "riemannian_max_eigenvalue"])
def test_a_measure_per_tensor_is_rejected_under_nodewise_moves(name, claiming):
    claiming(name, "layerwise", "nodewise")
    certificate = certify(build("conv and max-pool").surface(), measures=[name], trials=1)
    assert verdicts(certificate)[name, "layerwise"] == "holds"
    assert verdicts(certificate)[name, "nodewise"] == "FAILS"
    assert not certificate.passed


@pytest.mark.parametrize(
    ("power", "allowed"), [(1e-15, False), (0.0, True)], ids=["one bit", "no bit"]
)
def test_powers_of_two_are_held_to_the_last_bit(power, allowed, monkeypatch):
    """A measure that moves in its last bits, with the size of the first weight."""

    def nearly(surface: LossSurface) -> Estimate:
        size = float(surface.point[0].abs().log2())
        return Estimate(1.0 + power * round(size))

    item = Measure(name="nearly", invariant_to=frozenset({"nodewise"}), function=nearly)
    monkeypatch.setitem(registry._measures, "nearly", item)
    certificate = certify(build("mlp").surface(), measures=["nearly"], trials=3)
    assert certificate.passed == allowed


def test_a_claim_of_output_scale_is_tried(claiming):
    claiming("hessian_trace", "output_scale")
    certificate = certify(build("mlp").surface(), measures=["hessian_trace"], trials=1)
    assert verdicts(certificate)["hessian_trace", "output_scale"] == "FAILS"


@pytest.mark.parametrize(("spread", "passes"), [(5.0, True), (1e-3, False)])
def test_a_random_estimate_is_allowed_its_own_error_and_no_more(spread, passes, monkeypatch):
    def noisy(surface: LossSurface, *, generator: torch.Generator) -> Estimate:
        shift = float(surface.point[:20].square().sum().log2())  # Moves with the scales.
        return Estimate(100.0 + shift, stderr=spread)

    item = Measure(name="noisy", invariant_to=frozenset({"nodewise"}), function=noisy)
    monkeypatch.setitem(registry._measures, "noisy", item)
    certificate = certify(build("mlp").surface(), measures=["noisy"], trials=2)
    assert certificate.passed == passes


def test_moves_that_change_the_function_fail_the_certificate(monkeypatch):
    """A wrong rule is caught before anything is measured."""
    monkeypatch.setitem(OPS, "sigmoid", OPS["relu"])
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    surface = LossSurface(model, "cross_entropy", (torch.randn(6, 3), torch.arange(6) % 2))
    with pytest.raises(ValueError, match="a rescaled copy of the model gives other outputs"):
        certify(surface)


@pytest.mark.parametrize(("first", "then"), [(math.inf, 1.0), (1.0, math.inf)])
def test_a_number_that_becomes_or_was_infinite_has_moved(first, then, monkeypatch):
    values = iter([first, *[then] * 99])
    item = Measure(
        name="wild",
        invariant_to=frozenset({"nodewise"}),
        function=lambda surface: Estimate(next(values)),
    )
    monkeypatch.setitem(registry._measures, "wild", item)
    certificate = certify(build("mlp").surface(), measures=["wild"], trials=1)
    assert verdicts(certificate)["wild", "nodewise"] == "FAILS"


def test_an_error_that_is_not_known_excuses_nothing(monkeypatch):
    def vague(surface: LossSurface) -> Estimate:
        return Estimate(float(surface.point[0]), stderr=math.nan)

    item = Measure(name="vague", invariant_to=frozenset({"nodewise"}), function=vague)
    monkeypatch.setitem(registry._measures, "vague", item)
    certificate = certify(build("mlp").surface(), measures=["vague"], trials=1)
    assert verdicts(certificate)["vague", "nodewise"] == "FAILS"


@pytest.mark.parametrize(("lucky", "verdict"), [(True, "holds"), (False, "FAILS")])
def test_a_search_may_be_luckier_with_units_in_another_order(lucky, verdict, monkeypatch):
    """The start along the gradient finds 1 again; a random one finds 3, or a bound just moved."""

    def found(surface: LossSurface) -> Estimate:
        moved = not torch.equal(surface.point, first)
        rises = {"start 0": 1.0, "start 1": 3.0 if moved and lucky else 0.9}
        return Estimate(3.0 if moved else 1.0, lower_bound=True, details=rises)

    surface = build("mlp").surface()
    first = surface.point.clone()
    item = Measure(name="found", invariant_to=frozenset({"permutation"}), function=found)
    monkeypatch.setitem(registry._measures, "found", item)
    certificate = certify(surface, measures=["found"], trials=1)
    assert verdicts(certificate)["found", "permutation"] == verdict


# -- what it says -----------------------------------------------------------------------------


def test_it_shows_how_far_unprotected_measures_were_pushed():
    certificate = certify(build("mlp").surface(), log2_range=10)
    rows = {(row.measure, row.group): row for row in certificate.rows}
    trace, rho = rows["hessian_trace", "nodewise"], rows["rho_sum", "nodewise"]
    assert trace.verdict == "moves"
    assert trace.after > 1000 * trace.before
    assert (rho.verdict, rho.change, rho.after) == ("holds", 0.0, pytest.approx(rho.before))
    (kept,) = (kept for kept in certificate.kept if kept.group == "nodewise")
    assert kept.outputs == 0.0
    assert kept.outputs_any < 1e-14
    assert kept.loss < 1e-14
    assert "worst case" in repr(certificate)


def test_by_default_it_runs_the_measures_of_the_sweep_and_all_on_request():
    surface = build("mlp").surface()
    swept = {row.measure for row in certify(surface, trials=1).rows}
    assert swept == {
        *("hessian_trace", "kappa_trace_max", "kappa_trace_sum", "relative_flatness", "psi_trace"),
        *("relative_flatness_normalized", "rho_max", "rho_sum"),
        *("adaptive_trace", "riemannian_trace", "minimum_sharpness", "minimum_sharpness_nodewise"),
        *("matrix_normalized_sharpness", "normalized_sharpness"),
    }
    everything = {row.measure for row in certify(surface, measures="all", trials=1).rows}
    assert everything == {item.name for item in registry}


def test_options_of_measures_are_passed_on():
    certificate = certify(
        build("mlp").surface(), measures={"rho_max": {"side": "incoming"}}, trials=1
    )
    expected = fg.measures.rho_max(build("mlp").surface(), side="incoming").value
    assert certificate.rows[0].before == expected


def test_frame_and_json_hold_everything(tmp_path):
    certificate = certify(build("mlp").surface(), measures=["rho_sum"], trials=1)
    frame = certificate.to_frame()
    assert list(frame["group"]) == list(fg.measures.GROUPS)
    assert {"claimed", "change", "allowed", "verdict", "before", "after"} <= set(frame.columns)
    certificate.to_json(tmp_path / "certificate.json")
    contents = json.loads((tmp_path / "certificate.json").read_text())
    assert contents["passed"] is True
    assert contents["scales"] == 9
    assert len(contents["rows"]) == 7


def test_a_shift_that_the_loss_sees_is_no_rewriting():
    certificate = certify(build("leaky relu with mse").surface(), measures=["rho_sum"], trials=1)
    row = next(row for row in certificate.rows if row.group == "output_shift")
    assert row.verdict == "absent"
    assert "the loss sees a shift" in row.note
    assert certificate.passed


def test_flipped_signs_are_counted_in_single_precision():
    """Hidden units whose inputs cancel up to rounding: arbitrary factors push some over."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight[:, 1] = -model[0].weight[:, 0]  # x0 = x1 cancels up to rounding
        model[0].weight[:, 2:] = 0
    inputs = torch.randn(200, 6) * 3
    inputs[:, 1] = inputs[:, 0] * (1 + 1e-7 * torch.randn(200))
    surface = LossSurface(model, "cross_entropy", (inputs, torch.randint(0, 3, (200,))))
    certificate = certify(surface, measures=["hessian_trace"], trials=2)
    kept = {kept.group: kept for kept in certificate.kept}
    assert kept["nodewise"].outputs == 0.0
    assert kept["nodewise"].signs == 2 * 200 * 8
    assert 0 < kept["nodewise"].flipped < kept["nodewise"].signs
    assert f"{kept['nodewise'].flipped:,} of 3,200" in repr(certificate)
    assert kept["permutation"].signs == 0


def test_the_surface_and_its_model_are_left_alone():
    case = build("residual with batch-norm")
    case.model.train()
    surface = case.surface()
    before = {name: t.clone() for name, t in case.model.state_dict().items()}
    state = torch.get_rng_state()
    value = surface.value()
    first = certify(surface, measures=["rho_sum"], trials=1)
    second = certify(surface, measures=["rho_sum"], trials=1)
    assert first == second
    assert surface.value() == value
    assert case.model.training
    assert torch.equal(torch.get_rng_state(), state)
    after = case.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in case.model.parameters())


def test_progress_is_told():
    seen = []
    certify(
        build("mlp").surface(),
        measures=["rho_sum"],
        trials=1,
        progress=lambda name, done, total: seen.append((name, done, total)),
    )
    assert [done for _, done, _ in seen] == list(range(len(seen)))
    assert {total for _, _, total in seen} == {len(seen)}
    assert ("nodewise", 2, 10) in seen


@pytest.mark.parametrize("trials", [0, -1, True, 1.5])
def test_trials_must_be_a_positive_whole_number(trials):
    with pytest.raises(ValueError, match=rf"`trials={trials!r}` must be a whole number"):
        certify(build("mlp").surface(), trials=trials)


def test_it_needs_a_surface_and_measures_that_exist():
    with pytest.raises(TypeError, match=r"`surface` is a Linear; make one with LossSurface"):
        certify(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="there is no measure `rho_median`"):
        certify(build("mlp").surface(), measures=["rho_median"])
    with pytest.raises(TypeError, match=r"`measures='rho_sum'` is one string; pass a list"):
        certify(build("mlp").surface(), measures="rho_sum")


@pytest.mark.parametrize("seed", [-1, 1.5, True, 2**64])
def test_the_seed_must_be_a_whole_number(seed):
    with pytest.raises(ValueError, match=r"`seed=.*` must be a whole number from 0"):
        certify(build("mlp").surface(), seed=seed)


@pytest.mark.parametrize("reach", [0.5, -3, math.inf, math.nan, "6"])
def test_the_range_must_hold_a_power_of_two(reach):
    with pytest.raises(ValueError, match=r"`log2_range=.*` must be a finite number of at least 1"):
        certify(build("mlp").surface(), log2_range=reach)


def test_a_penalty_on_the_weights_is_refused():
    case = build("mlp")
    surface = LossSurface(case.model, case.loss, (case.inputs, case.targets), weight_decay=0.1)
    with pytest.raises(ValueError, match=r"`weight_decay=0.1`.*certify the surface without it"):
        certify(surface)


def test_measures_that_cannot_be_taken_are_told_once():
    model = build("mlp").model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    case = build("mlp")
    certificate = certify(LossSurface(model, case.loss, (case.inputs, case.targets)), trials=1)
    assert verdicts(certificate)["rho_sum", "output_shift"] == "unmeasured"
    assert verdicts(certificate)["rho_sum", "nodewise"] == "absent"  # All weights are frozen.
    text = repr(certificate)
    assert text.count("could not be measured: the model has no layers") == 1
    assert "output_shift: not tried" not in text


def test_a_certificate_without_claims_says_so():
    surface = LossSurface(nn.PReLU(), "mse", (torch.randn(5, 1), torch.randn(5, 1)))
    certificate = certify(surface, trials=1)
    assert "passed: there was no claim to be tried" in repr(certificate)


# -- models of many kinds ---------------------------------------------------------------------


def test_one_output_per_sample_without_an_axis():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1), nn.Flatten(0))
    data = torch.randn(9, 4), (torch.arange(9) % 2).float()
    certificate = certify(LossSurface(model, "binary_cross_entropy", data), trials=1)
    assert certificate.scales == 5
    assert certificate.passed


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_a_shift_of_large_outputs_is_found(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        model[2].weight.mul_(size)
    surface = LossSurface(model, "cross_entropy", (torch.randn(9, 4), torch.arange(9) % 3))
    certificate = certify(surface, measures=["hessian_trace"], trials=1)
    assert verdicts(certificate)["hessian_trace", "output_shift"] == "holds"


class Parallel(nn.Module):
    """Two branches, one half of the other, in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)
        self.right.load_state_dict({k: v / 2 for k, v in self.left.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.left(x)) + torch.relu(self.right(x)))


def test_branches_are_found_in_single_precision():
    torch.manual_seed(0)
    surface = LossSurface(Parallel(), "cross_entropy", (torch.randn(9, 4), torch.arange(9) % 3))
    certificate = certify(surface, trials=1)
    assert verdicts(certificate)["hessian_trace", "branches"] in ("moves", "still")
    assert certificate.passed


class Chained(nn.Module):
    """Two alike normalizations in a row, of which the second undoes any scale of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(6, eps=1e-30), nn.LayerNorm(6, eps=1e-30)
        self.third, self.head = nn.LayerNorm(6, eps=1e-30), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x))))


def test_what_is_in_a_row_is_no_pair_of_branches():
    model = Chained().double()
    nn.init.normal_(model.third.weight)
    surface = LossSurface(model, "cross_entropy", (torch.randn(9, 6), torch.arange(9) % 3))
    certificate = certify(surface, measures=["hessian_max_eigenvalue"], trials=1)
    assert verdicts(certificate)["hessian_max_eigenvalue", "branches"] == "absent"


def test_a_pruned_model():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    prune.l1_unstructured(model[0], "weight", 0.3)
    surface = LossSurface(model, "cross_entropy", (torch.randn(9, 4), torch.arange(9) % 3))
    certificate = certify(surface, trials=1)
    assert certificate.scales == 5  # Hidden units; what the mask hides has no scale.
    assert certificate.passed


class Dictionary(nn.Module):
    """Returns what a loss reads, and what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.hidden(x))
        return {"logits": self.head(hidden), "hidden": hidden}


def test_outputs_that_the_loss_does_not_read_pin_nothing():
    data = torch.randn(9, 4), torch.arange(9) % 3
    certificate = certify(LossSurface(Dictionary(), "cross_entropy", data), trials=1)
    assert certificate.scales == 6
    assert certificate.passed
    assert fg.find_gauge(Dictionary(), data[0]).dim == 0  # As a model, it shows its hidden units.


def test_a_model_that_computes_its_own_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        hidden_act="relu",
        num_labels=3,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    batch = {"input_ids": torch.randint(0, 20, (6, 5)), "labels": torch.arange(6) % 3}
    surface = LossSurface(model, None, [batch], dtype=torch.float64)
    certificate = certify(surface, measures=["hessian_max_eigenvalue"], trials=1)
    # q·k: 8, v·out: 8, relu: 12, and the last layer norm into the pooler: 8. The layer norms'
    # inputs are pinned, and with them the residual stream.
    assert certificate.scales == 8 + 8 + 12 + 8
    assert certificate.passed
    assert any("layer_norm" in pin for pin in certificate.pinned)


def test_random_probes_move_with_the_layers():
    """Estimated blocks, where the output is curved: the same probes in the layers' own units."""
    certificate = certify(build("attention").surface(), measures=["kappa_trace_sum"], trials=2)
    row = next(row for row in certificate.rows if row.group == "layerwise")
    assert (row.verdict, row.change) == ("holds", 0.0)
    assert row.change_any < 1e-10


def test_a_frozen_backbone():
    case = build("mlp")
    case.model[0].requires_grad_(False)
    certificate = certify(case.surface(), trials=1)
    assert certificate.passed
    assert certificate.scales == 4  # Those of the first layer are fixed with it.


#: Measures of different kinds that take little time on large networks.
FEW = ["hessian_trace", "rho_sum", "path_norm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples", "scales", "measures"),
    [
        ("resnet20", 8, 1088, [*FEW, "normalized_sharpness"]),
        ("lenet", 32, 32 + 64 + 200, None),
        ("resnet2b", 4, 8 + 16 + 16 + 16 + 100, [*FEW, "psi_trace"]),
        ("eran_6_100", 32, 500, None),
    ],
)
def test_published_networks_pass(name, samples, scales, measures):
    surface = LossSurface(trained(name), "cross_entropy", images(name, samples))
    certificate = certify(surface, measures=measures, trials=1)
    assert certificate.passed, certificate
    assert certificate.scales == scales
    rows = {(row.measure, row.group): row for row in certificate.rows}
    for group in ("layerwise", "nodewise", "rows"):
        assert rows["rho_sum", group].change == 0.0
        assert rows["hessian_trace", "nodewise"].verdict == "moves"
    kept = {kept.group: kept for kept in certificate.kept}
    assert kept["nodewise"].outputs == 0.0


@pytest.mark.slow
def test_the_sigmoid_network_is_told_that_it_has_no_gauge():
    surface = LossSurface(trained("sigmoid_conv"), "cross_entropy", images("sigmoid_conv", 16))
    certificate = certify(surface, measures=["hessian_max_eigenvalue"], trials=1)
    assert certificate.scales == 0
    assert any("sigmoid" in pin and "0.weight" in pin for pin in certificate.pinned)
    row = next(row for row in certificate.rows if row.group == "nodewise")
    assert (row.verdict, row.note) == ("absent", "no scale is free")
    assert "nodewise: not tried, as no scale is free" in repr(certificate)
    assert certificate.passed
