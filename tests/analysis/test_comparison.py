"""Comparisons: who is flatter, as far as errors let one tell, and whether measures agree."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace

import matplotlib as mpl
import pytest
import torch
from rich.console import Console
from torch import nn

import flatgauge as fg
from flatgauge.analysis.comparison import Comparison
from flatgauge.analysis.measurement import Report
from flatgauge.analysis.ranking import Agreement, is_flatter, rank
from flatgauge.estimators.estimate import Estimate
from flatgauge.report.tables import print_tables
from flatgauge.surface.examples import bowl, two_weights

mpl.use("agg")
NAMES = ("hessian_trace", "adaptive_trace", "adaptive_expected_sharpness", "path_norm")


@pytest.fixture(scope="module")
def compared() -> Comparison:
    """A network, the same network written differently, and a sharper one."""
    surfaces = {
        "flat": two_weights(0.5, 0.5),
        "same": two_weights(5.0, 0.05),
        "sharp": two_weights(2.0, 3.0),
    }
    return fg.compare(surfaces, measures=NAMES)


@pytest.fixture(scope="module")
def report(compared) -> Report:
    return compared["flat"]


def made_of(report: Report, **models: dict[str, Estimate]) -> Comparison:
    return Comparison({name: Report(found, report.facts) for name, found in models.items()})


# -- ranks ------------------------------------------------------------------------------------


def test_invariant_measures_rank_a_network_and_its_other_form_alike(compared):
    ranks = compared.ranks()
    assert ranks.loc["adaptive_trace"].to_dict() == {"flat": 1, "same": 1, "sharp": 3}
    assert ranks.loc["hessian_trace"].to_dict() == {"flat": 1, "same": 3, "sharp": 2}
    assert list(ranks.index) == list(NAMES)


def test_standard_errors_add_as_squares_and_bounds_as_they_are():
    one = Estimate(1.0, stderr=0.3)
    assert not is_flatter(one, Estimate(1.99, stderr=0.4))
    assert is_flatter(one, Estimate(2.01, stderr=0.4))
    bounded = Estimate(1.0, bound=0.1)
    assert not is_flatter(bounded, Estimate(1.59, bound=0.2))
    assert is_flatter(bounded, Estimate(1.61, bound=0.2))


def test_rounding_makes_no_rank():
    assert not is_flatter(Estimate(1.0), Estimate(1.000009))
    assert is_flatter(Estimate(1.0), Estimate(1.000009), rounding=1e-10)


def test_what_is_not_told_apart_shares_a_rank_also_in_chains():
    chain = {
        name: Estimate(value, stderr=0.1) for name, value in (("c", 1.4), ("a", 1), ("b", 1.2))
    }
    assert rank(chain) == {"a": 1, "b": 1, "c": 2}


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers(odd):
    ranks = rank({"odd": Estimate(odd), "one": Estimate(1.0), "two": Estimate(2.0)})
    expected = {
        "nan": {"one": 1, "two": 2, "odd": None},
        "inf": {"one": 1, "two": 2, "odd": 3},
        "-inf": {"odd": 1, "one": 2, "two": 3},
    }
    assert ranks == expected[str(odd)]
    assert list(ranks) == list(expected[str(odd)])
    assert rank({"a": Estimate(math.inf), "b": Estimate(math.inf)}) == {"a": 1, "b": 1}


def test_an_error_that_is_not_known_tells_nothing_apart():
    assert rank({"a": Estimate(1.0, stderr=math.nan), "b": Estimate(9.0)}) == {"a": 1, "b": 1}


def test_the_ranking_of_one_measure(compared):
    frame = compared.ranking("hessian_trace")
    assert list(frame.index) == ["flat", "sharp", "same"]
    assert frame["value"].is_monotonic_increasing
    assert list(frame["kind"]) == ["exact"] * 3
    with pytest.raises(KeyError, match="`rho_max` was not measured; there are hessian_trace"):
        compared.ranking("rho_max")


# -- agreement --------------------------------------------------------------------------------


def test_the_verdict_counts_only_what_rescaling_cannot_move(compared):
    agreement = compared.agreement()
    assert list(agreement.ranks) == ["adaptive_trace", "adaptive_expected_sharpness"]
    assert agreement.flattest == {"flat": 0, "same": 0, "sharp": 0}
    assert compared.verdict.startswith("no model is flattest by most of 2 invariant measures")
    pair = Comparison({name: compared[name] for name in ("flat", "sharp")})
    assert pair.verdict == "2 of 2 invariant measures rank flat flattest"
    assert pair.agreement().kendall_w is None
    assert pair.agreement().to_frame().loc["flat", "sharp"] == 2


def test_without_an_invariant_measure_there_is_no_verdict():
    models = {"a": two_weights(1.0, 1.0), "b": two_weights(2.0, 2.0)}
    comparison = fg.compare(models, measures=["hessian_trace"])
    assert comparison.verdict.startswith("no verdict: no measure of flatness that is invariant")


def test_kendalls_w_of_orders_known_by_hand():
    """Siegel's three judges of six: the sums of ranks are 8, 14, 11, 11, 11, 8."""
    judges = [(1, 6, 3, 2, 5, 4), (1, 5, 6, 4, 2, 3), (6, 3, 2, 5, 4, 1)]
    models = tuple("abcdef")
    ranks = {str(k): dict(zip(models, row, strict=True)) for k, row in enumerate(judges)}
    assert Agreement(ranks, models).kendall_w == pytest.approx(0.1619, abs=1e-4)
    same = {"x": ranks["0"], "y": ranks["0"]}
    assert Agreement(same, models).kendall_w == pytest.approx(1.0)


