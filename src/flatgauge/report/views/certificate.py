"""The tables of a certificate: what transforms did to the function, and to every measure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flatgauge.report.tables import Cell, Column, Table, number_cell
from flatgauge.report.views.report import json_place
from flatgauge.symmetry.transforms import TRANSFORM_GROUPS

if TYPE_CHECKING:
    from flatgauge.analysis.certificate import Certificate, CertificateRow, GroupCheck

#: What the verdicts mean, and the style and mark of their cells.
VERDICTS = {
    "holds": ("claimed and true", "good", "✓ "),
    "FAILS": ("claimed and not true", "bad", "✗ "),
    "moves": ("not claimed, and it moves", "", ""),
    "still": ("not claimed, and it did not move", "muted", ""),
    "unproven": ("claimed, but too noisy to tell", "muted", "? "),
    "unmeasured": ("could not be measured", "muted", ""),
}

#: How to read the changes.
LEGEND = (
    "largest relative change under powers of two / under arbitrary factors; 0: not one bit",
    "✓ claimed and true (a random estimate to its own error), ✗ claimed and not true, "
    "? claimed but too noisy to tell, no mark: not claimed",
    "worst case: the most extreme value reached without changing any output",
)


def certificate_tables(certificate: Certificate) -> list[Table]:
    """What was tried, what it did to the function and to the measures, and the verdict."""
    changes = change_table(certificate)
    holders: dict[str, dict[str, None]] = {}
    for row in certificate.rows:
        if row.verdict == "unmeasured":
            holders.setdefault(row.note, {})[row.measure] = None
    notes = [*LEGEND, *changes.notes]
    notes += [f"{', '.join(names)}: {note}" for note, names in holders.items()]
    notes += [
        f"{row.measure} under {row.group}: {row.note}"
        for row in certificate.rows
        if row.note and row.verdict not in ("absent", "unmeasured")
    ]
    notes += [f"pinned: {pin}" for pin in certificate.pinned]
    notes += [f"note: {note}" for note in certificate.notes]
    word, style = ("passed", "good") if certificate.passed else ("FAILED", "bad")
    return [
        replace(group_table(certificate), title=heading(certificate), style=""),
        replace(changes, notes=tuple(notes)),
        Table(f"{word}: {certificate.verdict}", style=style),
    ]


def heading(certificate: Certificate) -> str:
    """What was certified, in a line."""
    return (
        f"{certificate.model}: {certificate.scales:,} independent scales, {certificate.samples:,} "
        f"samples, {certificate.dtype}, {certificate.trials} "
        f"move{'s' if certificate.trials > 1 else ''} of each kind"
    )


def group_table(certificate: Certificate) -> Table:
    """What the transforms of every group did to the function itself."""
    columns = (
        Column("group"),
        Column("moves", "right", 3),
        Column("outputs, powers of two"),
        Column("outputs, other moves", priority=1),
        Column("loss", priority=2),
        Column("ReLU signs flipped", priority=3),
        Column("function"),
    )
    return Table("", columns, tuple(map(_group_row, certificate.kept)))


def _group_row(kept: GroupCheck) -> tuple[Cell, ...]:
    """What a group did to the function, cell by cell."""
    held = Cell("the same" if kept.held else "✗ NOT the same", style="" if kept.held else "bad")
    if not TRANSFORM_GROUPS[kept.group].preserves_outputs:
        held = Cell("outputs are meant to change", style="muted")
    return (
        Cell(kept.group),
        Cell(str(kept.moves), kept.moves),
        _size_cell(kept.outputs),
        _size_cell(kept.outputs_any),
        _size_cell(kept.loss),
        Cell(f"{kept.flipped:,} of {kept.signs:,}" if kept.signs else ""),
        held,
    )


def _size_cell(change: float | None) -> Cell:
    """A relative change of outputs or loss."""
    if change is None:
        return Cell("")
    return Cell("not by one bit" if change == 0 else _size(change), tooltip=f"{change!r}")


def change_table(certificate: Certificate, model: str = "") -> Table:
    """A row per measure, a column per group that the model has; why others were not tried."""
    groups = dict.fromkeys(row.group for row in certificate.rows if row.verdict != "absent")
    columns = (
        Column("measure"),
        Column("value", "right"),
        *(Column(group) for group in groups),
        Column("worst case", "right", 1, "the most extreme value without a change of any output"),
    )
    rows = []
    for measure in dict.fromkeys(row.measure for row in certificate.rows):
        found = {row.group: row for row in certificate.rows if row.measure == measure}
        value = next(iter(found.values())).before
        cells = (_change_cell(found[group]) if group in found else Cell("") for group in groups)
        worst = certificate.worst_case(measure)
        rows.append(
            (
                Cell(measure),
                number_cell(value, place=json_place(model, measure, "before")),
                *cells,
                Cell("") if worst is None else Cell(f"{worst:.3g}", worst),
            )
        )
    absent = {row.group: row.note for row in certificate.rows if row.verdict == "absent"}
    notes = tuple(f"{group}: not tried, as {note}" for group, note in absent.items())
    return Table("", columns, tuple(rows), notes)


def _change_cell(row: CertificateRow) -> Cell:
    """How far a measure moved under a group, and whether it may."""
    if row.verdict == "absent":
        return Cell("")
    meaning, style, mark = VERDICTS[row.verdict]
    if row.after is not None and row.verdict in ("moves", "FAILS"):
        meaning += f": from {row.before:.6g} to {row.after:.6g}"
    if row.note:
        meaning += f" ({row.note})"
    text = "could not be measured" if row.verdict == "FAILS" else "—"
    if row.change is not None:
        text = mark + _size(row.change)
        text += "" if row.change_any is None else f" / {_size(row.change_any)}"
    return Cell(text, style=style, tooltip=meaning)


def _size(change: float) -> str:
    """A relative change: 0 where not one bit changed."""
    return "0" if change == 0 else f"{change:.0e}"
