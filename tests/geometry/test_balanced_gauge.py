"""Any measure at the balanced point does not see how the network is written."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import build
from torch import Generator, nn

import flatgauge as fg
from flatgauge import LossSurface

NAMES = ["hessian_trace", "hessian_max_eigenvalue", "epsilon_sharpness", "expected_sharpness"]


@pytest.mark.parametrize("case", ["mlp", "conv and max-pool", "residual with batch-norm"])
def test_baselines_become_invariant_bit_for_bit(case):
    here = build(case)
    gauge = fg.find_gauge(here.model, here.inputs)
    move = gauge.sample(generator=Generator().manual_seed(3))
    twin = gauge.rescale(here.model, move)
    data = here.inputs, here.targets
    one, other = (
        fg.measure(LossSurface(model, here.loss, data), measures=NAMES, gauge="balanced")
        for model in (here.model, twin)
    )
    assert list(one) == [f"balanced:{name}" for name in NAMES]
    assert [one[name].value for name in one] == [other[name].value for name in one]
    told = f"measured in the balanced gauge ({gauge.dim} scales fixed)"
    assert all(told in estimate.notes for estimate in one.values())


def test_it_is_the_measure_of_the_balanced_model():
    case = build("mlp")
    before = copy.deepcopy(case.model.state_dict())
    report = fg.measure(case.surface(), measures=["hessian_trace"], gauge="balanced")
    even = fg.balance(case.model, case.inputs)
    expected = fg.measures.hessian_trace(LossSurface(even, case.loss, (case.inputs, case.targets)))
    assert report["balanced:hessian_trace"].value == pytest.approx(expected.value, rel=1e-12)
    assert report.facts.loss == pytest.approx(case.surface().value(), rel=1e-12)
    torch.testing.assert_close(case.model.state_dict(), before, rtol=0, atol=0)


def test_a_network_without_gauge_is_measured_as_it_is():
    case = build("gelu")
    report = fg.measure(case.surface(), measures=["hessian_trace"], gauge="balanced")
    plain = fg.measure(case.surface(), measures=["hessian_trace"])
    assert report["balanced:hessian_trace"].value == plain["hessian_trace"].value


def test_dead_units_are_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[2].weight[:, 1] = 0
    surface = LossSurface(model, "mse", (torch.randn(5, 3).double(), torch.randn(5, 2).double()))
    report = fg.measure(surface, measures=["hessian_trace"], gauge="balanced")
    notes = report["balanced:hessian_trace"].notes
    assert any("weights on one side only" in note and "0.weight[1]" in note for note in notes)


def test_other_gauges_do_not_exist():
    with pytest.raises(ValueError, match=r"`gauge='even'` is unknown; use 'balanced', or None"):
        fg.measure(build("mlp").surface(), gauge="even")


@pytest.mark.parametrize("case", ["mlp", "conv and max-pool", "residual with batch-norm"])
def test_the_balanced_baselines_pass_the_certificate(case):
    names = [f"balanced:{name}" for name in NAMES]
    certificate = fg.certify(build(case).surface(), measures=names, trials=1)
    assert certificate.passed
    verdicts = {(row.measure, row.group): row for row in certificate.rows}
    for name in names:
        for group in ("layerwise", "nodewise", "rows"):
            assert verdicts[name, group].verdict == "holds"
            assert verdicts[name, group].change == 0.0  # not one bit, by powers of two
        assert verdicts[name, "permutation"].verdict == "holds"
        assert verdicts[name, "output_scale"].verdict == "moves"


def test_both_forms_stand_side_by_side_in_one_report():
    case = build("mlp")
    names = ["hessian_trace", "balanced:hessian_trace", "balanced:rho_max", "rho_max"]
    report = fg.measure(case.surface(), measures=names)
    assert list(report) == names
    assert report["balanced:hessian_trace"].value != report["hessian_trace"].value
    assert report["balanced:rho_max"].value == pytest.approx(report["rho_max"].value, rel=1e-12)
    with pytest.raises(ValueError, match=r"no measure `hessian_trac`\. Did you mean"):
        fg.measure(case.surface(), measures=["balanced:hessian_trac"])
