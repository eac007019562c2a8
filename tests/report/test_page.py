"""The page without a browser: what stands in the file, and what does not."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from cases import build
from pages import EVIL, Page, odd, pictures, two_ways

import flatgauge as fg
from flatgauge.analysis.certificate import Certificate, CertificateRow
from flatgauge.analysis.comparison import Comparison
from flatgauge.analysis.measurement import Report
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures import registry
from flatgauge.report.formulas import mathml
from flatgauge.report.headline import headline_of
from flatgauge.report.layer_bars import MOST_LAYERS, layer_choices, unit_choices
from flatgauge.report.page import write_page
from flatgauge.report.plots.bars import MOST_POINTS
from flatgauge.report.rewrite_effects import certified_effects, effects_between
from flatgauge.report.sections import formula_of


@pytest.fixture(scope="module")
def runs():
    return two_ways()


@pytest.fixture(scope="module")
def full(runs, tmp_path_factory):
    reports, certificates, gauges = runs
    path = write_page(
        tmp_path_factory.mktemp("page") / "full.html",
        reports,
        title="one network",
        rewritten={"rescaled": "as trained"},
        certificates=certificates,
        gauges=gauges,
        spectra=pictures()[:1],
        landscapes=pictures()[1:],
        command="flatgauge measure",
        remarks=["accuracy 99 %"],
    )
    return Page(path)


@pytest.fixture(scope="module")
def odd_page(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("odd") / "odd.html"
    return Page(odd(runs[0]["as trained"]).to_html(path, name=EVIL, remarks=[EVIL], title=EVIL))


def test_nothing_is_asked_of_the_network(full):
    for _, attrs, _ in full.elements:
        for key in ("src", "href", "srcset", "data", "action", "poster"):
            assert (attrs.get(key) or "#").startswith(("#", "data:")), attrs
    policy = next(a["content"] for a, _ in full.of("meta") if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    style = next(text for _, text in full.of("style"))
    assert "url(" not in style
    assert "@import" not in style


def test_a_page_has_the_sections_it_has_contents_for(full, runs, tmp_path):
    everything = {
        *("headline", "caveats", "numbers", "layers", "certificate", "gauge", "spectra"),
        *("landscapes", "provenance", "glossary"),
    }
    assert everything <= full.ids
    facts = replace(runs[0]["as trained"].facts, notes=())
    bare = Page(Report({"own": Estimate(1.0)}, facts).to_html(tmp_path / "bare.html"))
    assert everything & bare.ids == {"headline", "numbers", "provenance"}
    links = {attrs["href"] for attrs, _ in bare.of("a")}
    assert links == {"#headline", "#numbers", "#provenance"}
    assert len(bare.of("script")) == 2  # Nothing to draw: the JSON and the page's own script.


def test_the_json_in_the_page_is_that_of_the_reports(full, runs):
    reports, certificates, _ = runs
    contents = full.contents
    for name, report in reports.items():
        assert contents["reports"][name] == json.loads(report.to_json())
    assert contents["certificates"]["as trained"] == json.loads(
        certificates["as trained"].to_json()
    )
    assert contents["rewritten"] == {"rescaled": "as trained"}
    assert contents["command"] == "flatgauge measure"


def test_names_of_the_users_are_text(odd_page):
    assert not [text for _, text in odd_page.of("script") if text == "alert(1)"]
    assert EVIL in odd_page.contents["reports"]
    assert EVIL in odd_page.of("h1")[0][1]
    drawn = [text for a, text in odd_page.of("script") if a.get("class") == "plot-data"]
    names = [name for text in drawn for trace in json.loads(text)["data"] for name in trace["y"]]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in names  # Plotly reads HTML in labels.


def test_odd_numbers_are_marked_in_words(odd_page):
    spans = [(attrs.get("class") or "", text.strip()) for attrs, text in odd_page.of("span")]
    tags = [text for classes, text in spans if classes == "tag warn"]
    assert {"negative", "infinite", "not a number"} <= set(tags)
    marks = [text for attrs, text in odd_page.of("td") if attrs.get("class") == "p1 bad"]
    assert {"failed", "not converged"} <= set(marks)


def test_many_units_leave_the_pictures_small(runs):
    (choice,) = unit_choices({"one": odd(runs[0]["as trained"])})
    assert max(len(trace.x) for trace in choice.figure.data) == MOST_POINTS
    assert choice.figure.data[0].y[0] == 1.0
    assert choice.figure.data[0].y[-1] == 0.0
    assert "100,000 units" in choice.note


def test_of_many_layers_the_largest_are_drawn(runs):
    layers = {f"layer{k}": float(k) for k in range(100)}
    report = Report({"kappa_sum": Estimate(1.0, layers=layers)}, runs[0]["as trained"].facts)
    (choice,) = layer_choices({"one": report})
    assert list(choice.figure.data[0].y) == [f"layer{k}" for k in range(60, 100)]
    assert f"The {MOST_LAYERS} largest of 100 layers" in choice.note


def test_the_headline_says_what_moved_and_what_did_not(runs):
    reports = runs[0]
    moves = effects_between(*reports.values(), ("as trained", "rescaled"))
    found = {move.measure: move for _, _, members in moves.groups for move in members}
    for name in ("rho_sum", "adaptive_trace", "fisher_rao_norm"):
        assert reports["as trained"][name].value == reports["rescaled"][name].value
        assert found[name].change == "not by one bit"
    before, after = (report["hessian_trace"].value for report in reports.values())
    ratio = after / before
    assert found["hessian_trace"].decades == pytest.approx(abs(math.log10(ratio)))
    assert found["hessian_trace"].change.startswith("×")
    assert moves.summary[1] == (
        "None of the 3 measures blind to the scale of every unit moved by one bit."
    )


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (2.0, 2.0, "not by one bit"),
        (2.0, 2.0 * (1 + 1e-9), "by 1e-09"),
        (2.0, 2.01, "by 0.5%"),
        (2.0, 0.5, "÷ 4"),
        (-2.0, -4e7, "× 2.0e+07"),
        (2.0, -1.0, "from 2 to -1"),
        (0.0, 1.0, "from 0 to 1"),
        (1e-200, 2e-200, "× 2"),
        (1.0, math.inf, "from 1 to inf"),
        (math.nan, 1.0, "could not be measured"),
    ],
)
def test_changes_in_words(runs, before, after, change):
    facts = runs[0]["as trained"].facts
    one, other = (Report({"own": Estimate(value)}, facts) for value in (before, after))
    assert effects_between(one, other, ("a", "b")).groups[0][2][0].change == change


def test_a_change_within_the_error_is_told(runs):
    facts = runs[0]["as trained"].facts
    one, other = (Report({"own": Estimate(value, stderr=0.1)}, facts) for value in (1.0, 1.2))
    assert effects_between(one, other, ("a", "b")).groups[0][2][0].how == "noise"


def test_a_certificate_tells_how_far_measures_were_pushed(runs):
    (certificate,) = runs[1].values()
    moves = certified_effects(certificate)
    found = {move.measure: move for _, _, members in moves.groups for move in members}
    assert found["rho_sum"].how == "still"
    assert found["hessian_trace"].how == "moved"
    pushed = max(
        abs(row.after)
        for row in certificate.rows
        if row.measure == "hessian_trace" and row.verdict == "moves" and row.group != "output_scale"
    )
    assert found["hessian_trace"].after.value == pushed


def test_a_failed_certificate_is_shown_as_failed(runs, tmp_path):
    reports, certificates, _ = runs
    row = CertificateRow("rho_sum", "nodewise", True, 1.0, "FAILS", 2.0, 1.0)
    broken: Certificate = replace(certificates["as trained"], rows=(row,))
    path = reports["as trained"].to_html(tmp_path / "p.html", certificates={"it": broken})
    text = path.read_text(encoding="utf-8")
    assert '<p class="verdict failed"><b>Failed</b>: 1 of 1 claims do not hold' in text
    assert "claimed and not true: from 1 to 2" in text
    assert "the certificate failed: rho_sum moves under nodewise" in text
    assert '<span class="tag bad">claimed not to move</span>' in text
    assert "moves although it claims not to: see the certificate" in text


def test_models_are_ranked_with_ties_where_the_error_allows_no_order(runs):
    facts = runs[0]["as trained"].facts

    def report(value, **options):
        return Report(
            {"rho_sum": Estimate(value, stderr=0.1), "hessian_trace": Estimate(-value)}
            | {"psi_epsilon_sharpness": Estimate(value, options=options)},
            facts,
        )

    reports = {
        "a": report(3.0, epsilon=0.1),
        "b": report(1.0, epsilon=0.1),
        "c": report(1.2, epsilon=0.2),
    }
    headline = headline_of(reports, {}, {}, Comparison(reports))
    ranks = {row[0].text: [cell.detail for cell in row[1:]] for row in headline.ranking.rows}
    assert ranks["rho_sum"] == ["3", "1=", "1="]
    assert ranks["hessian_trace"] == ["1", "3", "2"]
    assert ranks["psi_epsilon_sharpness"] == ["", "", ""]
    assert headline.ranking.notes == (
        "psi_epsilon_sharpness: not comparable, as `epsilon` differs: a 0.1, b 0.1, c 0.2",
    )
    assert headline.summary[0].startswith("no model is flattest by most of 1 invariant measure")


def test_measures_that_contradict_each_other_are_told(runs):
    facts = runs[0]["as trained"].facts
    values = {"a": (1.0, 2.0), "b": (2.0, 1.0)}
    reports = {
        name: Report({"rho_sum": Estimate(one), "rho_max": Estimate(other)}, facts)
        for name, (one, other) in values.items()
    }
    (sentence,) = headline_of(reports, {}, {}, Comparison(reports)).summary
    assert sentence.endswith("They disagree on the order of models.")


def test_every_formula_of_the_registry_is_rendered():
    for item in registry:
        latex = formula_of(item)
        assert latex, item.name
        assert mathml(latex), latex
    assert mathml(r"\frac{a}{b") is None


def test_the_gauge_says_which_tensors_share_a_scale():
    case = build("mlp")
    patterns = fg.find_gauge(case.model, case.inputs[:2]).patterns()
    first = patterns[0]
    moved = {(item.name, item.axis, item.power) for item in first.moved}
    assert moved == {("0.weight", 0, 1.0), ("0.bias", 0, 1.0), ("2.weight", 1, -1.0)}
    assert first.scales == case.model[0].out_features


def test_channels_of_a_residual_stream_share_their_scales():
    case = build("residual with batch-norm")
    gauge = fg.find_gauge(case.model, case.inputs[:2])
    patterns = gauge.patterns()
    assert sum(pattern.scales for pattern in patterns) == gauge.dim
    stream = next(p for p in patterns if {"norm0.weight", "norm.weight"} <= _names(p))
    assert {"head.weight"} < _names(stream)


def _names(pattern):
    return {item.name for item in pattern.moved}


def test_facts_tell_the_data_and_the_machine(runs):
    facts = runs[0]["as trained"].facts
    assert facts.data.startswith("tensors (11, ")
    assert facts.threads == torch.get_num_threads()
    assert facts.seconds > 0
    samples = fg.load_dataset("digits", limit=5)
    surface = fg.LossSurface(_net(), "cross_entropy", samples)
    assert surface.data.text == "digits, train: (5, 1, 8, 8) float32, (5,) int64"


def _net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def test_a_page_replaces_the_old_one_whole(runs, tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    assert runs[0]["as trained"].to_html(path) == path
    assert path.read_text(encoding="utf-8").endswith("</html>")
    assert [item.name for item in tmp_path.iterdir()] == ["page.html"]


def test_wrong_requests_for_pages_are_refused(runs, tmp_path):
    reports = runs[0]
    path = tmp_path / "page.html"
    with pytest.raises(ValueError, match="`reports` is empty; a page needs at least one"):
        write_page(path, {})
    with pytest.raises(TypeError, match="is a Estimate; pass a mapping from names to reports"):
        write_page(path, reports["rescaled"])
    with pytest.raises(TypeError, match="`reports` is a list; pass a mapping"):
        write_page(path, list(reports.values()))
    with pytest.raises(ValueError, match="`rewritten` names 'x', but the reports are 'as trained'"):
        write_page(path, reports, rewritten={"rescaled": "x"})
    with pytest.raises(TypeError, match="a str cannot be drawn; it needs `title`"):
        write_page(path, reports, landscapes=["picture"])
    with pytest.raises(FileNotFoundError, match=r"no folder .*; make it first"):
        write_page(tmp_path / "none" / "page.html", reports)
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        write_page(tmp_path, reports)
    assert not list(tmp_path.iterdir())


def test_reports_are_plotted(runs):
    report = runs[0]["as trained"]
    layers = report.plot(measure="kappa_trace_sum")
    widths = [bar.get_width() for bar in layers.patches]
    assert widths == list(report["kappa_trace_sum"].layers.values())
    assert [tick.get_text() for tick in layers.get_yticklabels()] == list(
        report["kappa_trace_sum"].layers
    )
    everything = report.plot()
    assert everything.get_xscale() == "log"
    assert len(everything.patches) == len(report)
    assert report.plot(ax=layers) is layers
    with pytest.raises(ValueError, match="`epsilon_sharpness` has no values of layers; the meas"):
        report.plot(measure="epsilon_sharpness")
    with pytest.raises(KeyError, match="`psi_trace` was not measured"):
        report.plot(measure="psi_trace")


def test_every_note_is_told_once(full, runs):
    notes = {note for report in runs[0].values() for e in report.values() for note in e.notes}
    told = [text for attrs, text in full.of("li") if (attrs.get("id") or "").startswith("note-")]
    assert sorted(text.strip() for text in told) == sorted(notes)
    links = {attrs["href"] for attrs, _ in full.of("a") if attrs.get("class") == "footnote"}
    assert links == {f"#note-{k + 1}" for k in range(len(notes))}
    assert re.search("not at a minimum", " ".join(text for _, text in full.of("li")))
