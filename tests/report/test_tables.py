"""A table is described once, and written in five ways."""

from __future__ import annotations

import csv
import io
from html.parser import HTMLParser

import pytest

from flatgauge.report.tables import (
    Cell,
    Column,
    Table,
    number_cell,
    print_tables,
    tables_html,
    tables_text,
)

WIDE = Table(
    "Two models",
    (
        Column("model"),
        Column("rho_sum", "right", group="invariant"),
        Column("rho_max", "right", group="invariant"),
        Column("time", "right", priority=1),
        Column("empty", priority=2),
    ),
    (
        (
            Cell("small"),
            Cell("1.96", 1.9573, "good", "1.9573"),
            Cell("3", 3.0),
            Cell("2 s"),
            Cell(""),
        ),
        (Cell("large"), Cell("12.1", 12.1), Cell("4", 4.0), Cell("14 s"), Cell("")),
    ),
    ("Lower is flatter.",),
)


class Cells(HTMLParser):
    """The attributes and texts of the cells of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append(({"tag": tag, **dict(attrs)}, ""))

    def handle_data(self, data):
        attributes, text = self.found[-1]
        self.found[-1] = (attributes, text + data)


def test_plain_text_lines_columns_up_and_drops_empty_ones():
    assert WIDE.to_text().splitlines() == [
        "Two models",
        "",
        "       invariant",
        "model  rho_sum  rho_max  time",
        "small     1.96        3   2 s",
        "large     12.1        4  14 s",
        "",
        "Lower is flatter.",
    ]


def test_a_narrow_table_drops_what_matters_least():
    assert "model  rho_sum  rho_max\n" in WIDE.to_text(26)


def test_what_fits_nowhere_is_printed_in_blocks():
    text = WIDE.to_text(15)
    assert "model  rho_sum\n" in text
    assert "model  rho_max\n" in text
    assert all(len(line) <= 15 for line in text.splitlines())


def test_where_no_two_columns_fit_they_stand_below_each_other():
    lines = WIDE.to_text(10).splitlines()
    assert lines[lines.index("small") :][:3] == ["small", "  rho_sum", "1.96"]


def test_notes_wrap_at_words():
    text = Table("", notes=("a note of several words",)).to_text(12)
    assert text.splitlines() == ["a note of", "several", "words"]


def test_characters_that_take_two_places_line_up():
    table = Table(
        "", (Column("a"), Column("b")), ((Cell("網路"), Cell("x")), (Cell("four"), Cell("y")))
    )
    assert table.to_text().splitlines()[1:] == ["網路  x", "four  y"]


def test_what_could_steer_a_terminal_is_shown():
    table = Table("net \x1b[31m", (Column("a"),), ((Cell("\x1b[2J"),),))
    assert "\x1b" not in table.to_text()
    assert "\\u001b" in table.to_text()


def test_csv_has_every_digit():
    rows = list(csv.reader(io.StringIO(WIDE.to_csv())))
    assert rows[0] == ["model", "rho_sum", "rho_max", "time", "empty"]
    assert rows[1][:4] == ["small", "1.9573", "3.0", "2 s"]


def test_latex_escapes_and_uses_booktabs():
    table = Table("50 %", (Column("a_b"), Column("v", "right")), ((Cell("x & y"), Cell("1 ± 2")),))
    text = table.to_latex()
    assert r"\begin{tabular}{lr}" in text
    assert r"a\_b & v \\" in text
    assert r"x \& y & 1 $\pm$ 2 \\" in text
    assert r"\bottomrule" in text


def test_html_has_values_tooltips_and_nothing_unescaped():
    text = Table("<b>", (Column("<i>"),), ((Cell("<u>", 1.5, "bad", '"'),),), ("<s>",)).to_html()
    tags = {attributes["tag"] for attributes, _ in Cells(text).found}
    assert not tags & {"b", "i", "u", "s"}
    (cell,) = (a for a, t in Cells(text).found if t == "<u>")
    assert (cell["data-value"], cell["class"], cell["title"]) == ("1.5", "bad", '"')


def test_html_and_text_show_the_same_cells():
    shown = [text for attributes, text in Cells(WIDE.to_html()).found if attributes["tag"] == "td"]
    words = WIDE.to_text().split()
    assert all(part in words for text in shown for part in text.split())


def test_rich_shows_what_plain_text_shows():
    from rich.console import Console

    console = Console(width=40, record=True, file=io.StringIO(), force_terminal=True)
    print_tables([WIDE, WIDE], console)
    lines = [line.rstrip() for line in console.export_text().splitlines() if "─" not in line]
    assert [line for line in lines if line] == [
        line for line in tables_text([WIDE, WIDE]).splitlines() if line
    ]


PAGE = Table(
    "Numbers",
    (Column("measure"), Column("value", "right")),
    (
        (Cell("rho_sum"), number_cell(-1.5, detail="2", place=(("measure", "rho_sum"),))),
        (Cell("own"), Cell("—", footnotes=(3,))),
    ),
    sections=((0, "First"), (1, "Second")),
)


def test_rows_have_headings():
    assert PAGE.to_text().splitlines()[2:] == [
        "measure     value",
        "First",
        "rho_sum  -1.5 (2)",
        "Second",
        "own             —",
    ]


def test_a_page_sorts_links_and_marks():
    text = PAGE.to_html(links={"rho_sum": ""})
    assert '<button type="button">value</button>' in text
    assert text.count('<tr class="group">') == text.count("<tbody>") == 2
    assert '<a class="quiet" href="#m-rho_sum">rho_<wbr>sum</a>' in text
    assert 'data-value="-1.5" data-measure="rho_sum"><span class="number" title="-1.5">' in text
    assert '<span class="tag warn">negative</span> <span class="detail">2</span>' in text
    assert 'data-sort="nan">— <a class="footnote" href="#note-3"' in text
    assert "<button" not in PAGE.to_html()


def test_a_table_without_columns_is_a_paragraph():
    table = Table("Passed.", notes=("55 of 55.",))
    assert table.to_text() == "Passed.\n\n55 of 55."
    assert "<table" not in tables_html([table])


def test_rows_have_as_many_cells_as_there_are_columns():
    with pytest.raises(ValueError, match="has 2 cells, but there are 1 columns"):
        Table("x", (Column("a"),), ((Cell("1"), Cell("2")),))