def test_kendalls_w_with_shared_ranks_is_that_of_friedmans_test():
    from scipy.stats import friedmanchisquare

    models = tuple("abcd")
    rows = [(1, 1, 3, 4), (1, 2, 2, 4), (2, 1, 3, 3)]
    ranks = {str(k): dict(zip(models, row, strict=True)) for k, row in enumerate(rows)}
    chi = friedmanchisquare(*zip(*rows, strict=True)).statistic
    assert Agreement(ranks, models).kendall_w == pytest.approx(chi / (3 * 3))
    tied = {name: dict.fromkeys(models, 1) for name in "xy"}
    assert Agreement(tied, models).kendall_w is None


def test_measures_at_different_radii_have_no_rank_and_no_vote(report):
    found = {
        name: {
            "psi_epsilon_sharpness": Estimate(value, options={"epsilon": value}),
            "adaptive_trace": Estimate(value, options={"tolerance": value}),
        }
        for name, value in (("a", 1.0), ("b", 2.0))
    }
    comparison = made_of(report, **found)
    assert comparison.ranks_of("psi_epsilon_sharpness") == {"a": None, "b": None}
    assert comparison.ranks_of("adaptive_trace") == {"a": 1, "b": 2}
    (note,) = comparison.notes
    assert note == "psi_epsilon_sharpness: not comparable, as `epsilon` differs: a 1, b 2"
    assert list(comparison.agreement().ranks) == ["adaptive_trace"]


def test_an_option_that_gives_a_claim_up_is_not_counted_as_invariant(report):
    names = {"surrogate": None}
    found = {n: {"normalized_sharpness": Estimate(1.0, options=names)} for n in ("a", "b")}
    assert "output_scale" not in made_of(report, **found).invariant_to("normalized_sharpness")
    assert made_of(report, a={"own": Estimate(1.0)}).invariant_to("own") == ()


# -- failures and differences -----------------------------------------------------------------


