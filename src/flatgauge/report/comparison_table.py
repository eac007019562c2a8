"""A comparison as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flatgauge.analysis.formatting import kind
from flatgauge.analysis.result import UNFINISHED
from flatgauge.analysis.text_table import align_columns, label_with_options
from flatgauge.report.difference_table import difference_cells

if TYPE_CHECKING:
    from flatgauge.analysis.comparison import Comparison

#: How rescaling is written in the table, strongest claim first.
_CLAIMS = ("nodewise", "layerwise")
_NONE = "nothing"

#: The columns of the table of differences that narrower terminals show.
_NARROWER = ((0, 1, 3, 5), (0, 1, 5))


def comparison_text(comparison: Comparison) -> str:
    """A comparison in a few lines and three tables.

    Args:
        comparison: The comparison.

    Returns:
        The text.
    """
    told_apart = differences(comparison)
    parts = [
        [heading(comparison), *align_columns(models(comparison))],
        align_columns(cells(comparison)) if comparison.measures else [],
        align_columns(told_apart) if told_apart else [],
        [*tail(comparison), comparison.verdict],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def heading(comparison: Comparison) -> str:
    """What the runs have in common, in a line."""
    facts = [report.facts for report in comparison.values()]
    shared = [
        " / ".join(dict.fromkeys(f"{fact.samples:,}" for fact in facts)) + " samples",
        "loss " + " / ".join(dict.fromkeys(fact.loss_name for fact in facts)),
        " / ".join(dict.fromkeys(fact.dtype for fact in facts)),
        "seed " + " / ".join(dict.fromkeys(str(fact.seed) for fact in facts)),
    ]
    return f"{len(facts)} model{'s' if len(facts) != 1 else ''}: {', '.join(shared)}"


def models(comparison: Comparison) -> list[tuple[str, ...]]:
    """The table of models."""
    rows: list[tuple[str, ...]] = [("model", "class", "parameters", "loss", "‖gradient‖")]
    for name, report in comparison.items():
        facts = report.facts
        sizes = f"{facts.parameters:,}", f"{facts.loss:.6g}", f"{facts.gradient_norm:.3g}"
        rows.append((name, facts.model, *sizes))
    return rows


def in_order(comparison: Comparison) -> list[str]:
    """The measures, those first that can be trusted between networks."""
    claims = [*_CLAIMS, _NONE]
    return sorted(comparison.measures, key=lambda m: claims.index(claim(comparison, m)))


def claim(comparison: Comparison, measure: str) -> str:
    """The strongest rescaling that a measure claims not to see."""
    groups = comparison.invariant_to(measure)
    return next((group for group in _CLAIMS if group in groups), _NONE)


def cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """The table of measures: a column per model, every value with its rank."""
    table: list[tuple[str, ...]] = [("measure", "invariant to", *comparison)]
    for measure in in_order(comparison):
        values = placed(comparison, measure)
        row = (f"{values[model][0]} {values[model][1]}".strip() for model in comparison)
        table.append((title(comparison, measure), claim(comparison, measure), *row))
    return table


def differences(comparison: Comparison) -> list[tuple[str, ...]]:
    """The table of paired differences, empty where nothing is paired."""
    return difference_cells(comparison.difference_rows(), in_order(comparison))


def listed(comparison: Comparison) -> list[tuple[str, ...]]:
    """The table for narrow terminals: a row per measure and model, flattest first."""
    table: list[tuple[str, ...]] = [("measure", "rank", "model", "value")]
    for measure in in_order(comparison):
        name = title(comparison, measure)
        for model, (value, rank) in placed(comparison, measure).items():
            table.append((name, rank.strip("()"), model, value))
            name = ""
    return table


def title(comparison: Comparison, measure: str) -> str:
    """A measure's name with its radius, where that is the same for all models."""
    names = {label_with_options(measure, r[measure]) for r in comparison.values() if measure in r}
    return names.pop() if len(names) == 1 else measure


def placed(comparison: Comparison, measure: str) -> dict[str, tuple[str, str]]:
    """Every model's value and rank by one measure, flattest first."""
    ranking = comparison.table[measure]
    found = {}
    for model, rank in ranking.ranks.items():
        estimate = ranking.estimates.get(model)
        if estimate is None or math.isnan(estimate.value):
            found[model] = ("not measured" if estimate is None else "failed", "")
        else:
            tie = "=" if ranking.is_tied(model) else ""
            found[model] = (str(estimate), "" if rank is None else f"({rank}{tie})")
    return found


def tail(comparison: Comparison) -> list[str]:
    """How to read the table, and what the reader must know."""
    lines = [
        "(1) is flattest; (1=) shares its rank with values that cannot be told apart from it;",
        "invariant to: the finest rescaling that does not move the measure",
    ]
    lines += [f"warning: {warning}" for warning in comparison.warnings]
    lines += [f"note: {n}" for n in comparison.notes if n not in comparison.warnings]
    for model, report in comparison.items():
        lines += [f"{model}: {note}" for note in report.facts.notes]
        odd = [name for name, e in report.items() if kind(e) == "not converged"]
        if odd:
            lines.append(f"{model}: not converged: {', '.join(odd)}")
        for name, estimate in report.items():
            if kind(estimate) == "failed":
                lines.append(f"{model}: {name}: {'; '.join(estimate.notes)}")
    return lines if comparison.complete else [*lines, UNFINISHED]


def rich_print(comparison: Comparison) -> None:
    """Print a comparison on a terminal, with colour where it has any.

    Args:
        comparison: The comparison.
    """
    from rich.console import Console

    from flatgauge.report.terminal import print_lines, print_table

    console = Console()
    print_lines(console, [heading(comparison)])
    print_table(console, models(comparison))
    if comparison.measures:
        print_table(console, cells(comparison), listed(comparison), colour=_colour)
    if told_apart := differences(comparison):
        narrower = [[tuple(row[i] for i in way) for row in told_apart] for way in _NARROWER]
        print_table(console, told_apart, *narrower, colour=_colour)
    print_lines(console, tail(comparison), style="dim")
    print_lines(console, [comparison.verdict], style="bold")


def _colour(cell: str) -> str:
    """The colour of a cell: the flattest stands out, and what failed."""
    if cell.endswith(("(1)", "(1=)")) or cell in ("1", "1="):
        return "green"
    return "red" if cell == "failed" else "yellow" if cell == "not told apart" else ""
