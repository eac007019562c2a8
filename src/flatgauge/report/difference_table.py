"""Differences between models, pair by pair, as rows, text and part of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from flatgauge.report.mismatches import uneven_options
from flatgauge.report.number import Number, number
from flatgauge.report.pairs import LEVEL, PAIRED, DataError, Difference, Pairs, difference
from flatgauge.report.ranks import rounding_of
from flatgauge.report.report import Report
from flatgauge.report.table import two_digits


@dataclass(frozen=True)
class DifferenceRow:
    """Two models by one measure.

    Attributes:
        measure: Its name.
        first: One model.
        second: The other.
        found: The first's value minus the second's.
        error: From the choice of samples; None if it is not known.
    """

    measure: str
    first: str
    second: str
    found: Difference
    error: DataError | None

    @property
    def flatter(self) -> str | None:
        """The model that is flatter, None where that cannot be told."""
        return {-1: self.first, 0: None, 1: self.second}[self.found.sign]

    def to_dict(self) -> dict[str, Any]:
        """The row as plain numbers and strings."""
        found, error = self.found, self.error
        return {
            "measure": self.measure,
            "first": self.first,
            "second": self.second,
            "difference": found.value,
            "stderr": found.stderr,
            "low": found.low,
            "high": found.high,
            "p": found.p,
            "kind": found.kind,
            "flatter": self.flatter,
            "data_stderr": None if error is None else error.stderr,
            "samples": None if error is None else error.samples,
        }


def difference_rows(
    reports: Mapping[str, Report], pairs: Pairs, *, level: float = LEVEL
) -> list[DifferenceRow]:
    """Subtract every two models, measure by measure.

    Args:
        reports: By name of the model.
        pairs: How far other samples would move the differences.
        level: How surely the intervals are to hold the differences.

    Returns:
        The rows; none of measures that failed, or were taken with different settings.

    Raises:
        ValueError: If the level is no probability.
    """
    if not 0 < level < 1:
        raise ValueError(f"`level={level!r}` must lie between 0 and 1, such as 0.95.")
    uneven = uneven_options(reports)
    rounding = max(rounding_of(report.facts.dtype) for report in reports.values())
    names = dict.fromkeys(name for report in reports.values() for name in report)
    rows = []
    for measure in (name for name in names if name not in uneven):
        for first, second in combinations(reports, 2):
            one, other = (reports[model].get(measure) for model in (first, second))
            if one is None or other is None or math.isnan(one.value - other.value):
                continue
            error = pairs.get(measure, {}).get((first, second))
            found = difference(one, other, error, level=level, rounding=rounding)
            rows.append(DifferenceRow(measure, first, second, found, error))
    return rows


def read_pairs(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[tuple[str, str], DataError]]:
    """The errors of differences from the rows that they were written as.

    Args:
        rows: As `DifferenceRow.to_dict` makes them.

    Returns:
        By measure, then by the names of two models.
    """
    found: dict[str, dict[tuple[str, str], DataError]] = {}
    for row in rows:
        if row["data_stderr"] is not None:
            error = DataError(float(row["data_stderr"]), row["samples"], row["kind"] == PAIRED)
            found.setdefault(row["measure"], {})[row["first"], row["second"]] = error
    return found


def difference_cells(rows: Sequence[DifferenceRow], order: Sequence[str]) -> list[tuple[str, ...]]:
    """The table of paired differences as text: of two models all, of more those to the flattest.

    Args:
        rows: All differences.
        order: The measures in the order of the table.

    Returns:
        The cells, row by row; none where nothing is paired.
    """
    cells = [
        (
            name if place == 0 else "",
            f"{row.first} − {row.second}",
            f"{row.found.value:.4g}",
            f"{row.found.low:.4g} to {row.found.high:.4g}",
            p_text(row.found.p),
            f"{row.flatter} is flatter" if row.flatter else "not told apart",
        )
        for name in order
        for place, row in enumerate(_shown([row for row in rows if row.measure == name]))
    ]
    head = ("measure", "difference", "value", "95 % interval", "p", "on samples like these")
    return [head, *cells] if cells else []


def _shown(rows: Sequence[DifferenceRow]) -> list[DifferenceRow]:
    """The paired ones, of more than two models those with the flattest."""
    paired = [row for row in rows if row.found.kind == PAIRED]
    if len(paired) < 2:
        return paired
    # Of all sums of differences to the others, the flattest has the least.
    totals: dict[str, float] = {}
    for row in paired:
        totals[row.first] = totals.get(row.first, 0.0) + row.found.value
        totals[row.second] = totals.get(row.second, 0.0) - row.found.value
    flattest = min(totals, key=lambda model: totals[model])
    return [row for row in paired if flattest in (row.first, row.second)]


def p_text(p: float | None) -> str:
    """A probability for a table.

    Args:
        p: The probability, None if it is not known.

    Returns:
        Two digits, or a bound.

    Example:
        >>> p_text(0.0312), p_text(1e-9), p_text(None)
        ('0.031', '< 0.0001', '')
    """
    if p is None:
        return ""
    return "< 0.0001" if p < 1e-4 else two_digits(p)


@dataclass(frozen=True)
class DifferenceView:
    """A row for a page.

    Attributes:
        measure: Its name.
        models: Which two.
        cells: Difference, and both ends of its interval.
        p: The probability, as text.
        verdict: Which is flatter.
    """

    measure: str
    models: str
    cells: dict[str, Number]
    p: str
    verdict: str


def difference_views(rows: Sequence[DifferenceRow]) -> list[DifferenceView]:
    """All paired differences, for a template.

    Args:
        rows: All differences.

    Returns:
        Those whose samples are paired.
    """
    return [
        DifferenceView(
            row.measure,
            f"{row.first} − {row.second}",
            {
                "difference": number(row.found.value, f"{row.found.value:.4g}"),
                "low": number(row.found.low, f"{row.found.low:.4g}"),
                "high": number(row.found.high, f"{row.found.high:.4g}"),
            },
            p_text(row.found.p),
            f"{row.flatter} is flatter" if row.flatter else "not told apart",
        )
        for row in rows
        if row.found.kind == PAIRED
    ]
