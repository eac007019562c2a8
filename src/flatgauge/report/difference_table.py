"""Differences between models, pair by pair, as text and as part of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatgauge.analysis.formatting import Number, number, two_digits
from flatgauge.analysis.ranking import PAIRED, ModelDifference


def difference_cells(
    rows: Sequence[ModelDifference], order: Sequence[str]
) -> list[tuple[str, ...]]:
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


def _shown(rows: Sequence[ModelDifference]) -> list[ModelDifference]:
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


def difference_views(rows: Sequence[ModelDifference]) -> list[DifferenceView]:
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
