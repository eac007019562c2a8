"""The page in a real browser: drawn, sorted, dark, printed, narrow, and asking for nothing."""

from __future__ import annotations

import json

import pytest
from browsing import Loaded, browsing, column, luminance, needs_browser, until
from pages import EVIL, odd, pictures, two_ways

from flatgauge.report.page import write_page

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser():
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    reports, certificates, gauges = two_ways()
    return write_page(
        tmp_path_factory.mktemp("page") / "full.html",
        reports,
        rewritten={"rescaled": "as trained"},
        certificates=certificates,
        gauges=gauges,
        spectra=pictures()[:1],
        landscapes=pictures()[1:],
    )


@pytest.fixture(scope="module")
def loaded(browser, full):
    return Loaded(browser, full, color_scheme="light", viewport={"width": 1280, "height": 900})


@pytest.fixture(scope="module")
def strange(browser, tmp_path_factory):
    """The page of a report with odd numbers and a name that wants to run."""
    reports, _, _ = two_ways()
    path = odd(reports["as trained"]).to_html(
        tmp_path_factory.mktemp("odd") / "odd.html", name=EVIL, remarks=[EVIL]
    )
    return Loaded(browser, path, color_scheme="dark", viewport={"width": 380, "height": 800})


def test_nothing_is_wrong_and_nothing_is_asked_for(loaded, strange):
    for item in (loaded, strange):
        assert item.errors == []
        assert {url.split(":")[0] for url in item.requests} <= {"file", "data", "blob"}
        assert sum(url.startswith("file:") for url in item.requests) == 1


def test_all_pictures_are_drawn(loaded):
    drawn = loaded.page.evaluate(
        """[...document.querySelectorAll('.plot')].map(plot => {
            const mark = plot.querySelector('.gl-container canvas, .plot-container .bars path, '
              + '.plot-container .scatterlayer path, .plot-container .contourlayer path');
            const box = mark.getBoundingClientRect();
            return [plot.data.length, plot.clientHeight, Math.max(box.width, box.height)];
        })"""
    )
    assert len(drawn) == 5
    for traces, height, size in drawn:
        assert traces >= 1
        assert height > 100
        assert size > 10


def test_numbers_in_the_page_are_those_of_the_json_and_of_the_reports(loaded):
    contents, cells = loaded.page.evaluate(
        """[JSON.parse(document.getElementById('flatgauge').textContent),
            [...document.querySelectorAll('#headline, #numbers')].flatMap(section =>
              [...section.querySelectorAll('td[data-value]')].map(cell =>
                [{...cell.dataset}, cell.querySelector('.number')?.textContent]))]"""
    )
    reports, _, _ = two_ways()
    assert contents["reports"] == {name: report.to_dict() for name, report in reports.items()}
    seen = set()
    for data, shown in cells:
        name, measure, field = data["model"], data["measure"], data["field"]
        value = getattr(reports[name][measure], field)
        assert contents["reports"][name]["measures"][measure][field] == value
        assert json.loads(data["value"]) == value
        if field == "value":
            assert shown == str(reports[name][measure])
        seen.add((name, measure, field))
    for name, report in reports.items():
        for measure in report:
            assert {(name, measure, f) for f in ("value", "matvecs", "seconds")} <= seen


def test_tables_sort_by_click_and_by_key(loaded):
    page, table = loaded.page, "#all-models table"
    heading = page.locator(f"{table} thead th").nth(2)
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    values = [float(value) for value in column(page, table, 2)]
    assert values == sorted(values)
    assert values != sorted(values, key=str)  # By number, not by letter.
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert [float(value) for value in column(page, table, 2)] == values[::-1]
    page.locator(f"{table} thead th button").first.click()
    assert heading.get_attribute("aria-sort") == "none"
    names = column(page, table, 0)
    assert names == sorted(names)


def test_what_is_no_number_comes_last_both_ways(strange):
    page, table = strange.page, "#numbers table"
    button = page.locator(f"{table} thead th button").nth(1)
    button.click()
    assert column(page, table, 1) == ["-100.0", "-2.5", "9.0", "10.0", "inf", "nan"]
    button.click()
    assert column(page, table, 1) == ["inf", "10.0", "9.0", "-2.5", "-100.0", "nan"]


def test_groups_keep_together_when_their_rows_are_sorted(loaded):
    heads = """[...document.querySelectorAll('.moves tbody')].map(b => b.rows[0].className)"""
    loaded.page.locator(".moves thead th button").nth(1).click()
    assert set(loaded.page.evaluate(heads)) == {"group"}


