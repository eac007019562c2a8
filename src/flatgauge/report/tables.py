"""The one description of a table, and every way to write it.

A view (`report/views`) makes `Table` records of cells; here they become plain text, a table on a
terminal, HTML, CSV and LaTeX. All five read the same record, so nothing is formatted twice and
nothing is read back from text. A cell holds what is shown and the value behind it: CSV and the
`data-value` attributes of HTML have the value to its last digit. Where a table is too wide, the
columns of the largest `priority` are dropped first; if those of priority 0 are still too wide,
they are printed in blocks that repeat the first column, and where not even two columns fit, one
below the other. In a page, headings sort and names of
measures link to the glossary; the page gives the names that it explains.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.formatting import printable

if TYPE_CHECKING:
    from rich.console import Console

#: What a style is called on a terminal. In HTML it is a class of the cell.
STYLES = {
    "": "",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "muted": "dim",
    "strong": "bold",
}

#: Spaces between the columns of plain text.
_GAP = "  "

#: Characters that LaTeX does not print as they are.
_LATEX = {
    **{char: f"\\{char}" for char in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
    "÷": r"$\div$",
    "→": r"$\to$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "‖": r"$\|$",
    "λ": r"$\lambda$",
    "σ": r"$\sigma$",
    "ρ": r"$\rho$",
    "✓": r"\checkmark",
    "✗": r"$\times$",
    "…": r"\dots{}",
}


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: What is shown.
        value: What it stands for, to the last digit; None where the text is all there is.
        style: A key of `STYLES`.
        tooltip: What a page says about it; all digits of a number where this is empty.
        detail: What follows in smaller letters: a rank, options. In parentheses in plain text.
        tags: Words that HTML marks as odd, such as "negative".
        place: Where the value stands in the JSON of a page: ``("measure", "rho_sum")`` becomes
            ``data-measure="rho_sum"``.
        footnotes: Numbers of the notes of a page to refer to.
    """

    text: str
    value: float | str | bool | None = None
    style: str = ""
    tooltip: str = ""
    detail: str = ""
    tags: tuple[str, ...] = ()
    place: tuple[tuple[str, str], ...] = ()
    footnotes: tuple[int, ...] = ()

    @property
    def plain(self) -> str:
        """All that is shown, as text."""
        return f"{self.text} ({self.detail})" if self.detail else self.text


