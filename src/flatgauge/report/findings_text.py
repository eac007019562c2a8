"""A study's findings in words and in a table for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from flatgauge.studies.training import DIVERGED, MISSED, REACHED

if TYPE_CHECKING:
    from flatgauge.report.terminal import Rows
    from flatgauge.studies.findings import Findings

#: Rank correlations from here on are worth a warning.
_STRONG = 0.5

#: What the table of published numbers shows.
BESIDE = "Beside the paper:"


def told(findings: Findings) -> str:
    """The findings as text.

    Args:
        findings: What was found.

    Returns:
        What was run, and tables of correlations and published numbers.
    """
    lines = sentences(findings)
    if not findings.counted.empty:
        tables = {
            correlation_title(findings): correlation_rows(findings),
            BESIDE: published_rows(findings),
        }
        for title, rows in tables.items():
            lines += ["", title, *_aligned(rows)] if rows else []
    return "\n".join(lines)


def sentences(findings: Findings) -> list[str]:
    """What was asked and run, and what does not count.

    Args:
        findings: What was found.

    Returns:
        Sentences.
    """
    nothing = ["Nothing can be said yet: no network counts."] if findings.counted.empty else []
    question = [findings.study.question] if findings.study.question else []
    return [*question, *run_words(findings), *left_out(findings), *nothing]


def correlation_title(findings: Findings) -> str:
    """What the table of correlations shows.

    Args:
        findings: What was found.

    Returns:
        A heading.
    """
    return f"Correlation with the {findings.study.target.replace('_', ' ')} (95 % interval):"


def run_words(findings: Findings) -> list[str]:
    """What was run, in a sentence.

    Args:
        findings: What was found.

    Returns:
        Sentences.
    """
    recipe, study = findings.study.recipe, findings.study
    varied = study.varied
    network = "" if "network" in varied else f" {recipe.network}"
    width = (
        "" if recipe.width == 1 or "width" in varied else f" with {recipe.width:g} times the width"
    )
    many = "" if "samples" in varied else _samples(recipe.samples)
    data = "" if "data" in varied else f" of {recipe.data}"
    factors = " × ".join(
        f"{_counted(len(values), 'value')} of {' with '.join(name.split(', '))}"
        for name, values in study.factors.items()
    )
    seeds = study.declaration()["seeds"]
    fewer = study.measured is not None and study.measured < (recipe.samples or math.inf)
    measured = f"; measured on {study.measured:,} of them" if fewer else ""
    done, all_runs = len(findings.rows), len(study.runs())
    count = f"{done}" if done == all_runs else f"{done} (of {all_runs})"
    return [
        f"{count} networks{network}{width} on {many}training "
        f"samples{data}{measured}: {factors}, {_counted(len(seeds), 'seed')}."
    ]


def _counted(many: int, what: str) -> str:
    """A number with what it counts."""
    return f"{many} {what}" if many == 1 else f"{many} {what}s"


def _samples(many: int | None) -> str:
    """How many, before what they are."""
    return "all " if many is None else f"{many:,} "


def left_out(findings: Findings) -> list[str]:
    """Which networks do not count, and by which rule.

    Args:
        findings: What was found.

    Returns:
        Sentences; none if all count.
    """
    recipe, varied = findings.study.recipe, findings.study.varied
    states = Counter(row["training"]["state"] for row in findings.rows.values())
    words = {
        "loss_goal": "a training loss of at most",
        "accuracy_goal": "a training accuracy of at least",
        "gradient_goal": "a gradient of at most",
    }
    goals = [
        f"{text} {getattr(recipe, name)}"
        for name, text in words.items()
        if getattr(recipe, name) is not None and name not in varied
    ]
    if any(name in varied for name in words):
        goals.append("a goal of its own")
    within = "its" if "epochs" in varied else str(recipe.epochs)
    lines = []
    if states[MISSED]:
        lines.append(
            f"{states[MISSED]} did not reach {' and '.join(goals)} within {within} epochs: "
            "measured and shown, but not counted."
        )
    if states[DIVERGED]:
        lines.append(f"{states[DIVERGED]} diverged: neither measured nor counted.")
    if lines:
        lines.append(f"The other {states[REACHED]} of {len(findings.rows)} count.")
    return lines


def confounding_words(findings: Findings) -> list[str]:
    """Which facts of training alone go with the target, so that a measure may only repeat them.

    Args:
        findings: What was found.

    Returns:
        A sentence for every confounder with a strong rank correlation.
    """
    counted, target = findings.counted, findings.study.target
    if counted[target].nunique() < 2:
        return []
    found = {
        name: counted[name].corr(counted[target], method="spearman")
        for name in findings.confounders
        if name not in findings.study.varied
    }
    return [
        f"{name} alone has a Spearman correlation of {value:.2f} with {target}; what is left of a "
        f"measure's once it is held still is in the column partial[{name}]."
        for name, value in found.items()
        if abs(value) >= _STRONG
    ]


def correlation_rows(findings: Findings, *, narrow: bool = False) -> Rows:
    """Correlations with their intervals, before and after rescaling.

    Args:
        findings: What was found.
        narrow: Whether to leave all but one kind of correlation out.

    Returns:
        Names of columns, then one row per measure; nothing if the target is always the same.
    """
    if findings.counted[findings.study.target].nunique() < 2:
        return []
    found, after = findings.correlations, findings.before_after
    kinds = ("Spearman",) if narrow else ("Pearson", "Kendall", "Spearman")
    rows = [("measure", *kinds, *(() if after is None else ("Spearman, rescaled",)))]
    for measure in findings.measures:
        cells = [_interval(found.loc[measure], kind.lower()) for kind in kinds]
        if after is not None:
            cells.append(_interval(after.loc[measure], "after"))
        rows.append((measure, *cells))
    return rows


def published_rows(findings: Findings) -> Rows:
    """The paper's numbers beside ours.

    Args:
        findings: What was found.

    Returns:
        Names of columns, then one row per number; nothing if there are none.
    """
    table = findings.beside_published()[["what", "published", "ours"]]
    rows = [tuple(map(str, row)) for row in table.itertuples(index=False)]
    return [("", "published", "ours"), *rows] if rows else []


def _interval(row: Any, name: str) -> str:
    """A number with its interval."""
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if value != value:
        return "—"
    return f"{value:.2f} [{low:.2f}, {high:.2f}]" if low == low else f"{value:.2f}"


def _aligned(rows: Rows) -> list[str]:
    """A table as lines of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