def test_the_measure_of_the_bars_is_chosen(loaded):
    page = loaded.page
    read = "document.querySelector('#layer-bars .plot').data[0].x"
    before = page.evaluate(f"[...{read}]")
    options = page.locator("#layer-bars option").all_text_contents()
    page.select_option("#layer-bars select", label="rho_sum")
    until(page, f"JSON.stringify([...{read}]) !== '{json.dumps(before)}'")
    reports, _, _ = two_ways()
    assert page.evaluate(f"[...{read}]") == list(reports["as trained"]["rho_sum"].layers.values())
    assert options == [name for name, e in reports["as trained"].items() if e.layers]
    log = "document.querySelector('#layer-bars .plot')._fullLayout.xaxis.type"
    page.locator("#layer-bars input").set_checked(True)
    until(page, f"{log} === 'log'")


def test_dark_by_the_button_and_by_the_system(loaded, strange):
    page = loaded.page
    colour = "document.querySelector('#layer-bars .plot')._fullLayout.font.color"
    assert luminance(page) > 0.9
    light = page.evaluate(colour)
    height = page.evaluate("document.querySelector('#landscapes-2 .plot').clientHeight")
    page.locator("#theme").click()
    assert luminance(page) < 0.1
    until(page, f"{colour} !== '{light}'")
    assert page.evaluate("document.querySelector('#landscapes-2 .plot').clientHeight") == height
    page.locator("#theme").click()
    assert luminance(page) > 0.9
    assert luminance(strange.page) < 0.1


def test_on_paper_everything_is_open_and_light(strange):
    page = strange.page
    page.emulate_media(media="print")
    until(page, "!document.querySelector('details:not([open])')")
    assert luminance(page) > 0.9
    assert not page.locator("#theme").is_visible()
    assert not page.locator("nav").is_visible()
    page.emulate_media(media="screen")
    assert luminance(page) < 0.1


def test_a_narrow_window_does_not_scroll_sideways(loaded, strange):
    width = "document.documentElement.scrollWidth"
    assert strange.page.evaluate(width) == 380
    loaded.page.set_viewport_size({"width": 380, "height": 800})
    until(
        loaded.page,
        "[...document.querySelectorAll('.plot')].every(plot => plot._fullLayout.width < 380)",
    )
    assert loaded.page.evaluate(width) == 380
    loaded.page.set_viewport_size({"width": 1280, "height": 900})


def test_names_are_shown_as_they_are(strange):
    page = strange.page
    assert page.locator("h1").text_content() == EVIL
    ticks = page.evaluate(
        "[...document.querySelectorAll('#layer-bars .ytick text')].map(t => t.textContent)"
    )
    assert EVIL in ticks


def test_the_json_can_be_kept(loaded, tmp_path):
    with loaded.page.expect_download() as waiting:
        loaded.page.locator("#download").click()
    waiting.value.save_as(tmp_path / "kept.json")
    reports, _, _ = two_ways()
    kept = json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))
    assert kept["reports"] == {name: report.to_dict() for name, report in reports.items()}


def test_every_picture_and_table_has_words(loaded):
    page = loaded.page
    assert page.evaluate("[...document.querySelectorAll('table')].every(t => t.caption)")
    assert page.evaluate("[...document.querySelectorAll('.plot')].every(p => p.ariaLabel)")
    assert page.locator("main, nav, header, footer").count() == 4


def test_text_stands_out_from_its_ground(loaded, strange):
    """Contrast of at least 4.5 (AA) for every text, in the light and in the dark."""
    script = """() => {
        const parts = colour => (colour.match(/[\\d.]+/g) ?? []).map(Number);
        const light = rgb => rgb.slice(0, 3).map(c => c / 255)
            .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
        const ground = element => {
            for (let at = element; at; at = at.parentElement) {
                const found = parts(getComputedStyle(at).backgroundColor);
                if (found.length === 3 || found[3] === 1) return found;
            }
        };
        const poor = new Set();
        for (const element of document.querySelectorAll('body *:not(svg *, script, .plot *)')) {
            const own = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
            if (!own || !element.checkVisibility()) continue;
            const [a, b] = [parts(getComputedStyle(element).color), ground(element)].map(light);
            const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            if (contrast < 4.5) poor.add(`${element.tagName}.${element.className} ${contrast}`);
        }
        return [...poor];
    }"""
    assert loaded.page.evaluate(script) == []
    assert strange.page.evaluate(script) == []