def number_cell(value: float, text: str | None = None, **shown: Any) -> Cell:
    """A number, written as `text` or with six digits, and what is odd about it in words.

    Args:
        value: The number.
        text: How it is written.
        **shown: Further attributes of the cell.

    Returns:
        The cell.

    Example:
        >>> number_cell(-0.25).tags, number_cell(float("inf")).tags, number_cell(2).text
        (('negative',), ('infinite',), '2')
    """
    if math.isnan(value):
        tags: tuple[str, ...] = ("not a number",)
    else:
        tags = ("negative",) * (value < 0) + ("infinite",) * math.isinf(value)
    return Cell(f"{value:.6g}" if text is None else text, float(value), tags=tags, **shown)


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: Its heading.
        align: "left", "right" or "center".
        priority: 0 is always shown; of the others the largest are dropped first.
        tooltip: What a page says about it.
        group: A heading above the headings of neighbouring columns; "" for none.
    """

    name: str
    align: str = "left"
    priority: int = 0
    tooltip: str = ""
    group: str = ""


@dataclass(frozen=True)
class Table:
    """Cells in rows and columns, with a title and notes. Without columns, it is a paragraph.

    Attributes:
        title: Above it, a line.
        columns: One for every cell of a row.
        rows: Row by row.
        notes: Below it: how to read it, and what to know before using it.
        style: Of the title, a key of `STYLES`.
        sections: Headings between rows, each with the number of the row that it stands above.

    Example:
        >>> columns = (Column("measure"), Column("value", align="right"))
        >>> rows = ((Cell("rho_sum"), Cell("1.96", 1.9573)), (Cell("rho_max"), Cell("1.2", 1.2)))
        >>> print(Table("LeNet", columns, rows, notes=("Lower is flatter.",)).to_text())
        LeNet
        <BLANKLINE>
        measure  value
        rho_sum   1.96
        rho_max    1.2
        <BLANKLINE>
        Lower is flatter.
    """

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    notes: tuple[str, ...] = ()
    style: str = "strong"
    sections: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        if odd := next((row for row in self.rows if len(row) != len(self.columns)), None):
            raise ValueError(
                f"a row of {self.title!r} has {len(odd)} cells, but there are "
                f"{len(self.columns)} columns."
            )

    def to_text(self, width: int | None = None) -> str:
        """Write it as plain text.

        Args:
            width: How many characters a line may have; None for as many as it takes.

        Returns:
            Title, rows and notes, with an empty line between them.
        """
        parts = [[self.title]] if self.title else []
        parts += [list(_text_lines(part)) for part in _fitting(self, width, len(_GAP))]
        parts += [list(self.notes)] if self.notes else []
        lines = "\n\n".join("\n".join(part) for part in parts)
        return printable(_wrap(lines, width) if width else lines)

    def to_html(self, links: Mapping[str, str] | None = None) -> str:
        """Write it as ``<table class="fg">``.

        Args:
            links: For a page: the measures that its glossary explains, each with its skeleton or
                "". Headings are buttons then, by which the page's script sorts.

        Returns:
            HTML with the title as caption, a `data-value` attribute on every cell that has a value,
            and the notes as a list below.
        """
        return "".join(_html_parts(self, links))

    def to_csv(self) -> str:
        """Write the cells as CSV, with a value's every digit.

        Returns:
            The text, headings first; without title and notes.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if self.columns:
            writer.writerow([column.name for column in self.columns])
        writer.writerows([_csv_value(cell) for cell in row] for row in self.rows)
        return text.getvalue()

    def to_latex(self) -> str:
        """Write it as a `tabular` with the rules of the booktabs package.

        Returns:
            The text; title and notes are comments.
        """
        align = "".join(column.align[0] for column in self.columns)
        head = " & ".join(_latex_text(column.name) for column in self.columns)
        body = [" & ".join(_latex_text(cell.plain) for cell in row) + r" \\" for row in self.rows]
        lines = [f"\\begin{{tabular}}{{{align}}}", r"\toprule", rf"{head} \\", r"\midrule", *body]
        comments = [f"% {line}" for text in (self.title, *self.notes) for line in text.split("\n")]
        return "\n".join([*comments, *lines, r"\bottomrule", r"\end{tabular}", ""])


def tables_text(tables: Iterable[Table], width: int | None = None) -> str:
    """Several tables as plain text, with an empty line between them."""
    return "\n\n".join(table.to_text(width) for table in tables)


def tables_html(tables: Iterable[Table]) -> str:
    """Several tables as HTML that can stand in a notebook, with the little style that it needs."""
    body = "".join(table.to_html() for table in tables)
    return f'<style>{HTML_STYLE}</style><div class="fg-tables">{body}</div>'


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """Print tables on a terminal, with colour where it has any.

    Args:
        tables: What to print, from top to bottom.
        console: Where to.
    """
    for number, table in enumerate(tables):
        if number:
            console.print()
        if table.title:
            style = STYLES[table.style]
            console.print(printable(table.title), style=style, highlight=False, markup=False)
        for part in _fitting(table, console.width, len(_GAP)):
            console.print()
            _print_grid(part, console)
        if table.notes:
            console.print()
        for note in table.notes:
            console.print(printable(note), style="dim", highlight=False, markup=False)


