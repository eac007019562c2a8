"""The tables of a comparison: the models, their ranks by every measure, and their differences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from flatgauge.analysis.formatting import kind, two_digits
from flatgauge.analysis.ranking import INVARIANCE_CLASSES, PAIRED, by_invariance_class
from flatgauge.analysis.result import UNFINISHED
from flatgauge.report.tables import Cell, Column, Table, number_cell
from flatgauge.report.views.report import json_place, measure_cell, value_cell

if TYPE_CHECKING:
    from flatgauge.analysis.comparison import Comparison
    from flatgauge.analysis.ranking import MeasureRanking, ModelDifference

#: How to read ranks.
LEGEND = "(1) is flattest; (1=) shares its rank with values that cannot be told apart from it"


def comparison_tables(comparison: Comparison) -> list[Table]:
    """The models, their ranks, paired differences, what to know, and the verdict."""
    ranks, differences = ranking_table(comparison), difference_table(comparison)
    notes = tuple(_notes(comparison))
    return [
        models_table(comparison),
        *([replace(ranks, notes=(LEGEND,))] if ranks.rows else []),
        *([differences] if differences.rows else []),
        *([Table("", notes=notes)] if notes else []),
        Table(comparison.verdict),
    ]


def models_table(comparison: Comparison) -> Table:
    """Every model with its size and fit, under what the runs have in common."""
    facts = {name: report.facts for name, report in comparison.items()}
    shared = [
        " / ".join(dict.fromkeys(f"{fact.samples:,}" for fact in facts.values())) + " samples",
        "loss " + " / ".join(dict.fromkeys(fact.loss_name for fact in facts.values())),
        " / ".join(dict.fromkeys(fact.dtype for fact in facts.values())),
        "seed " + " / ".join(dict.fromkeys(str(fact.seed) for fact in facts.values())),
    ]
    columns = (
        Column("model"),
        Column("class", priority=2),
        Column("parameters", "right", 1),
        Column("loss", "right"),
        Column("‖gradient‖", "right", 1),
    )
    rows = tuple(
        (
            Cell(name),
            Cell(fact.model),
            Cell(f"{fact.parameters:,}", fact.parameters),
            number_cell(fact.loss),
            number_cell(fact.gradient_norm, f"{fact.gradient_norm:.3g}"),
        )
        for name, fact in facts.items()
    )
    title = f"{len(facts)} model{'s' if len(facts) != 1 else ''}: {', '.join(shared)}"
    return Table(title, columns, rows, style="")


def ranking_table(comparison: Comparison) -> Table:
    """Every model's value and rank by every measure, those first that can be trusted most."""
    claims = {name: ranking.claims for name, ranking in comparison.table.items()}
    rows: list[tuple[Cell, ...]] = []
    sections, notes = [], []
    for key, measures in by_invariance_class(claims).items():
        sections.append((len(rows), INVARIANCE_CLASSES[key]))
        for measure in measures:
            ranking = comparison.table[measure]
            # Options that differ between the models make no name for all of them.
            names = {measure_cell(measure, estimate) for estimate in ranking.estimates.values()}
            name = names.pop() if len(names) == 1 else measure_cell(measure)
            rows.append((name, *(_rank_cell(ranking, model) for model in comparison)))
            if ranking.uneven:
                notes.append(f"{measure}: not comparable, as {ranking.uneven}")
    columns = (Column("measure"), *(Column(model, "right") for model in comparison))
    return Table("", columns, tuple(rows), tuple(notes), sections=tuple(sections))


def _rank_cell(ranking: MeasureRanking, model: str) -> Cell:
    """A model's value by a measure, with its rank where it has one."""
    estimate, rank = ranking.estimates.get(model), ranking.ranks[model]
    if estimate is None:
        return Cell("not measured", style="muted")
    place = json_place(model, ranking.measure, "value")
    if math.isnan(estimate.value):
        return Cell("failed", estimate.value, "bad", place=place)
    tie = "=" if ranking.is_tied(model) else ""
    detail, style = "" if rank is None else f"{rank}{tie}", "good" if rank == 1 else ""
    return value_cell(estimate, place, detail=detail, style=style)


def difference_table(comparison: Comparison, *, every: bool = False) -> Table:
    """Paired differences: of two models all, of more those to the flattest, or `every`."""
    columns = (
        Column("measure"),
        Column("models"),
        Column("difference", "right", 2),
        Column("from", "right", 1, group="95 % interval"),
        Column("to", "right", 1, group="95 % interval"),
        Column("p", "right", 3),
        Column("on samples like these"),
    )
    claims = {name: ranking.claims for name, ranking in comparison.table.items()}
    order = [name for names in by_invariance_class(claims).values() for name in names]
    rows = []
    for measure in order:
        ranking = comparison.table[measure]
        flattest = next(iter(ranking.ranks))
        for row in ranking.differences():
            if row.found.kind == PAIRED and (every or flattest in (row.first, row.second)):
                rows.append(_difference_row(row))
    return Table("", columns, tuple(rows))


def _difference_row(row: ModelDifference) -> tuple[Cell, ...]:
    """Two models by one measure."""
    models, found = f"{row.first} − {row.second}", row.found
    numbers = {"difference": found.value, "low": found.low, "high": found.high}
    chance = Cell("")
    if found.p is not None:
        chance = Cell("< 0.0001" if found.p < 1e-4 else two_digits(found.p), found.p)
    return (
        Cell(row.measure),
        Cell(models),
        *(
            Cell(f"{value:.4g}", value, place=json_place(models, row.measure, field))
            for field, value in numbers.items()
        ),
        chance,
        Cell(
            f"{row.flatter} is flatter" if row.flatter else "not told apart",
            style="" if row.flatter else "warn",
        ),
    )


def _notes(comparison: Comparison) -> Iterator[str]:
    """What the reader must know."""
    yield from (f"warning: {warning}" for warning in comparison.warnings)
    yield from (f"note: {note}" for note in comparison.notes if note not in comparison.warnings)
    for model, report in comparison.items():
        yield from (f"{model}: {note}" for note in report.facts.notes)
        odd = [name for name, estimate in report.items() if kind(estimate) == "not converged"]
        if odd:
            yield f"{model}: not converged: {', '.join(odd)}"
        for name, estimate in report.items():
            if kind(estimate) == "failed":
                yield f"{model}: {name}: {'; '.join(estimate.notes)}"
    if not comparison.complete:
        yield UNFINISHED
