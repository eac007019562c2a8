"""Results as tables: for a terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatgauge.cli.benchmarks.row import AGREEMENT, OWN, TimingRow

Cells = Callable[[TimingRow], tuple[str, ...]]

COLUMNS = (
    *("workload", "quantity", "tool", "batch", "cost / G", "spread", "/ best peer", "error"),
    *("target", "verdict"),
)

#: Of series: lines that have a setting.
SERIES_COLUMNS = (
    *("workload", "setting", "quantity", "tool", "cost / G", "spread", "/ best peer"),
    "CPU µs / sample",
)


def cells(row: TimingRow) -> tuple[str, ...]:
    """A line as text."""
    return (
        row.workload,
        row.quantity,
        row.tool,
        "" if row.batch is None else str(row.batch),
        _cost(row),
        _spread(row),
        _ratio(row),
        "" if row.error is None else f"{row.error:.0e}",
        row.target,
        row.verdict,
    )


def series_cells(row: TimingRow) -> tuple[str, ...]:
    """A line of a series as text."""
    seconds = row.sample_seconds
    return (
        row.workload,
        row.setting,
        row.quantity,
        row.tool,
        _cost(row),
        _spread(row),
        _ratio(row),
        "" if seconds is None else f"{1e6 * seconds:,.1f}",
    )


def tables(rows: Sequence[TimingRow]) -> list[tuple[tuple[str, ...], Cells, list[TimingRow]]]:
    """What is to be tabled: columns, how a line is written, and the lines; series on their own."""
    single = [row for row in rows if not row.setting]
    series = [row for row in rows if row.setting]
    both = ((COLUMNS, cells, single), (SERIES_COLUMNS, series_cells, series))
    return [entry for entry in both if entry[2]]


def markdown(rows: Sequence[TimingRow]) -> str:
    """The lines as tables in Markdown.

    Args:
        rows: The lines.

    Returns:
        One table, or two if there are series.
    """
    found = []
    for columns, written, lines in tables(rows):
        table = [columns, tuple("---" for _ in columns), *map(written, lines)]
        found.append("\n".join(f"| {' | '.join(line)} |" for line in table))
    return "\n\n".join(found)


def rich_print(rows: Sequence[TimingRow]) -> None:
    """Print the lines for a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for columns, written, lines in tables(rows):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            numbers = column not in ("workload", "quantity", "setting", "tool", "target", "verdict")
            table.add_column(column, justify="right" if numbers else "left")
        before = None
        for row in lines:
            if before not in (None, (row.workload, row.quantity, row.setting)):
                table.add_section()
            before = (row.workload, row.quantity, row.setting)
            texts = [Text(cell, "bold" if row.tool == OWN else "") for cell in written(row)]
            if row.verdict and columns is COLUMNS:
                texts[-1].stylize("red" if "missed" in row.verdict else "green")
            if row.error is not None and row.error > AGREEMENT and columns is COLUMNS:
                texts[columns.index("error")].stylize("yellow")
            table.add_row(*texts)
        console.print(table)


def _cost(row: TimingRow) -> str:
    """The cost, with its unit where that is not the column's."""
    return f"{row.cost:.2f}" if row.unit == "G" else f"{row.cost:.2f} {row.unit}"


def _spread(row: TimingRow) -> str:
    """The rounds' ends, or that there was one round."""
    if row.spread is None:
        return ""
    if row.rounds == 1:
        return "one round"
    return "–".join(f"{end:.2f}" for end in row.spread)


def _ratio(row: TimingRow) -> str:
    """The cost over that of the best peer."""
    return "" if row.to_best_peer is None else f"{row.to_best_peer:.2f}"