def _print_grid(table: Table, console: Console) -> None:
    """Print headings and cells; they fit."""
    from rich.text import Text

    widths = _widths(table)
    lines = []
    if any(column.group for column in table.columns):
        lines.append(Text(_group_line(table, widths), style="dim"))
    heads = [_align(c.name, w, c.align) for c, w in zip(table.columns, widths, strict=True)]
    lines.append(Text(_GAP.join(heads).rstrip(), style="bold"))
    lines.append(Text(_GAP.join("─" * width for width in widths), style="dim"))
    for row in _rows_and_headings(table):
        if isinstance(row, str):
            lines.append(Text(printable(row), style="bold"))
            continue
        line = Text()
        for cell, column, width in zip(row, table.columns, widths, strict=True):
            line.append(_align(cell.plain, width, column.align), style=STYLES[cell.style])
            line.append(_GAP)
        line.rstrip()
        lines.append(line)
    for line in lines:
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _text_lines(table: Table) -> Iterator[str]:
    """Headings and cells as lines of plain text."""
    widths = _widths(table)
    if any(column.group for column in table.columns):
        yield _group_line(table, widths)
    names = tuple(Cell(column.name) for column in table.columns)
    for row in (names, *_rows_and_headings(table)):
        if isinstance(row, str):
            yield printable(row)
            continue
        parts = zip(row, widths, table.columns, strict=True)
        aligned = (_align(cell.plain, width, column.align) for cell, width, column in parts)
        yield _GAP.join(aligned).rstrip()


def _rows_and_headings(table: Table) -> Iterator[tuple[Cell, ...] | str]:
    """The rows, and before those that begin a section its heading."""
    headings = dict(table.sections)
    for place, row in enumerate(table.rows):
        if place in headings:
            yield headings[place]
        yield row


def _group_line(table: Table, widths: Sequence[int]) -> str:
    """The headings of groups, each above the first of its columns."""
    parts = []
    pairs = zip(table.columns, widths, strict=True)
    for group, members in groupby(pairs, key=lambda pair: pair[0].group):
        room = [width for _, width in members]
        total = sum(room) + len(_GAP) * (len(room) - 1)
        parts.append(f"{group[:total]:<{total}}")
    return _GAP.join(parts).rstrip()


def _fitting(table: Table, width: int | None, gap: int) -> list[Table]:
    """The table without empty columns, and as narrow as it has to be; several if it must."""
    texts = [_texts(row) for row in table.rows]
    kept = [
        place
        for place, column in enumerate(table.columns)
        if not (column.priority and texts) or any(row[place].strip() for row in texts)
    ]
    table = _columns(table, kept)
    while width is not None and _total(table, gap) > width:
        priorities = [column.priority for column in table.columns]
        if not any(priorities):
            first, *others = _widths(table)
            if first + gap + max(others, default=0) > width:
                return [_stack(table)]
            return list(_blocks(table, width, gap))
        # Of several least important ones the last goes first.
        drop = len(priorities) - 1 - priorities[::-1].index(max(priorities))
        table = _columns(table, [place for place in range(len(priorities)) if place != drop])
    return [table] if table.columns else []


def _blocks(table: Table, width: int, gap: int) -> Iterator[Table]:
    """A table in parts that fit, each with the first column."""
    widths = _widths(table)
    places = list(range(1, len(widths)))
    while places:
        room = width - widths[0]
        count = 0
        for place in places:
            room -= gap + widths[place]
            if room < 0 and count:
                break
            count += 1
        yield _columns(table, [0, *places[:count]])
        places = places[count:]


def _stack(table: Table) -> Table:
    """A table with one column: under the first cell of every row the others, with their names."""
    rows: list[tuple[Cell, ...]] = []
    sections = []
    for row in _rows_and_headings(table):
        if isinstance(row, str):
            sections.append((len(rows), row))
            continue
        rows.append((row[0],))
        rows += [
            (replace(cell, text=f"  {column.name} {cell.text}"),)
            for cell, column in zip(row[1:], table.columns[1:], strict=True)
            if cell.plain
        ]
    columns = (replace(table.columns[0], align="left"),)
    return replace(table, columns=columns, rows=tuple(rows), sections=tuple(sections))


