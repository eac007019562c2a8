"""The page of a study: what stands in it, without a browser and in one."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from pages import EVIL, Page, pictures
from study_data import INVARIANT, LAYERS, MEASURES, published, study_frame, whole_study

from flatgauge.report.coefficient import Coefficient, Number, coefficient, fold_intervals
from flatgauge.report.frame_table import NamedTable, cell, frame_contents, frame_table
from flatgauge.report.pool_page import PoolPage, write_page
from flatgauge.report.pool_pictures import MOST_PANELS, Points, layer_grids, measure_choices
from flatgauge.report.pool_statistics import (
    change_rows,
    correlation_text,
    explain_statistics,
    notes_of,
    other_rows,
    pool_headline,
)

TABLE = NamedTable("Table 4", "Published and ours.", published())


def write(path, **given):
    return write_page(path, PoolPage(**given))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "study.html"
    assert write(path, **whole_study(), pictures=pictures()[1:], tables=[TABLE]) == path
    return Page(path)


def bare(**changes):
    """As little as a page can do with."""
    frame = pd.DataFrame({"m": [1.0, 2.0, 4.0], "gap": [0.1, 0.3, 0.2]}, index=list("abc"))
    correlations = pd.DataFrame({"pearson": [0.5]}, index=["m"])
    given = {"title": "t", "question": "q?", "frame": frame, "correlations": correlations}
    return given | {"target": "gap", "measures": ["m"]} | changes


def points(frame=None, colour="batch"):
    return Points(study_frame() if frame is None else frame, "accuracy_gap", colour)


def test_nothing_is_asked_of_the_network(full):
    for _, attrs, _ in full.elements:
        for key in ("src", "href", "srcset", "data", "action", "poster"):
            assert (attrs.get(key) or "#").startswith(("#", "data:")), attrs
    policy = next(a["content"] for a, _ in full.of("meta") if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_a_page_has_the_sections_it_has_contents_for(full, tmp_path):
    everything = {
        *("headline", "caveats", "correlations", "scatter", "rescaling", "layers", "confounders"),
        *("tables", "pictures", "runs", "provenance", "statistics", "glossary"),
    }
    assert everything <= full.ids
    links = {attrs["href"][1:] for attrs, _ in full.of("a")}
    assert everything <= links <= full.ids
    little = Page(write(tmp_path / "bare.html", **bare()))
    few = {"headline", "caveats", "correlations", "scatter", "runs", "provenance", "statistics"}
    assert everything & little.ids == few


def test_the_json_holds_everything(full):
    given, contents = whole_study(), full.contents
    for key in ("title", "question", "summary", "target", "measures", "factors", "command"):
        assert contents[key] == given[key]
    for key, frame in (
        ("runs", "frame"),
        ("rescaled", "rescaled"),
        ("correlations", "correlations"),
    ):
        assert contents[key] == frame_contents(given[frame])
    assert contents["runs"][given["frame"].index[-1]]["normalized_sharpness"] == "nan"
    assert contents["runs"][given["frame"].index[0]]["batch"] == 64
    assert contents["layers"]["value"] == given["layers"]["value"].tolist()
    assert contents["before_after"]["rho_sum"]["itself"] == 1.0
    assert contents["tables"]["Table 4"]["hessian_trace"] == {"published": 0.71, "ours": "nan"}


def test_every_number_of_a_table_is_that_of_the_json(full):
    contents, seen = full.contents, set()
    for attrs, _ in full.of("td"):
        if "data-table" in attrs:
            key, row, column = (attrs[f"data-{name}"] for name in ("table", "row", "column"))
            rows = contents["tables"][key] if key in contents["tables"] else contents[key]
            value = rows[row][column]
            assert float(attrs["data-value"]) == pytest.approx(float(value), rel=0, nan_ok=True)
            seen.add((key, row, column))
    for name in MEASURES:
        assert {("correlations", name, c) for c in ("pearson", "kendall", "granulated")} <= seen
        assert {("before_after", name, c) for c in ("before", "after", "itself")} <= seen
        assert ("runs", "init=xavier,batch=64,seed=2", name) in seen
    assert ("Table 4", "rho_sum", "published") in seen


def test_what_is_the_same_for_all_networks_is_told_once(full):
    told = next(text for a, text in full.of("p") if "The same for all:" in text)
    assert "data mnist, samples 6000" in told
    columns = {a["data-column"] for a, _ in full.of("td") if a.get("data-table") == "runs"}
    assert "samples" not in columns
    assert {"batch", "accuracy_gap", "norm", *MEASURES} <= columns


def test_runs_that_do_not_count_are_marked_and_told(full):
    tags = [
        text.strip() for a, text in full.of("span") if a.get("class") in ("tag good", "tag bad")
    ]
    assert tags.count("reached") == 23
    assert tags.count("not reached") == 1
    told = [text.strip() for _, text in full.of("li")]
    assert "1 of 24 networks is not counted: 1 not reached." in told
    assert "A network counts if its training accuracy reached 99 %." in told
    assert not [text for text in told if text.startswith("Only")]


def test_few_networks_are_a_caveat(tmp_path):
    page = Page(write(tmp_path / "few.html", **bare()))
    told = [text.strip() for _, text in page.of("li")]
    assert "Only 3 networks are counted: the intervals are wide, and rough." in told


def test_the_headline_is_the_answer_in_numbers():
    given = whole_study()
    changes = change_rows(given["before_after"])
    found = pool_headline(points(), given["correlations"], changes)
    assert found.cards[0].value == "23 of 24"
    text = " ".join(found.answer)
    best = given["correlations"]["spearman"].idxmax()
    assert found.cards[1].name == best
    assert f"{given['correlations']['spearman'].max():.2f}" == found.cards[1].value
    assert "follow accuracy_gap (the interval of the Spearman correlation lies above 0)" in text
    assert f"3 of 6 measures correlate with the target as before: {', '.join(INVARIANT)}" in text
    assert "fall apart under the rescaling" in text
    assert "hessian_trace from" in text


def test_a_measure_whose_interval_holds_zero_does_not_follow():
    frame = pd.DataFrame(
        {"kendall": [0.6, 0.2], "kendall_low": [0.3, -0.1], "kendall_high": [0.8, 0.5]},
        index=["a", "b"],
    )
    lines = pool_headline(points(), frame, []).answer
    assert lines[0].startswith("1 of 2 measures follows accuracy_gap")
    assert lines[1] == (
        "1 of 2 measures does not, as far as these networks tell: b 0.20 [−0.10, 0.50]."
    )
    plain = pool_headline(points(), frame[["kendall"]], []).answer
    assert plain == ["Kendall correlation with accuracy_gap: a 0.60, b 0.20."]


def test_what_a_rescaling_did_is_told_by_the_intervals():
    columns = [f"{time}{end}" for time in ("before", "after") for end in ("", "_low", "_high")]
    rows = {
        "kept": [0.8, 0.6, 0.9, 0.8, 0.6, 0.9],
        "lost": [0.8, 0.6, 0.9, 0.1, -0.2, 0.4],
        "less": [0.8, 0.6, 0.9, 0.5, 0.2, 0.7],
        "none": [math.nan] * 3 + [0.5, 0.2, 0.7],
    }
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    found = {row.measure: (row.how, row.word) for row in change_rows(frame)}
    assert found == {
        "kept": ("same", "the same"),
        "lost": ("apart", "falls apart"),
        "less": ("moved", "lower by 0.30"),
        "none": ("unknown", "cannot be told"),
    }


def test_intervals_are_folded_into_their_numbers():
    frame = whole_study()["correlations"]
    (first, *_) = other_rows(frame)
    assert list(first.cells) == [
        *("granulated", "granulated[batch]", "granulated[init]"),
        *("information", "information_chance", "information_chance_high"),
        *("partial[norm]", "partial[train_loss]", "partial[rate]"),
    ]
    assert first.cells["partial[norm]"] == Coefficient(0.3, -0.1, 0.6)
    assert first.cells["information"] == Number("0.12", "0.12")
    assert first.cells["partial[rate]"] is None
    assert "pearson_low" not in fold_intervals(frame)


def test_every_note_is_told_once_and_referred_to(full):
    text = "granulated, kendall: rests on 3 seeds; and is rough; partial[rate]: no value"
    frame = pd.DataFrame({"notes": [text, "", None, ["a", "b"]]}, index=list("wxyz"))
    assert notes_of(frame, "w") == [
        "granulated, kendall: rests on 3 seeds; and is rough",
        "partial[rate]: no value",
    ]
    assert [notes_of(frame, row) for row in "xyz"] == [[], [], ["a", "b"]]
    assert notes_of(frame[[]], "w") == []
    links = [attrs["href"] for attrs, _ in full.of("a") if attrs.get("class") == "footnote"]
    assert links == ["#note-1"]
    assert "note-1" in full.ids


def test_coefficients_are_drawn_where_they_lie():
    assert Coefficient(0.0, -1.0, 0.5).places == (0.0, 50.0, 75.0)
    assert Coefficient(0.2).places == (60.0, 60.0, 60.0)
    assert Coefficient(0.2, 0.1, 0.3).follows is True
    assert Coefficient(math.nan, 0.1, 0.3).follows is None
    assert Coefficient(-0.25, -0.5, 0.004).text == "−0.25 [−0.50, 0.00]"
    frame = pd.DataFrame({"pearson": [None]}, index=["a"], dtype=object)
    assert math.isnan(coefficient(frame, "a", "pearson").value)


def test_titles_tell_the_correlation_on_the_shown_scale():
    frame = pd.DataFrame({"pearson": [0.5], "pearson_log": [0.8], "spearman": [0.7]}, index=["a"])
    assert correlation_text(frame, "a", log=True) == "Pearson (log) 0.80\nSpearman 0.70"
    assert correlation_text(frame, "a", log=False) == "Pearson 0.50\nSpearman 0.70"
    assert correlation_text(frame, "b", log=False) == ""
    assert correlation_text(frame[["pearson"]], "a", log=True) == "Pearson 0.50"
    assert correlation_text(None, "a", log=False) == ""


def test_scatter_plots_of_all_measures_come_first():
    found = measure_choices(points(), MEASURES, whole_study()["correlations"])
    assert [choice.name for choice in found] == ["all measures", *MEASURES]
    many = {f"m{n}": np.linspace(n, 1, 24) for n in range(2, MOST_PANELS + 3)}
    frame = study_frame().assign(**many)
    strength = pd.DataFrame({"kendall": np.linspace(1, 0, len(many))}, index=list(many))
    together = measure_choices(points(frame), list(many), strength)[0]
    assert together.note == "The 12 of 13 measures that follow the target most closely."
    assert len(together.figure.layout.annotations) == MOST_PANELS


def test_every_layer_has_a_panel():
    given = whole_study()
    found = layer_grids(points(), given["layers"], given["layer_correlations"])
    assert [choice.name for choice in found] == ["rho_sum", "kappa_trace_sum"]
    titles = [note.text.split("<br>") for note in found[0].figure.layout.annotations]
    assert [title[0] for title in titles] == LAYERS
    told = given["layer_correlations"].loc[("rho_sum", "fc1.weight"), "pearson"]
    assert titles[2][1] == f"Pearson {told:.2f}"


def test_cells_of_any_kind_are_shown():
    assert cell(np.int64(3)) == Number("3", "3")
    assert cell(0.123456789).shown == "0.12346"
    assert cell(math.inf).words == ("infinite",)
    assert cell(np.bool_(True)) == "True"
    assert [cell(value) for value in (None, math.nan, pd.NA, "word")] == ["", "", "", "word"]
    index = pd.MultiIndex.from_tuples([("a", 1)], names=["x", "y"])
    table = frame_table(pd.DataFrame({"v": [1.5]}, index=index), key="k", caption="c")
    assert (table.index, table.rows[0][0], table.columns) == ("x, y", "a, 1", [("v", True)])
    flags = pd.DataFrame({"v": [np.bool_(True), None]}, index=["a", "b"])
    assert json.dumps(frame_contents(flags)) == '{"a": {"v": true}, "b": {"v": null}}'


def test_only_statistics_that_are_there_are_explained():
    words = explain_statistics(["pearson", "partial[rate]", "own"])
    assert {"Pearson", "partial", "interval", "counted"} <= set(words)
    assert "Kendall" not in words


def test_names_of_the_users_are_text(tmp_path):
    frame = bare()["frame"].rename(index={"a": EVIL}).assign(**{EVIL: list("xyz")})
    correlations = pd.DataFrame({"pearson": [0.5], "notes": [EVIL]}, index=["m"])
    page = Page(
        write(
            tmp_path / "evil.html",
            **bare(frame=frame, correlations=correlations, title=EVIL, question=EVIL),
            summary=[EVIL],
            caveats=[EVIL],
            colour=EVIL,
            facts={EVIL: EVIL},
        )
    )
    assert not [text for _, text in page.of("script") if text == "alert(1)"]
    assert page.of("h1")[0][1].strip() == EVIL
    assert EVIL in page.contents["runs"]


def test_wrong_requests_are_refused(tmp_path):
    path = tmp_path / "page.html"
    frame = bare()["frame"]
    with pytest.raises(ValueError, match="`frame` has no row; a study's page needs at least one"):
        write(path, **bare(frame=frame.iloc[:0]))
    with pytest.raises(ValueError, match="`measures` is empty; name at least one column"):
        write(path, **bare(measures=[]))
    with pytest.raises(ValueError, match="`frame` has no column 'x', 'batch'; it has m, gap"):
        write(path, **bare(measures=["m", "x"], factors=["batch"]))
    with pytest.raises(ValueError, match="`rescaled` has the run 'a' twice; give every run one"):
        write(path, **bare(rescaled=frame.iloc[[0, 0]]))
    with pytest.raises(ValueError, match="`layers` has no column 'layer', 'value'; it needs run"):
        write(path, **bare(layers=pd.DataFrame({"run": [], "measure": []})))
    with pytest.raises(TypeError, match="a str cannot be drawn; it needs `title`"):
        write(path, **bare(pictures=["picture"]))
    assert not list(tmp_path.iterdir())