class Bent(nn.Module):
    """Has no path norm: its parameters pass through a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        return torch.sin(self.w * x).unsqueeze(1)


def test_one_model_that_fails_is_marked_and_loses_nothing():
    x, y = torch.ones(4), torch.zeros(4, 1)
    bent = fg.LossSurface(Bent(), "mse", (x, y))
    linear = fg.LossSurface(nn.Linear(1, 1, bias=False), "mse", (x[:, None], y))
    comparison = fg.compare({"bent": bent, "line": linear}, measures=["path_norm", "hessian_trace"])
    assert comparison.ranks_of("path_norm") == {"line": 1, "bent": None}
    assert comparison.ranking("path_norm")["kind"].iloc[-1] == "failed"
    assert comparison.ranks().isna().loc["path_norm", "bent"]
    assert math.isfinite(comparison["bent"]["hessian_trace"].value)
    text = repr(comparison)
    assert "failed" in text
    assert "bent: path_norm: could not be measured: " in text


def test_other_data_losses_and_precisions_are_told(report):
    facts = report.facts
    other = replace(facts, samples=7, loss_name="l1", dtype="float32", seed=3)
    notes = Comparison({"a": report, "b": Report(report.estimates, other)}).notes
    assert [note.split(",")[0] for note in notes] == [
        "different losses",
        "different numbers of samples",
        "different precisions",
        "different seeds",
    ]


def test_other_samples_are_seen():
    model, targets = nn.Linear(2, 1), torch.zeros(3, 1)
    surfaces = {
        name: fg.LossSurface(model, "mse", (inputs, targets))
        for name, inputs in (("a", torch.ones(3, 2)), ("b", torch.zeros(3, 2)))
    }
    comparison = fg.compare(surfaces, measures=["hessian_trace"])
    assert comparison.warnings[0].startswith(
        "not the same data: the samples of b are not those of a, or come in another order"
    )
    narrow = fg.LossSurface(nn.Linear(1, 1), "mse", (torch.ones(3, 1), targets))
    mixed = fg.compare({"a": surfaces["a"], "c": narrow}, measures=["hessian_trace"])
    assert mixed.warnings[-1].startswith(
        "samples of different shapes: a [(1, 2), (1, 1)], c [(1, 1)"
    )


@pytest.mark.parametrize(
    ("surfaces", "error", "message"),
    [
        ({"a": bowl([1.0])}, ValueError, "has 1 model, and a comparison needs two"),
        ([bowl([1.0])], TypeError, "`surfaces` is a list; pass a dict from the models' names"),
        ({"a": bowl([1.0]), "b": 3}, TypeError, "`surface` is a int; make one with LossSurface"),
    ],
)
def test_wrong_surfaces_are_refused(surfaces, error, message):
    with pytest.raises(error, match=message):
        fg.compare(surfaces)


def test_what_was_not_compared_is_told(compared):
    with pytest.raises(KeyError, match="`other` was not compared; there are flat, same, sharp"):
        compared["other"]


# -- forms ------------------------------------------------------------------------------------


def test_the_frame_holds_every_number(compared):
    frame = compared.to_frame()
    assert list(frame.index.names) == ["measure", "model"]
    for measure in NAMES:
        for model, report in compared.items():
            assert frame.loc[(measure, model), "value"] == report[measure].value
    values = frame["value"].unstack("model")
    assert values.loc["adaptive_trace", "sharp"] == 144.0
    assert frame.loc[("hessian_trace", "flat"), "rank"] == 1
    assert "nodewise" in frame.loc[("adaptive_trace", "flat"), "invariant_to"]


def test_json_is_read_back_as_it_was(compared, tmp_path):
    text = compared.to_json(tmp_path / "c.json")
    again = fg.Comparison.from_json(tmp_path / "c.json")
    assert again.to_dict() == compared.to_dict() == json.loads(text)
    with pytest.raises(ValueError, match="this is no comparison: it has no `models`"):
        fg.Comparison.from_dict(compared["flat"].to_dict())


def test_the_text_has_models_as_columns_ranks_and_the_verdict_last(compared):
    lines = repr(compared).splitlines()
    line = next(line for line in lines if line.startswith("hessian_trace"))
    assert [cell for cell in line.split() if cell.startswith("(")] == ["(1)", "(3)", "(2)"]
    assert lines[-1] == compared.verdict
    start = lines.index("Blind to the scale of every unit")
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == list(NAMES[1:])


@pytest.mark.parametrize("width", [40, 80, 120])
def test_on_terminals_of_every_width_each_value_is_there(compared, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    print_tables(compared.tables(), Console())
    out = capsys.readouterr().out
    assert all(len(line) <= width for line in out.splitlines())
    for report in compared.values():
        assert str(report["hessian_trace"]) in out


def test_the_picture_shows_ratios_and_names_what_has_none(compared):
    ax = compared.plot()
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == [*NAMES[1:], NAMES[0]]
    assert [label.get_text() for label in ax.get_legend().get_texts()] == list(compared)
    missing = made_of(
        compared["flat"], a={"psi_trace": Estimate(-1.0)}, b={"psi_trace": Estimate(1.0)}
    )
    assert "no ratio: psi_trace" in missing.plot(ax=mpl.figure.Figure().subplots()).get_xlabel()


def test_progress_counts_over_all_models():
    told = []
    models = {"a": bowl([1.0]), "b": bowl([2.0])}
    fg.compare(models, measures=["expected_sharpness"], progress=lambda *now: told.append(now))
    assert told == [("a: expected_sharpness", 0, 2), ("b: expected_sharpness", 1, 2)]


def test_the_comparison_is_saved_after_every_measure(tmp_path):
    path, seen = tmp_path / "c.json", []

    def look(name, done, total):
        if path.exists():
            contents = json.loads(path.read_text())
            seen.append(
                (contents["complete"], [len(r["measures"]) for r in contents["models"].values()])
            )

    models = {"a": bowl([1.0]), "b": bowl([2.0])}
    names = ["expected_sharpness", "hessian_max_eigenvalue"]
    fg.compare(models, measures=iter(names), progress=look, save=path)
    assert seen == [(False, [1]), (False, [2]), (False, [2, 1])]
    assert json.loads(path.read_text())["complete"] is True
    assert os.listdir(tmp_path) == ["c.json"]


# -- which measures vote, and at one radius --------------------------------------------------


def test_norms_of_the_network_do_not_vote_on_flatness():
    capacity = {"path_norm", "fisher_rao_norm", "basis_path_ratio"}
    surfaces = {"flat": two_weights(0.5, 0.5), "sharp": two_weights(2.0, 3.0)}
    compared = fg.compare(surfaces, measures=["adaptive_trace", *sorted(capacity)])
    assert list(compared.agreement().ranks) == ["adaptive_trace"]
    assert compared.verdict == "1 of 1 invariant measure ranks flat flattest"
    assert set(compared.ranks().index) >= capacity  # They are still compared.
    only = fg.compare(surfaces, measures=["path_norm"])
    assert only.verdict.startswith("no verdict: no measure of flatness")


def test_every_measure_says_what_it_is():
    kinds = fg.catalogue().set_index("name")["kind"]
    assert set(kinds) == {"curvature", "worst case", "expectation", "capacity"}
    assert kinds["rho_sum"] == "curvature"
    assert kinds["adaptive_sharpness"] == "worst case"
    assert kinds["psi_expected_sharpness"] == "expectation"


def test_a_radius_that_follows_the_model_is_the_smallest_for_all():
    surfaces = {"small": two_weights(0.5, 0.5), "large": two_weights(2.0, 3.0)}
    names = ["psi_epsilon_sharpness", "psi_expected_sharpness"]
    alone = {n: fg.measure(s, measures=names) for n, s in surfaces.items()}
    compared = fg.compare(surfaces, measures=names)
    for measure, option in zip(names, ("epsilon", "truncation"), strict=True):
        defaults = [report[measure].options[option] for report in alone.values()]
        assert len(set(defaults)) == 2
        for report in compared.values():
            assert report[measure].options[option] == min(defaults)
        assert None not in compared.ranks_of(measure).values()
    given = fg.compare(surfaces, measures={"psi_epsilon_sharpness": {"epsilon": 0.01}})
    assert given["large"]["psi_epsilon_sharpness"].options["epsilon"] == 0.01


def test_models_without_basis_paths_do_not_spoil_the_radius_of_the_others():
    frozen = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    frozen[0].weight.requires_grad_(False)
    data = torch.ones(2, 1).double(), torch.zeros(2, 1).double()
    surfaces = {"paths": two_weights(2.0, 3.0), "none": fg.LossSurface(frozen, "mse", data)}
    compared = fg.compare(surfaces, measures=["psi_epsilon_sharpness"])
    assert compared["paths"]["psi_epsilon_sharpness"].options["epsilon"] == 3.0
    assert math.isnan(compared["none"]["psi_epsilon_sharpness"].value)
