"""Reports: what is measured is what is shown, in every form."""

from __future__ import annotations

import json
import math

import pytest
import torch
from cases import build
from rich.console import Console

import flatgauge as fg
from flatgauge.analysis.measurement import Report
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures import registry
from flatgauge.report.tables import print_tables
from flatgauge.surface.examples import bowl, two_weights


@pytest.fixture(scope="module")
def report() -> Report:
    return fg.measure(build("mlp").surface())


def test_all_measures_are_measured_by_default(report):
    assert list(report) == [item.name for item in registry]
    assert len(report) == len(registry)
    assert all(isinstance(estimate, Estimate) for estimate in report.values())


def test_facts_are_those_of_the_surface(report):
    surface = build("mlp").surface()
    facts = report.facts
    assert facts.loss == surface.value()
    assert facts.gradient_norm == pytest.approx(surface.gradient().norm().item())
    assert (facts.samples, facts.parameters) == (11, surface.size)
    assert facts.products == "reverse over reverse, first-order graphs kept"
    assert facts.versions["torch"] == torch.__version__


def test_a_value_does_not_depend_on_what_is_measured_beside_it(report):
    for name in report:
        alone = fg.measure(build("mlp").surface(), measures=[name])
        assert alone[name].value == report[name].value


def test_the_seed_matters_and_only_the_seed(report):
    again = fg.measure(build("mlp").surface(), seed=0)
    other = fg.measure(build("mlp").surface(), seed=1)
    assert [e.value for e in again.values()] == [e.value for e in report.values()]
    assert again["expected_sharpness"].value != other["expected_sharpness"].value


def test_options_are_passed_and_shown():
    report = fg.measure(
        bowl([4.0, 1.0]), measures={"epsilon_sharpness": {"epsilon": 0.5}, "hessian_trace": {}}
    )
    assert report["epsilon_sharpness"].value == pytest.approx(4 * 0.25 / 2, rel=1e-3)
    assert report["epsilon_sharpness"].options["epsilon"] == 0.5
    assert report["hessian_trace"].value == pytest.approx(5.0)


def test_progress_is_told_before_each_measure():
    told = []
    fg.measure(
        bowl([1.0]),
        measures=["hessian_trace", "expected_sharpness"],
        progress=lambda *now: told.append(now),
    )
    assert told == [("sweep", 0, 2), ("hessian_trace", 0, 2), ("expected_sharpness", 1, 2)]


@pytest.mark.parametrize(
    ("measures", "error", "message"),
    [
        (["hesian_trace"], ValueError, "no measure `hesian_trace`. Did you mean `hessian_trace`?"),
        (["zzz"], ValueError, "no measure `zzz`. The measures are hessian_trace"),
        ("hessian_trace", TypeError, r"pass a list: \['hessian_trace'\]"),
        ([], ValueError, "`measures` is empty"),
        (
            {"hessian_trace": {"seed": 3}},
            ValueError,
            "has no option 'seed'; its options are parameters, method",
        ),
    ],
)
def test_wrong_requests_are_refused_before_anything_runs(measures, error, message):
    surface = bowl([1.0, 2.0])
    with pytest.raises(error, match=message):
        fg.measure(surface, measures=measures)
    assert surface.matvecs == 0


def test_one_measure_that_fails_does_not_lose_the_others():
    class Kinked(torch.nn.Module):
        """Infinitely curved at its own point."""

        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            return x + (self.w.square() + 1e-300).pow(0.75).sum()

    ones = torch.ones(4, 1).double()
    surface = fg.LossSurface(Kinked(), "mse", (ones, 0 * ones))
    report = fg.measure(surface)
    assert math.isfinite(report["expected_sharpness"].value)
    failed = report["hessian_trace"]
    assert math.isnan(failed.value)
    assert not failed.converged
    assert failed.notes[0].startswith("could not be measured: ")
    with pytest.raises(ValueError, match="not finite"):
        fg.measure(surface, measures=["hessian_trace"])


def test_a_bar_can_be_asked_for(capsys):
    fg.measure(bowl([1.0]), measures=["hessian_trace"], progress=True)
    assert capsys.readouterr().out == ""


def test_text_in_brackets_survives_the_terminal(report, capsys):
    odd = Report({"odd": Estimate(1.0, notes=("see [link] and [/x]",))}, report.facts)
    print_tables(odd.tables(), Console())
    assert "see [link] and [/x]" in capsys.readouterr().out


def test_measure_wants_a_surface():
    with pytest.raises(TypeError, match="`surface` is a Linear; make one with LossSurface"):
        fg.measure(torch.nn.Linear(1, 1))


def test_what_was_not_measured_is_told_with_what_was():
    report = fg.measure(bowl([1.0]), measures=["hessian_trace"])
    with pytest.raises(KeyError, match="`rho_max` was not measured; this report has hessian_tr"):
        report["rho_max"]


def test_the_frame_holds_the_same_numbers(report):
    frame = report.to_frame()
    assert list(frame.index) == list(report)
    for name, estimate in report.items():
        assert frame.loc[name, "value"] == estimate.value
        assert frame.loc[name, "stderr"] == estimate.stderr


def test_json_holds_the_same_numbers(report, tmp_path):
    text = report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(text)
    contents = json.loads(text)
    for name, estimate in report.items():
        assert contents["measures"][name]["value"] == estimate.value
        assert contents["measures"][name]["options"] == dict(estimate.options)
    assert contents["facts"]["gradient_norm"] == report.facts.gradient_norm


def test_numbers_json_cannot_hold_are_written_out(report):
    odd = Estimate(math.inf, stderr=math.nan, units={"w": torch.tensor([1.0, math.inf])})
    contents = json.loads(Report({"odd": odd}, report.facts).to_json())
    assert contents["measures"]["odd"]["value"] == "inf"
    assert contents["measures"]["odd"]["stderr"] == "nan"
    assert contents["measures"]["odd"]["units"] == {"w": [1.0, "inf"]}


def test_the_text_shows_every_number_with_its_error_and_kind(report):
    text = repr(report)
    for name, estimate in report.items():
        line = next(line for line in text.splitlines() if line.startswith(name))
        assert str(estimate) in line
    assert "‖gradient‖" in text
    assert "lower bound" in text
    assert "exact" in repr(fg.measure(two_weights(1.0, 2.0), measures=["hessian_trace"]))


def test_the_catalogue_lists_what_measures_declare():
    frame = fg.catalogue()
    assert list(frame["name"]) == [item.name for item in registry]
    columns = {"symbol", "paper", "definition", "geometry", "functional", "invariant_to", "cost"}
    assert columns <= set(frame.columns)
    assert (frame["definition"].str.len() > 20).all()


def test_a_radius_is_always_shown(report):
    shown = repr(report)
    for label in (
        "epsilon_sharpness (epsilon=0.1)",
        "expected_sharpness (sigma=0.01)",
        "riemannian_epsilon_sharpness (epsilon=0.05)",
        "adaptive_sharpness (rho=0.5)",
    ):
        assert label in shown
