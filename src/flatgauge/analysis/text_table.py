"""Tables of estimates as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flatgauge.analysis.formatting import duration, joined_notes, kind, two_digits
from flatgauge.analysis.result import UNFINISHED
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures import registry

if TYPE_CHECKING:
    from flatgauge.analysis.measurement import RunInfo

#: Options that are always shown: a value means nothing without them.
ALWAYS_SHOWN = ("epsilon", "rho", "sigma", "lam", "skeleton")

#: The columns of a table of estimates.
COLUMNS = ("measure", "value", "data error", "kind", "products", "time")

#: What is shown of it on narrower terminals.
_NARROWER = (("measure", "value", "data error", "kind", "time"), ("measure", "value", "kind"))

#: Of the kinds of numbers on a terminal.
_COLOURS = {"exact": "green", "failed": "bold red", "not converged": "yellow"}


def header(facts: RunInfo) -> str:
    """What was measured, in a few lines.

    Args:
        facts: The facts of the run.

    Returns:
        The lines, caveats last.
    """
    lines = [
        f"{facts.model}: {facts.parameters:,} parameters, {facts.samples:,} samples, "
        f"{facts.dtype} on {facts.device}",
        f"loss ({facts.loss_name}) {facts.loss:.6g}, ‖gradient‖ {facts.gradient_norm:.3g}",
    ]
    if facts.sweep:
        lines.append(f"sweeps that measures of blocks share: {facts.sweep}")
    return "\n".join([*lines, *(f"note: {note}" for note in facts.notes)])


def rows(estimates: Mapping[str, Estimate]) -> list[tuple[str, ...]]:
    """The cells of a table of estimates, row by row."""
    return [
        (
            label_with_options(name, item),
            str(item),
            "" if item.data_stderr is None else f"± {two_digits(item.data_stderr)}",
            kind(item),
            str(item.matvecs or ""),
            duration(item.seconds),
        )
        for name, item in estimates.items()
    ]


def label_with_options(name: str, estimate: Estimate) -> str:
    """A measure's name with its radius, noise or skeleton, and settings that are not defaults."""
    changed = shown_options(name, estimate)
    return f"{name} ({', '.join(changed)})" if changed else name


def shown_options(name: str, estimate: Estimate) -> list[str]:
    """A measure's radius, noise or skeleton, and its settings that are not its defaults."""
    defaults = registry[name].options if name in registry else {}
    return [
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in estimate.options.items()
        if key in ALWAYS_SHOWN or (key in defaults and value != defaults[key])
    ]


def plain_table(estimates: Mapping[str, Estimate]) -> str:
    """A table without colour or frame, with the notes of every estimate below it.

    Args:
        estimates: By name of the measure.

    Returns:
        The text.
    """
    return "\n".join([*align_columns([COLUMNS, *rows(estimates)]), *joined_notes(estimates)])


def align_columns(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines in which the columns of a table stand under each other.

    Args:
        cells: Row by row.

    Returns:
        One line per row.
    """
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def rich_print(facts: RunInfo, estimates: Mapping[str, Estimate], *, complete: bool = True) -> None:
    """Print a report on a terminal, with colour where it has any.

    Args:
        facts: The facts of the run.
        estimates: By name of the measure.
        complete: Whether all that was asked for is there.
    """
    from rich.console import Console

    from flatgauge.report.terminal import print_lines, print_table

    console = Console()
    print_lines(console, header(facts).splitlines())
    table = [COLUMNS, *rows(estimates)]
    # Empty columns are left out, then what is least looked at.
    kept = [i for i in range(len(COLUMNS)) if i < 2 or any(row[i] for row in table[1:])]
    narrower = [[i for i in kept if COLUMNS[i] in names] for names in _NARROWER]
    full, *others = [[tuple(row[i] for i in way) for row in table] for way in (kept, *narrower)]
    print_table(console, full, *others, colour=lambda cell: _COLOURS.get(cell, ""))
    print_lines(console, joined_notes(estimates), style="dim")
    if not complete:
        print_lines(console, [UNFINISHED], style="bold")
