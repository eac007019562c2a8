"""The page of a study in a real browser: drawn, sorted, chosen, dark, narrow, on paper."""

from __future__ import annotations

import json

import pytest
from browsing import Loaded, browsing, column, luminance, needs_browser, until
from study_data import LAYERS, MEASURES, whole_study

from flatgauge.report.pool_page import PoolPage, write_page

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser():
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_page(tmp_path_factory.mktemp("study") / "study.html", PoolPage(**whole_study()))


@pytest.fixture(scope="module")
def wide(browser, path):
    return Loaded(browser, path, color_scheme="light", viewport={"width": 1280, "height": 900})


@pytest.fixture(scope="module")
def narrow(browser, path):
    return Loaded(browser, path, color_scheme="dark", viewport={"width": 390, "height": 844})


def points(plot):
    """How many points plotly has drawn in a picture."""
    return f"document.querySelectorAll('#{plot} .plot .scatterlayer .point').length"


def test_nothing_is_wrong_and_nothing_is_asked_for(wide, narrow):
    for item in (wide, narrow):
        assert item.errors == []
        assert {url.split(":")[0] for url in item.requests} <= {"file", "data", "blob"}
        assert sum(url.startswith("file:") for url in item.requests) == 1


def test_every_network_is_drawn_in_every_panel(wide):
    count, lost = len(whole_study()["frame"]), 1  # One has no normalized sharpness.
    assert wide.page.evaluate(points("scatter-plots")) == count * len(MEASURES) - lost
    assert wide.page.evaluate(points("pair-plots")) == 4 * count
    assert wide.page.evaluate(points("layer-plots")) == count * len(LAYERS)


def test_a_measure_is_chosen(wide):
    page = wide.page
    page.select_option("#scatter-plots select", label="hessian_trace")
    until(page, f"{points('scatter-plots')} === 24")
    drawn = page.evaluate(
        "[...document.querySelector('#scatter-plots .plot').data]"
        ".filter(t => t.mode === 'markers').flatMap(t => [...t.x])"
    )
    assert sorted(drawn) == sorted(whole_study()["frame"]["hessian_trace"])
    assert page.locator("#scatter-plots input").count() == 0
    page.select_option("#scatter-plots select", label="all measures")
    until(page, f"{points('scatter-plots')} === {24 * 6 - 1}")


def test_tables_sort_by_their_numbers(wide):
    page, table = wide.page, "#correlations table"
    page.locator(f"{table} thead th button").nth(3).click()
    values = [float(value) for value in column(page, table, 3)]
    assert values == sorted(whole_study()["correlations"]["spearman"])
    page.locator(f"{table} thead th button").nth(3).click()
    assert [float(value) for value in column(page, table, 3)] == values[::-1]
    table = "#runs table"
    place = page.locator(f"{table} thead th").all_text_contents().index("normalized_sharpness")
    page.locator(f"{table} thead th button").nth(place).click()
    found = column(page, table, place)
    assert found[-1] == "—"  # What is missing comes last.
    assert [float(v) for v in found[:-1]] == sorted(map(float, found[:-1]))


def test_numbers_in_the_page_are_those_of_the_json(wide):
    contents, cells = wide.page.evaluate(
        """[JSON.parse(document.getElementById('flatgauge').textContent),
            [...document.querySelectorAll('td[data-table]')].map(cell => ({...cell.dataset}))]"""
    )
    assert len(cells) > 300
    for data in cells:
        value = contents[data["table"]][data["row"]][data["column"]]
        assert float(data["value"]) == float(value) or data["value"] == value == "nan"


def test_whiskers_lie_where_the_numbers_are(wide):
    places = wide.page.evaluate(
        """[...document.querySelectorAll('td[data-column="spearman"]')].map(cell => {
             const line = cell.querySelector('.zero').getBoundingClientRect();
             const dot = cell.querySelector('circle').getBoundingClientRect();
             const middle = (dot.left + dot.right) / 2;
             return [Number(cell.dataset.value), 2 * (middle - line.left) / line.width - 1];
           })"""
    )
    assert len(places) == len(MEASURES)
    for value, place in places:
        assert place == pytest.approx(value, abs=0.03)


def test_a_narrow_window_has_one_column_and_does_not_scroll_sideways(wide, narrow):
    width = "document.documentElement.scrollWidth"
    assert narrow.page.evaluate(width) == 390
    shown = "document.querySelector('#scatter-plots .plot')._fullLayout"
    assert narrow.page.evaluate(f"{shown}.xaxis2.domain") == [0, 1]
    assert wide.page.evaluate(f"{shown}.xaxis2.domain[0]") > 0.3
    wide.page.set_viewport_size({"width": 390, "height": 844})
    until(wide.page, f"{shown}.xaxis2.domain[0] === 0 && {shown}.width < 390")
    assert wide.page.evaluate(width) == 390
    wide.page.set_viewport_size({"width": 1280, "height": 900})
    until(wide.page, f"{shown}.xaxis2.domain[0] > 0.3")


def test_dark_and_on_paper(wide, narrow):
    assert luminance(wide.page) > 0.9
    assert luminance(narrow.page) < 0.1
    narrow.page.emulate_media(media="print")
    assert luminance(narrow.page) > 0.9
    narrow.page.emulate_media(media="screen")


def test_every_picture_and_table_has_words(wide):
    page = wide.page
    assert page.evaluate("[...document.querySelectorAll('table')].every(t => t.caption)")
    assert page.evaluate("[...document.querySelectorAll('.plot[role]')].every(p => p.ariaLabel)")


def test_the_json_can_be_kept(wide, tmp_path):
    with wide.page.expect_download() as waiting:
        wide.page.locator("#download").click()
    waiting.value.save_as(tmp_path / "kept.json")
    kept = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    frame = whole_study()["correlations"]
    assert {name: row["kendall"] for name, row in kept["correlations"].items()} == dict(
        frame["kendall"]
    )
