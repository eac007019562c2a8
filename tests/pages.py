"""What pages are written from and read with in tests: reports, pictures, a parser."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import torch
from cases import build

import flatgauge as fg
from flatgauge.analysis.certificate import Certificate
from flatgauge.analysis.measurement import Report
from flatgauge.estimators.estimate import Estimate

#: Cheap, and of every kind: exact, estimated, a lower bound; classical and invariant.
MEASURES = [
    "hessian_trace",
    "hessian_max_eigenvalue",
    "expected_sharpness",
    "epsilon_sharpness",
    "kappa_trace_sum",
    "rho_sum",
    "adaptive_trace",
    "fisher_rao_norm",
]

#: A name that a careless page would run.
EVIL = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Everything in a page: elements with their attributes and own text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_data(self, data):
        if self.elements:
            self.elements[-1][2].append(data)

    def of(self, tag):
        return [(attrs, "".join(text)) for name, attrs, text in self.elements if name == tag]

    @property
    def ids(self):
        return {attrs["id"] for _, attrs, _ in self.elements if attrs.get("id")}

    @property
    def contents(self):
        return json.loads(next(text for a, text in self.of("script") if a.get("id") == "flatgauge"))


@functools.cache
def two_ways() -> tuple[
    dict[str, Report], dict[str, Certificate], dict[str, fg.symmetry.GaugeGroup]
]:
    """One network written in two ways, certified, with its gauge."""
    case = build("mlp")
    surface = case.surface()
    gauge = fg.find_gauge(case.model, case.inputs[:2])
    twin = gauge.rescale(case.model, gauge.move([2.0 ** (3 + k % 4) for k in range(gauge.dim)]))
    reports = {
        "as trained": fg.measure(surface, measures=MEASURES),
        "rescaled": fg.measure(replace(case, model=twin).surface(), measures=MEASURES),
    }
    certificate = fg.certify(surface, measures=["hessian_trace", "rho_sum"], trials=1)
    return reports, {"as trained": certificate}, {"as trained": gauge}


def odd(report: Report) -> Report:
    """The report with numbers and names that pages must survive."""
    units = torch.linspace(0, 1, 100_000, dtype=torch.float64)
    estimates = {
        "hessian_trace": Estimate(
            -2.5,
            exact=True,
            layers={EVIL: -1.0, "b": 2.0},
            units={EVIL: units, "b": units[:3]},
            notes=(f"see {EVIL} & more",),
        ),
        "rho_max": Estimate(math.inf, layers={"a": math.inf, "b": 1.0}),
        "kappa_max": Estimate(math.nan, converged=False, notes=("could not be measured: why",)),
        "path_norm": Estimate(10.0, exact=True),
        "kappa_sum": Estimate(9.0, exact=True),
        f"own {EVIL}": Estimate(-100.0, converged=False),
    }
    return Report(estimates, replace(report.facts, notes=(f"model {EVIL}",)))


@functools.cache
def pictures() -> tuple[fg.analysis.Spectrum, fg.analysis.Landscape, fg.analysis.Landscapes]:
    """A spectrum, a curve, and two planes side by side."""
    surface = build("mlp").surface()
    return (
        fg.spectrum(surface, probes=2, steps=8, top=2),
        fg.landscape(surface, space="layers", dims=1, points=7),
        fg.landscape({"a": surface, "b": surface}, space="filters", dims=2, points=5),
    )