def _columns(table: Table, places: Sequence[int]) -> Table:
    """The table with these of its columns."""
    columns = tuple(table.columns[place] for place in places)
    return replace(
        table, columns=columns, rows=tuple(tuple(row[p] for p in places) for row in table.rows)
    )


def _total(table: Table, gap: int) -> int:
    widths = _widths(table)
    return sum(widths) + gap * (len(widths) - 1)


def _widths(table: Table) -> list[int]:
    """How many characters each column takes."""
    rows = [[column.name for column in table.columns], *map(_texts, table.rows)]
    return [max(map(_cell_width, cells)) for cells in zip(*rows, strict=True)]


def _texts(row: Sequence[Cell]) -> list[str]:
    return [cell.plain for cell in row]


def _cell_width(text: str) -> int:
    """How many places of a terminal a text takes; characters of East Asia take two."""
    import unicodedata

    shown = printable(text)
    if shown.isascii():
        return len(shown)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in shown)
    return len(shown) + wide - sum(unicodedata.combining(char) > 0 for char in shown)


def _align(text: str, width: int, align: str) -> str:
    """A text with spaces on the side that its column asks for."""
    shown, room = printable(text), max(width - _cell_width(text), 0)
    if align == "right":
        return " " * room + shown
    left = room // 2 if align == "center" else 0
    return " " * left + shown + " " * (room - left)


def _wrap(text: str, width: int) -> str:
    """Long lines of prose broken between words; the lines of a table fit already."""
    import textwrap

    lines = (
        textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
        if len(line) > width
        else [line]
        for line in text.split("\n")
    )
    return "\n".join("\n".join(parts) for parts in lines)


def _csv_value(cell: Cell) -> str | float | bool:
    if cell.value is None:
        return cell.plain
    return repr(cell.value) if isinstance(cell.value, float) else cell.value


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)


def _html_parts(table: Table, links: Mapping[str, str] | None) -> Iterator[str]:
    """The pieces of the HTML of a table."""
    title = escape(table.title)
    if not table.columns:
        yield f'<p class="fg-title {table.style}">{title}</p>' if title else ""
    else:
        sortable = "" if links is None else " sortable"
        yield f'<div class="fg-wide"><table class="fg{sortable}">'
        yield f'<caption class="{table.style}">{title}</caption>' if title else ""
        yield "<thead>"
        if any(column.group for column in table.columns):
            yield "<tr>"
            for group, members in groupby(table.columns, key=lambda column: column.group):
                span = len(list(members))
                yield f'<th scope="colgroup" colspan="{span}" class="group">{escape(group)}</th>'
            yield "</tr>"
        yield "<tr>"
        yield from (_html_heading(column, links) for column in table.columns)
        yield "</tr></thead><tbody>"
        for number, row in enumerate(_rows_and_headings(table)):
            if isinstance(row, str):
                heading = f'<th scope="colgroup" colspan="{len(table.columns)}">{escape(row)}</th>'
                yield "</tbody><tbody>" if number else ""
                yield f'<tr class="group">{heading}</tr>'
            else:
                cells = zip(row, table.columns, strict=True)
                parts = (_html_cell(c, column, k, links) for k, (c, column) in enumerate(cells))
                yield f"<tr>{''.join(parts)}</tr>"
        yield "</tbody></table></div>"
    if table.notes:
        yield '<ul class="fg-notes">'
        yield from (f"<li>{escape(note)}</li>" for note in table.notes)
        yield "</ul>"


def _html_heading(column: Column, links: Mapping[str, str] | None) -> str:
    """The heading of a column: in a page a button that sorts."""
    name, sort = escape(column.name), ""
    if links is not None:
        name, sort = f'<button type="button">{name}</button>', ' aria-sort="none"'
    tooltip = f' title="{escape(column.tooltip)}"' if column.tooltip else ""
    return f'<th scope="col"{sort}{_classes(column)}{tooltip}>{name}</th>'


