"""A certificate as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatgauge.analysis.text_table import align_columns
from flatgauge.symmetry.transforms import TRANSFORM_GROUPS

if TYPE_CHECKING:
    from flatgauge.analysis.certificate import Certificate, CertificateRow

#: Of the marks on a terminal.
_COLOURS = {"✓": "green", "✗": "bold red"}


def certificate_text(certificate: Certificate) -> str:
    """A certificate in a few lines and a table.

    Args:
        certificate: The certificate.

    Returns:
        The text.
    """
    parts = [heading(certificate), align_columns(cells(certificate)), tail(certificate)]
    return "\n\n".join("\n".join(part) for part in parts)


def heading(certificate: Certificate) -> list[str]:
    """What was certified, and what the moves did to the function."""
    lines = [
        f"{certificate.model}: {certificate.scales:,} independent scales, {certificate.samples:,} "
        f"samples, {certificate.dtype}, {certificate.trials} "
        f"move{'s' if certificate.trials > 1 else ''} of each kind"
    ]
    for kept in certificate.kept:
        if TRANSFORM_GROUPS[kept.group].preserves_outputs:
            parts = []
            if kept.outputs is not None:
                parts.append(f"powers of two changed outputs by {size_text(kept.outputs)}")
            if kept.outputs_any is not None:
                parts.append(f"other moves by {size_text(kept.outputs_any)}")
            parts.append(f"the loss by {size_text(kept.loss)} at most")
            if kept.flipped:
                parts.append(f"{kept.flipped:,} of {kept.signs:,} ReLU signs flipped")
            mark = "" if kept.held else "  ✗ the function is not the same"
            lines.append(f"{kept.group}: {', '.join(parts)}{mark}")
    return lines


def cells(certificate: Certificate) -> list[tuple[str, ...]]:
    """The table: a row per measure, a column per group that the model has."""
    found = dict.fromkeys(row.group for row in certificate.rows if row.verdict != "absent")
    measures = dict.fromkeys(row.measure for row in certificate.rows)
    table: list[tuple[str, ...]] = [("measure", "value", *found, "worst case")]
    for measure in measures:
        rows = {row.group: row for row in certificate.rows if row.measure == measure}
        value = next(iter(rows.values())).before
        table.append(
            (
                measure,
                f"{value:.6g}",
                *(change_text(rows[group]) for group in found),
                _furthest(
                    [r for r in rows.values() if TRANSFORM_GROUPS[r.group].preserves_outputs]
                ),
            )
        )
    return table


def listed(certificate: Certificate) -> list[tuple[str, ...]]:
    """The table for narrow terminals: a row per measure and group."""
    table: list[tuple[str, ...]] = [("measure", "group", "change", "value")]
    last = ""
    for row in certificate.rows:
        if row.verdict != "absent":
            moved = row.verdict in ("moves", "FAILS") and row.after is not None
            value = f"{row.before:.4g} → {row.after:.3g}" if moved else f"{row.before:.6g}"
            table.append(
                (row.measure if row.measure != last else "", row.group, change_text(row), value)
            )
            last = row.measure
    return table


def tail(certificate: Certificate) -> list[str]:
    """How to read the table, what is missing, what is pinned, and the verdict."""
    lines = [
        "largest relative change under powers of two / under arbitrary factors; 0: not one bit",
        "✓ claimed and true (a random estimate to its own error), ✗ claimed and not true,",
        "? claimed but too noisy to tell, without a mark: not claimed; worst case: the most",
        "extreme value reached without changing any output",
    ]
    absent = {row.group: row.note for row in certificate.rows if row.verdict == "absent"}
    lines += [f"{group}: not tried, as {note}" for group, note in absent.items()]
    unmeasured: dict[str, dict[str, None]] = {}
    for row in certificate.rows:
        if row.verdict == "unmeasured":
            unmeasured.setdefault(row.note, {})[row.measure] = None
    lines += [f"{', '.join(names)}: {note}" for note, names in unmeasured.items()]
    silent = ("absent", "unmeasured")
    told = [row for row in certificate.rows if row.note and row.verdict not in silent]
    lines += [f"{row.measure} under {row.group}: {row.note}" for row in told]
    lines += [f"pinned: {pin}" for pin in certificate.pinned]
    lines += [f"note: {note}" for note in certificate.notes]
    tried = ("holds", "FAILS")
    claims = [row for row in certificate.rows if row.claimed and row.verdict in tried]
    broken = [kept.group for kept in certificate.kept if not kept.held]
    if broken:
        lines.append(f"FAILED: outputs changed under {', '.join(broken)}")
    if certificate.failures:
        names = ", ".join(f"{row.measure} under {row.group}" for row in certificate.failures)
        count = len(certificate.failures)
        lines.append(f"FAILED: {count} of {len(claims)} claims do not hold: {names}")
    if certificate.passed:
        held = f"all {len(claims)} claims hold" if claims else "there was no claim to be tried"
        lines.append(f"passed: {held}")
    return lines


def change_text(row: CertificateRow) -> str:
    """How far a measure moved under a group, and whether it may."""
    if row.change is None:
        return "could not be measured" if row.verdict == "FAILS" else ""
    marks = {"holds": "✓ ", "FAILS": "✗ ", "unproven": "? "}
    change = size_text(row.change)
    if row.change_any is not None:
        change += f" / {size_text(row.change_any)}"
    return marks.get(row.verdict, "") + change


def _furthest(rows: list[CertificateRow]) -> str:
    """The value that moves which change no output took an unprotected measure to."""
    moved = [row.after for row in rows if row.verdict in ("moves", "FAILS")]
    found = [value for value in moved if value is not None]
    return f"{max(found, key=abs):.3g}" if found else ""


def size_text(change: float) -> str:
    """A relative change: 0 where not one bit changed."""
    return "0" if change == 0 else f"{change:.0e}"


def rich_print(certificate: Certificate) -> None:
    """Print a certificate on a terminal, with colour where it has any.

    Args:
        certificate: The certificate.
    """
    from rich.console import Console

    from flatgauge.report.terminal import print_lines, print_table

    console = Console()
    print_lines(console, heading(certificate))
    print_table(
        console,
        cells(certificate),
        listed(certificate),
        colour=lambda cell: _COLOURS.get(cell[:1], ""),
    )
    *lines, verdict = tail(certificate)
    print_lines(console, lines, style="dim")
    print_lines(console, [verdict], style="bold green" if certificate.passed else "bold red")
