"""Claims that noise cannot prove, caches that a change must undo, options of a wrong kind."""

from __future__ import annotations

import pytest
import torch
from cases import build
from torch import Generator, nn

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures import Measure, registry


def source(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.mark.parametrize("domain", [400, 800])
def test_ordered_data_do_not_mislead_the_eigenvalues(domain):
    """Two kinds of samples that excite different weights, one after the other."""
    generator = source()
    inputs = torch.zeros(1600, 60, dtype=torch.float64)
    inputs[:domain, :30] = torch.rand(domain, 30, generator=generator, dtype=torch.float64)
    rest = torch.rand(1600 - domain, 30, generator=generator, dtype=torch.float64)
    inputs[domain:, 30:] = 0.65 * rest
    labels = (torch.rand(1600, generator=generator) < 0.5).long()
    model = nn.Linear(60, 2, bias=False).double()
    surface = LossSurface(model, "cross_entropy", (inputs, labels))
    dense = surface.hvp(torch.eye(surface.size).double())
    exact = torch.linalg.eigvalsh(dense)[-1].item()
    for seed in range(5):
        top = fg.measures.hessian_max_eigenvalue(surface, generator=source(seed))
        assert top.value == pytest.approx(exact, rel=2e-3)
        kappa = fg.measures.kappa_max(surface, generator=source(seed))
        assert kappa.value == pytest.approx(
            exact * float(model.weight.detach().square().sum()), rel=2e-3
        )


def test_a_claim_that_an_option_gives_up_is_not_claimed():
    surface = build("mlp").surface()
    for name in ("normalized_sharpness", "matrix_normalized_sharpness"):
        certificate = fg.certify(surface, measures={name: {"surrogate": None}}, trials=1)
        row = next(row for row in certificate.rows if row.group == "output_scale")
        assert (row.claimed, row.verdict) == (False, "moves")
        assert certificate.passed
    assert "output_scale" in registry["normalized_sharpness"].claims({})


def test_standing_still_within_an_error_larger_than_the_value_proves_nothing(monkeypatch):
    """A norm of the weights that claims everything, and hides behind its error."""

    def noisy(surface: LossSurface) -> Estimate:
        size = float(surface.point.norm())
        return Estimate(size, stderr=0.8 * size)

    claims = frozenset({"layerwise", "nodewise"})
    item = Measure(name="noisy", invariant_to=claims, function=noisy)
    monkeypatch.setitem(registry._measures, "noisy", item)
    certificate = fg.certify(build("mlp").surface(), measures=["noisy"], trials=1, log2_range=1)
    rows = {row.group: row for row in certificate.rows}
    assert rows["nodewise"].verdict == "unproven"
    assert "its own error is larger than the value" in rows["nodewise"].note
    assert "? " in repr(certificate)
    assert "passed: there was no claim to be tried" in repr(certificate)


@pytest.mark.parametrize("label", [0, -1])
def test_the_surrogate_leaves_out_the_labels_that_the_loss_leaves_out(label):
    case = build("mlp")
    targets = case.targets.clone()
    targets[:4] = label
    kept = targets != label
    whole = LossSurface(case.model, nn.CrossEntropyLoss(ignore_index=label), (case.inputs, targets))
    alone = LossSurface(case.model, "cross_entropy", (case.inputs[kept], targets[kept]))
    for name in ("normalized_sharpness", "matrix_normalized_sharpness"):
        function = registry[name].function
        assert function(whole).value == pytest.approx(function(alone).value, rel=1e-10)


def test_what_the_surrogate_does_not_have_is_told():
    case = build("mlp")
    decayed = case.surface(weight_decay=0.1)
    notes = fg.measures.normalized_sharpness(decayed).notes
    assert any("the weight decay of the surface is not part" in note for note in notes)
    weighted = LossSurface(
        case.model,
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double()),
        (case.inputs, case.targets),
    )
    notes = fg.measures.normalized_sharpness(weighted).notes
    assert any("every label counts once" in note for note in notes)


