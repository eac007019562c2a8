"""The tables of reports: every number with its errors, how it came about, and what it cost.

One report gives one table (`report_tables`). A page shows several reports, each with footnotes in
place of notes (`estimate_table`), and all values next to each other (`values_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flatgauge.analysis.formatting import kind, two_digits
from flatgauge.analysis.result import UNFINISHED
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures import registry
from flatgauge.report.tables import Cell, Column, Table, number_cell
from flatgauge.runtime.resources import duration

if TYPE_CHECKING:
    from flatgauge.analysis.measurement import Report

#: Options that are always shown: a value means nothing without them.
ALWAYS_SHOWN = ("epsilon", "rho", "sigma", "lam", "skeleton")

#: Of the kinds of numbers.
_STYLES = {"exact": "good", "failed": "bad", "not converged": "bad"}


def report_tables(report: Report) -> list[Table]:
    """The numbers of a report under the facts of its run, with the notes below."""
    holders: dict[str, list[str]] = {}
    for name, estimate in report.items():
        for note in estimate.notes:
            holders.setdefault(note, []).append(name)
    notes = [f"{', '.join(names)}: {note}" for note, names in holders.items()]
    notes += [] if report.complete else [UNFINISHED]
    table = estimate_table(report)
    return [replace(table, title=str(report.facts), notes=tuple(notes), style="")]


def estimate_table(
    report: Report, model: str = "", footnote: Callable[[str], int] | None = None
) -> Table:
    """The numbers of a report.

    Args:
        report: The report.
        model: What the model is called in the JSON of a page.
        footnote: The number of a note in a page, which has the notes elsewhere.

    Returns:
        The table, without title and notes.
    """
    columns = (
        Column("measure"),
        Column("value", "right"),
        Column("data error", "right", 2, "from the choice of samples"),
        Column("kind", priority=1, tooltip="how the number came about"),
        Column("products", "right", 3, "Hessian products"),
        Column("time", "right", 2),
        *([] if footnote is None else [Column("notes")]),
    )
    rows = []
    for name, estimate in report.items():

        def place(field: str, name: str = name) -> tuple[tuple[str, str], ...]:
            return json_place(model, name, field)

        row = [
            measure_cell(name, estimate),
            value_cell(estimate, place("value")),
            data_error_cell(estimate, place("data_stderr")),
            Cell(kind(estimate), style=_STYLES.get(kind(estimate), "")),
            Cell(str(estimate.matvecs or ""), estimate.matvecs, place=place("matvecs")),
            number_cell(estimate.seconds, duration(estimate.seconds), place=place("seconds")),
        ]
        if footnote is not None:
            row.append(Cell("", footnotes=tuple(sorted(set(map(footnote, estimate.notes))))))
        rows.append(tuple(row))
    return Table("", columns, tuple(rows))


def values_table(reports: Mapping[str, Report]) -> Table:
    """Every value of every model, with how it came about and the options it needs."""
    rows = []
    for name in dict.fromkeys(name for report in reports.values() for name in report):
        row = [measure_cell(name)]
        for model, report in reports.items():
            estimate = report.estimates.get(name)
            if estimate is None:
                row.append(Cell("—"))
            else:
                detail = ", ".join([kind(estimate), *shown_options(name, estimate)])
                place = json_place(model, name, "value")
                row.append(value_cell(estimate, place, detail=detail))
        rows.append(tuple(row))
    columns = (Column("measure"), *(Column(model, "right") for model in reports))
    return Table("", columns, tuple(rows))


def measure_cell(name: str, estimate: Estimate | None = None) -> Cell:
    """A measure's name, with its radius, noise or skeleton and settings that are not defaults."""
    options = [] if estimate is None else shown_options(name, estimate)
    symbol = registry[name].symbol if name in registry else ""
    return Cell(name, tooltip=symbol, detail=", ".join(options))


def value_cell(estimate: Estimate, place: tuple[tuple[str, str], ...] = (), **shown: str) -> Cell:
    """The value of an estimate, written with its error."""
    return number_cell(estimate.value, str(estimate), place=place, **shown)


def data_error_cell(estimate: Estimate, place: tuple[tuple[str, str], ...] = ()) -> Cell:
    """The error from the choice of samples, where it is known."""
    error = estimate.data_stderr
    return Cell("") if error is None else number_cell(error, f"± {two_digits(error)}", place=place)


def shown_options(name: str, estimate: Estimate) -> list[str]:
    """A measure's radius, noise or skeleton, and its settings that are not its defaults."""
    defaults = registry[name].options if name in registry else {}
    return [
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in estimate.options.items()
        if key in ALWAYS_SHOWN or (key in defaults and value != defaults[key])
    ]


def json_place(model: str, measure: str, field: str) -> tuple[tuple[str, str], ...]:
    """Where a number stands in the JSON of a page."""
    return (("model", model), ("measure", measure), ("field", field))
