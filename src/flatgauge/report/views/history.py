"""The history of a training run as a table, a row per measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatgauge.report.tables import Cell, Column, Table, number_cell
from flatgauge.runtime.resources import duration

if TYPE_CHECKING:
    from flatgauge.analysis.monitor.history import History


def history_tables(history: History) -> list[Table]:
    """Step, epoch, loss and every measure of each row; the other columns go first."""
    columns = (
        Column("step", "right"),
        Column("epoch", "right", 1),
        Column("loss", "right"),
        Column("‖gradient‖", "right", 2),
        *(Column(name, "right") for name in history.measures),
        Column("took", "right", 3),
    )
    rows = []
    for row in history:
        found = [row.estimates.get(name) for name in history.measures]
        rows.append(
            (
                number_cell(row.step),
                number_cell(row.epoch),
                number_cell(row.loss, f"{row.loss:.4g}"),
                number_cell(row.gradient_norm, f"{row.gradient_norm:.3g}"),
                *(Cell(row.status) if e is None else number_cell(e.value, str(e)) for e in found),
                Cell(duration(row.cost)),
            )
        )
    skipped = f"{history.skipped} more were due, and skipped to keep to the share of time"
    return [Table("", columns, tuple(rows), notes=(skipped,) if history.skipped else ())]
