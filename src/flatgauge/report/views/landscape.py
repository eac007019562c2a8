"""Landscapes as text: the caption, the loss at each model, and the ends of what was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatgauge.report.tables import Cell, Column, Table, number_cell

if TYPE_CHECKING:
    from flatgauge.analysis.landscapes.result import DrawnLandscapes


def landscape_tables(drawn: DrawnLandscapes) -> list[Table]:
    """A row per landscape, under the caption; one alone has no name."""
    columns = (
        Column(""),
        Column("loss at the model", "right"),
        Column("lowest", "right"),
        Column("highest", "right"),
    )
    rows = []
    for name, one in drawn.by_name().items():
        seen = one.loss if one.beyond.all() else one.loss[~one.beyond]
        here = one.centre
        middle = Cell("not on the grid") if here is None else number_cell(here, f"{here:.4g}")
        ends = [number_cell(float(end), f"{end:.4g}") for end in (seen.min(), seen.max())]
        rows.append((Cell(name), middle, *ends))
    notes = tuple(f"note: {note}" for note in drawn.notes)
    return [Table(drawn.caption), Table("", columns, tuple(rows), notes=notes)]
