"""κ and ρ of networks that other people trained."""

from __future__ import annotations

import math

import pytest
import torch
import zoo

import flatgauge as fg
from flatgauge import LossSurface

MEASURES = ["kappa_sum", "kappa_trace_sum", "kappa_trace_max", "rho_max", "rho_sum"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("resnet20", 16), ("lenet", 100), ("resnet4b", 60)),
        *(("marabou_small", 200), ("marabou_medium", 100), ("marabou_large", 60)),
    ],
)
def test_kappa_and_rho_are_finite_exact_and_the_same_every_time(name, count):
    model, samples = zoo.trained(name), zoo.images(name, count)
    reports = [
        fg.measure(LossSurface(model, "cross_entropy", samples), measures=MEASURES)
        for _ in range(2)
    ]
    for measure in MEASURES:
        first, second = (report[measure] for report in reports)
        assert first.value == second.value > 0
        assert first.layers == second.layers
        assert all(math.isfinite(value) for value in first.layers.values())
        assert first.converged
        assert first.exact or measure == "kappa_sum"
        assert 0 < first.data_stderr < 2 * first.value
    layers = [n for n, p in model.named_parameters() if p.dim() > 1]
    assert list(reports[0]["rho_max"].layers) == layers
    for layer, units in reports[0]["rho_max"].units.items():
        assert len(units) == model.get_parameter(layer).shape[1]
        assert (units >= 0).all()


def test_only_the_last_layer_of_a_sigmoid_network_is_exact():
    surface = LossSurface(
        zoo.trained("sigmoid_conv"), "cross_entropy", zoo.images("sigmoid_conv", 20)
    )
    rho = fg.measure(surface, measures={"rho_sum": {"probes": 4}})["rho_sum"]
    assert not rho.exact
    (note,) = [note for note in rho.notes if "estimated" in note]
    assert "curved in it: sigmoid" in note
    last = fg.measure(surface, measures={"rho_sum": {"layers": "7.*"}})["rho_sum"]
    assert last.exact


def test_the_trace_of_a_residual_network_is_that_of_its_hessian():
    model, samples = zoo.trained("resnet20"), zoo.images("resnet20", 5)
    surface = LossSurface(model, "cross_entropy", samples, dtype=torch.float64)
    exact = fg.measure(surface, measures=["hessian_trace"])["hessian_trace"]
    assert exact.exact
    generator = torch.Generator().manual_seed(0)
    estimate = fg.measures.hessian_trace(
        surface, method="hutchinson", probes=12, generator=generator
    )
    assert abs(estimate.value - exact.value) < 4 * estimate.stderr
