"""Tables on a terminal, readable at every width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flatgauge.analysis.formatting import printable

if TYPE_CHECKING:
    from rich.console import Console

Rows = Sequence[tuple[str, ...]]


def print_lines(console: Console, lines: Sequence[str], *, style: str = "") -> None:
    """Print text as it is, wrapped at words.

    Args:
        console: Where to.
        lines: The text.
        style: How, in the words of rich.
    """
    for line in lines:
        console.print(printable(line), style=style, highlight=False, markup=False)


def print_table(
    console: Console,
    rows: Rows,
    *narrower: Rows,
    colour: Callable[[str], str] = lambda cell: "",
) -> None:
    """Print the first of several tables that fits the terminal.

    Args:
        console: Where to.
        rows: The table, names of columns first.
        *narrower: The same in fewer columns.
        colour: The style of a cell, "" for none.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    tables = [[tuple(map(printable, row)) for row in cells] for cells in (rows, *narrower)]
    for cells in tables:
        if _width(cells) <= console.width:
            names, *body = cells
            table = Table(
                box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False
            )
            for name in names:
                table.add_column(Text(name), no_wrap=True)
            for row in body:
                table.add_row(*(Text(cell, style=colour(cell)) for cell in row))
            console.print(table)
            return
    _print_stacked(console, tables[-1], colour)


def _width(rows: Rows) -> int:
    """What a table takes, with two spaces between columns and one at either edge."""
    from rich.cells import cell_len

    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return sum(widths) + 2 * len(widths)


def _print_stacked(console: Console, rows: Rows, colour: Callable[[str], str]) -> None:
    """Print a table that fits nowhere: every row on lines of its own, under its first cell."""
    from rich.padding import Padding
    from rich.text import Text

    names, *body = rows
    for row in body:
        if row[0]:
            console.print(Text(row[0], style="bold"))
        line = Text()
        for name, cell in zip(names[1:], row[1:], strict=True):
            if cell:
                line.append(f"{name} ", style="dim").append(cell, style=colour(cell)).append("  ")
        console.print(Padding(line, (0, 0, 0, 2)))
    console.print()
