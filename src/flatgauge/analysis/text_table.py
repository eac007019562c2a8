"""Tables of estimates as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flatgauge.estimators.estimate import Estimate
from flatgauge.measures import registry

if TYPE_CHECKING:
    from flatgauge.analysis.measurement import RunInfo

#: Options that are always shown: a value means nothing without them.
ALWAYS_SHOWN = ("epsilon", "rho", "sigma", "lam", "skeleton")

#: Said below what holds only part of what was asked for.
UNFINISHED = "interrupted: not everything that was asked for is here"

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


def kind(estimate: Estimate) -> str:
    """How a number came about, in a word or two."""
    if math.isnan(estimate.value):
        return "failed"
    if not estimate.converged:
        return "not converged"
    if estimate.lower_bound:
        return "lower bound"
    if estimate.exact:
        return "exact"
    return "estimated" if estimate.stderr > 0 else "computed"


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


def two_digits(number: float) -> str:
    """Write a number to two digits.

    Args:
        number: The number.

    Returns:
        The text.

    Example:
        >>> two_digits(94.3), two_digits(0.0213), two_digits(12345.0)
        ('94', '0.021', '12000')
    """
    return f"{float(f'{number:.2g}'):g}"


def duration(seconds: float) -> str:
    """Write a time for people.

    Args:
        seconds: The time.

    Returns:
        The time with its unit.

    Example:
        >>> duration(0.0123), duration(4.2), duration(480)
        ('12 ms', '4.2 s', '8.0 min')
    """
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def plain_table(estimates: Mapping[str, Estimate]) -> str:
    """A table without colour or frame, with the notes of every estimate below it.

    Args:
        estimates: By name of the measure.

    Returns:
        The text.
    """
    return "\n".join([*align_columns([COLUMNS, *rows(estimates)]), *joined_notes(estimates)])


def joined_notes(estimates: Mapping[str, Estimate]) -> list[str]:
    """The notes of all estimates, each told once with the measures it holds for."""
    holders: dict[str, list[str]] = {}
    for name, item in estimates.items():
        for note in item.notes:
            holders.setdefault(note, []).append(name)
    return [f"{', '.join(names)}: {note}" for note, names in holders.items()]


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