def test_a_buffer_that_is_no_longer_zero_changes_the_gauge():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
            self.register_buffer("shift", torch.zeros(5))

        def forward(self, x):
            return self.last(torch.relu(self.first(x) + self.shift))

    torch.manual_seed(0)
    case, model = build("mlp"), Shifted().double()
    data = case.inputs, case.targets
    surface = LossSurface(model, "cross_entropy", data)
    fg.measures.minimum_sharpness_nodewise(surface)
    model.shift.add_(0.5)
    with torch.no_grad():
        model.first.weight.mul_(1.5)
    fresh = LossSurface(model, "cross_entropy", data)
    for name in ("minimum_sharpness", "minimum_sharpness_nodewise", "path_norm", "rho_sum"):
        function = registry[name].function
        assert function(surface).value == pytest.approx(function(fresh).value, rel=1e-9)


def test_parameters_frozen_later_are_told():
    case = build("mlp")
    surface = case.surface()
    case.model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"made for \(gone, or frozen: `0.weight`\)"):
        fg.measures.normalized_sharpness(surface)


def test_a_unit_that_is_constant_but_for_rounding_does_not_explode():
    """A hidden unit reads f and 1 - f with equal weights."""
    generator = source()
    half = torch.rand(40, 3, generator=generator, dtype=torch.float64)
    inputs = torch.cat([half, 1 - half], dim=1)
    labels = torch.randint(3, (40,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight[0] = 0.1234567
    values = []
    for factor in (1.0, 3.7, 0.21):
        with torch.no_grad():
            model[0].weight[0] *= factor
            model[0].bias[0] *= factor
            model[2].weight[:, 0] /= factor
        surface = LossSurface(model, "cross_entropy", (inputs, labels))
        values.append(fg.measures.relative_flatness_normalized(surface).value)
    assert values == [pytest.approx(values[0], rel=1e-9)] * 3


def test_balanced_measures_claim_what_they_keep_to_the_bit():
    claims = registry["balanced:normalized_sharpness"].invariant_to
    assert "output_scale" not in claims
    assert {"layerwise", "nodewise", "rows", "branches"} <= claims
    with pytest.raises(ValueError, match="no measure `balanced:balanced:rho_max`"):
        registry["balanced:balanced:rho_max"]


def test_an_order_that_underflows_is_refused():
    surface = build("mlp").surface()
    with pytest.raises(ValueError, match=r"`order=10000\.0` makes the sum .* take a smaller order"):
        fg.measures.path_norm(surface, order=1e4)


@pytest.mark.parametrize(
    ("measures", "error", "message"),
    [
        ({"path_norm": {"order": "abc"}}, ValueError, "needs a number as `order`, but got 'abc'"),
        ({"expected_sharpness": {"pairs": 2.5}}, ValueError, "needs a whole number as `pairs`"),
        (
            {"adaptive_sharpness": {"rho": None}},
            ValueError,
            "needs a number as `rho`, but got None",
        ),
        ({"rho_max": {"all_columns": 1}}, ValueError, "needs true or false as `all_columns`"),
        (
            {"hessian_trace": None},
            TypeError,
            "the options of `hessian_trace` are None; pass a dict",
        ),
        ([3], ValueError, "`3` is not the name of a measure"),
        (3, TypeError, "`measures=3` must be a list of names"),
        (["rho_max", "rho_max"], ValueError, "`rho_max` is asked for twice"),
    ],
)
def test_options_of_a_wrong_kind_are_named(measures, error, message):
    with pytest.raises(error, match=message):
        fg.measure(build("mlp").surface(), measures=measures)


def test_a_model_in_place_of_a_surface_and_a_wrong_seed_are_told():
    model = build("mlp").model
    with pytest.raises(TypeError, match="`cell` measures a LossSurface, but got a Sequential"):
        fg.cell(model, geometry="weights", functional="trace")
    with pytest.raises(TypeError, match="`feature_robustness` measures a LossSurface"):
        fg.feature_robustness(model, "0.weight", generator=source())
    with pytest.raises(ValueError, match="`seed=-1` must be a whole number from 0"):
        fg.measure(build("mlp").surface(), seed=-1)
