"""All numbers of a page, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatgauge.analysis.formatting import Number, data_error_of, duration, kind, number, value_of
from flatgauge.analysis.measurement import Report
from flatgauge.analysis.text_table import shown_options
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures import registry

if TYPE_CHECKING:
    from flatgauge.report.sections import Caveats


@dataclass(frozen=True)
class NumberRow:
    """One measure of one model.

    Attributes:
        measure: Its name.
        symbol: How papers write it.
        value: The value, with its error.
        data_error: The error from the choice of samples, None where it is not known.
        mark: How it came about.
        options: Radius, noise, skeleton, and settings that are not the defaults.
        products: Matrix-vector products spent.
        seconds: Wall-clock time.
        footnotes: Numbers of the notes on it.
    """

    measure: str
    symbol: str
    value: Number
    data_error: Number | None
    mark: str
    options: list[str]
    products: int
    seconds: Number
    footnotes: list[int]


@dataclass(frozen=True)
class NumberTables:
    """All numbers.

    Attributes:
        models: The rows of every model.
        measures: The names of all measures, for a table of all models; empty for one model.
        cells: The rows again, by measure and model.
    """

    models: dict[str, list[NumberRow]]
    measures: list[str]
    cells: dict[str, dict[str, NumberRow]]


def number_tables(reports: Mapping[str, Report], caveats: Caveats) -> NumberTables:
    """Prepare all numbers.

    Args:
        reports: By name of the model.
        caveats: The notes that rows refer to.

    Returns:
        The tables.
    """
    models = {
        model: [_row(name, estimate, caveats) for name, estimate in report.items()]
        for model, report in reports.items()
    }
    cells: dict[str, dict[str, NumberRow]] = {}
    for model, rows in models.items():
        for row in rows:
            cells.setdefault(row.measure, {})[model] = row
    return NumberTables(models, list(cells) if len(models) > 1 else [], cells)


def _row(name: str, estimate: Estimate, caveats: Caveats) -> NumberRow:
    return NumberRow(
        measure=name,
        symbol=registry[name].symbol if name in registry else "",
        value=value_of(estimate),
        data_error=data_error_of(estimate),
        mark=kind(estimate),
        options=shown_options(name, estimate),
        products=estimate.matvecs,
        seconds=number(estimate.seconds, duration(estimate.seconds)),
        footnotes=sorted({caveats.number_of(note) for note in estimate.notes}),
    )