def _html_cell(cell: Cell, column: Column, number: int, links: Mapping[str, str] | None) -> str:
    """A cell, the first of a row as its heading: with its value, tags, detail and footnotes."""
    kind = 'th scope="row"' if number == 0 else "td"
    found, full = _classes(column, cell), ""
    if cell.value is not None:
        full = repr(cell.value) if isinstance(cell.value, float) else str(cell.value)
        found += f' data-value="{escape(full)}"'
    elif links is not None and column.align == "right":
        found += ' data-sort="nan"'
    found += "".join(f' data-{name}="{escape(text)}"' for name, text in cell.place)
    text, detail = escape(cell.text), cell.detail
    tooltip = cell.tooltip or (full if isinstance(cell.value, float) else "")
    if isinstance(cell.value, float) and links is not None:
        text = f'<span class="number" title="{escape(tooltip)}">{text}</span>'
    elif tooltip:
        found += f' title="{escape(tooltip)}"'
        text += "" if links is None or number == 0 else _span("unseen", tooltip)
    if number == 0 and links is not None:
        text = text.replace("_", "_<wbr>")
        if cell.text in links:
            text = f'<a class="quiet" href="#m-{escape(cell.text)}">{text}</a>'
            detail = detail or (f"{links[cell.text]} skeleton" if links[cell.text] else "")
    tags = "".join(_span("tag warn", tag) for tag in cell.tags)
    more = _span("detail", detail) if detail else ""
    marks = "".join(
        f' <a class="footnote" href="#note-{k}" aria-label="note {k}">{k}</a>'
        for k in cell.footnotes
    )
    return f"<{kind}{found}>{text}{tags}{more}{marks}</{kind[:2]}>"


def _span(name: str, text: str) -> str:
    """Text of a class, after a space."""
    return f' <span class="{name}">{escape(text)}</span>'


def _classes(column: Column, cell: Cell | None = None) -> str:
    """The classes of a heading or a cell."""
    classes = [column.align] if column.align != "left" else []
    classes += [f"p{column.priority}"] if column.priority else []
    classes += [cell.style] if cell is not None and cell.style else []
    return f' class="{" ".join(classes)}"' if classes else ""


#: The style of tables in a notebook: no colour of its own but for marks, so that it suits a light
#: page and a dark one.
HTML_STYLE = """
.fg-tables { font-family: system-ui, sans-serif; font-size: 0.875rem; line-height: 1.4; }
.fg-wide { overflow-x: auto; margin: 0.5em 0; }
table.fg { border-collapse: collapse; border: none; font-variant-numeric: tabular-nums; }
table.fg caption, .fg-title { text-align: left; font-weight: 600; padding: 0.3em 0; margin: 0;
  caption-side: top; color: inherit; white-space: pre-line; }
table.fg tr.group th { padding-top: 0.8em; font-weight: 600; }
table.fg .detail { opacity: 0.7; }
table.fg th, table.fg td { text-align: left; padding: 0.2em 0.9em 0.2em 0; border: none;
  border-bottom: 1px solid color-mix(in srgb, currentColor 15%, transparent); font-weight: 400;
  white-space: nowrap; background: none; }
table.fg thead th { font-weight: 600; }
table.fg .right { text-align: right; }
table.fg .center { text-align: center; }
.fg-tables .good { color: #1a7f37; }
.fg-tables .warn { color: #9a6700; }
.fg-tables .bad { color: #cf222e; font-weight: 600; }
.fg-tables td.muted { opacity: 0.7; }
.fg-tables td.strong { font-weight: 600; }
.fg-notes { list-style: none; margin: 0.3em 0 0.8em; padding: 0; opacity: 0.75; max-width: 55em; }
@media (prefers-color-scheme: dark) {
  .fg-tables .good { color: #3fb950; }
  .fg-tables .warn { color: #d29922; }
  .fg-tables .bad { color: #ff7b72; }
}
"""
