"""What a pool found, as tables for a terminal, a notebook or a file, and as sentences for its page.

In: a `PoolResult`. Out: what was run and what does not count as sentences, correlations with their
intervals and published numbers as `Table` records.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from flatgauge.report.coefficient import coefficient
from flatgauge.report.tables import Cell, Column, Table
from flatgauge.studies.study import Study
from flatgauge.studies.training import DIVERGED, MISSED

if TYPE_CHECKING:
    import pandas as pd

    from flatgauge.studies.result import PoolResult

#: Rank correlations from here on are worth a warning.
_STRONG = 0.5

#: Correlations of the table, with the columns that a narrow terminal drops first.
_SHOWN = {"pearson": ("Pearson", 2), "kendall": ("Kendall", 1), "spearman": ("Spearman", 0)}


def result_tables(result: PoolResult) -> list[Table]:
    """What was run and left out, then correlations and published numbers where there are any."""
    nothing = ["Nothing can be said yet: no network counts."] if result.included_frame.empty else []
    notes = (*describe_run(result), *describe_left_out(result), *nothing)
    tables = [Table(title=result.pool.question or result.pool.name, notes=tuple(notes))]
    if result.included_frame.empty:
        return tables
    if result.included_frame[result.pool.target].nunique() > 1:
        tables.append(_correlation_table(result))
    if result.pool.published:
        tables.append(_published_table(result))
    return tables


def _correlation_table(result: PoolResult) -> Table:
    found, after = result.correlations, result.before_after
    columns = [Column("measure")]
    columns += [Column(name, priority=priority) for name, priority in _SHOWN.values()]
    columns += [] if after is None else [Column("Spearman, rescaled")]
    rows = []
    for measure in result.measures:
        cells = [_interval(found, measure, name) for name in _SHOWN]
        cells += [] if after is None else [_interval(after, measure, "after")]
        rows.append((Cell(measure), *cells))
    target = result.pool.target.replace("_", " ")
    return Table(f"Correlation with the {target} (95 % interval)", tuple(columns), tuple(rows))


def _interval(frame: pd.DataFrame, row: str, column: str) -> Cell:
    found = coefficient(frame, row, column)
    if found is None or not found.is_known:
        return Cell("—")
    return Cell(found.text, found.value)


def _published_table(result: PoolResult) -> Table:
    table = result.compare_published()[["what", "published", "ours"]]
    rows = tuple(tuple(Cell(str(text)) for text in row) for row in table.itertuples(index=False))
    return Table("Beside the paper", (Column(""), Column("published"), Column("ours")), rows)


def describe_run(result: PoolResult) -> list[str]:
    """What was run, in a sentence."""
    pool, done, total = result.pool, len(result.rows), len(result.pool.members)
    count = f"{done}" if done == total else f"{done} (of {total})"
    if not isinstance(pool, Study):
        factors = f"; factors: {', '.join(pool.factor_names)}" if pool.factor_names else ""
        return [f"{count} checkpoints, measured on {_samples(pool.measured)}samples{factors}."]
    recipe, varied = pool.recipe, pool.varying_fields
    network = "" if "network" in varied else f" {recipe.network}"
    width = (
        "" if recipe.width == 1 or "width" in varied else f" with {recipe.width:g} times the width"
    )
    many = "" if "samples" in varied else _samples(recipe.samples)
    data = "" if "data" in varied else f" of {recipe.data}"
    factors = " × ".join(
        f"{_count_text(len(values), 'value')} of {' with '.join(name.split(', '))}"
        for name, values in pool.factors.items()
    )
    seeds = pool.declaration()["seeds"]
    fewer = pool.measured is not None and pool.measured < (recipe.samples or math.inf)
    measured = f"; measured on {pool.measured:,} of them" if fewer else ""
    return [
        f"{count} networks{network}{width} on {many}training "
        f"samples{data}{measured}: {factors}, {_count_text(len(seeds), 'seed')}."
    ]


def _count_text(many: int, what: str) -> str:
    """A number with what it counts."""
    return f"{many} {what}" if many == 1 else f"{many} {what}s"


def _samples(many: int | None) -> str:
    """How many, before what they are."""
    return "all " if many is None else f"{many:,} "


def describe_left_out(result: PoolResult) -> list[str]:
    """Which networks do not count, and by which rule; nothing if all count."""
    states = Counter(row["state"] for row in result.rows.values())
    lines = []
    if isinstance(result.pool, Study) and states[MISSED]:
        recipe, varied = result.pool.recipe, result.pool.varying_fields
        goals = {
            "loss_goal": "a training loss of at most",
            "accuracy_goal": "a training accuracy of at least",
            "gradient_goal": "a gradient of at most",
        }
        told = [
            f"{text} {getattr(recipe, name)}"
            for name, text in goals.items()
            if getattr(recipe, name) is not None and name not in varied
        ]
        told += ["a goal of its own"] if any(name in varied for name in goals) else []
        within = "its" if "epochs" in varied else str(recipe.epochs)
        lines.append(
            f"{states[MISSED]} did not reach {' and '.join(told)} within {within} epochs: "
            "measured and shown, but not counted."
        )
    if states[DIVERGED]:
        lines.append(f"{states[DIVERGED]} diverged: neither measured nor counted.")
    if lines:
        rest = len(result.rows) - states[MISSED] - states[DIVERGED]
        lines.append(f"The other {rest} of {len(result.rows)} count.")
    return lines


def describe_confounders(result: PoolResult) -> list[str]:
    """Which scores go with the target on their own, so that a measure may only repeat them."""
    counted, target = result.included_frame, result.pool.target
    if counted[target].nunique() < 2:
        return []
    varied = (
        result.pool.varying_fields if isinstance(result.pool, Study) else result.pool.factor_names
    )
    found = {
        name: counted[name].corr(counted[target], method="spearman")
        for name in result.confounders
        if name not in varied
    }
    return [
        f"{name} alone has a Spearman correlation of {value:.2f} with {target}; what is left of a "
        f"measure's correlation once it is held still is in the column partial[{name}]."
        for name, value in found.items()
        if abs(value) >= _STRONG
    ]
