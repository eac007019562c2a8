"""A study's findings in words and in a table for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from flatgauge.studies.training import DIVERGED, MISSED, REACHED

if TYPE_CHECKING:
    import pandas as pd

    from flatgauge.studies.findings import Findings


def told(findings: Findings) -> str:
    """The findings as text.

    Args:
        findings: What was found.

    Returns:
        What was run, and a table of correlations.
    """
    question = [findings.study.question] if findings.study.question else []
    lines = [*question, *run_words(findings), *left_out(findings), ""]
    if findings.counted.empty:
        return "\n".join([*lines[:-1], "Nothing can be said yet: no network counts."])
    published = findings.beside_published()
    if findings.counted[findings.study.target].nunique() > 1:
        lines += [
            f"Correlation with the {findings.study.target.replace('_', ' ')} (95 % interval):",
            *_table(findings),
        ]
    if not published.empty:
        lines += ["", "Beside the paper:", *_columns(published.drop(columns="source"))]
    return "\n".join(lines)


def run_words(findings: Findings) -> list[str]:
    """What was run, in a sentence.

    Args:
        findings: What was found.

    Returns:
        Sentences.
    """
    recipe, study = findings.study.recipe, findings.study
    varied = study.varied
    network = "" if "network" in varied else f" `{recipe.network}`"
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
    return [
        f"{len(findings.rows)} of {len(study.runs())} networks{network}{width} on {many}training "
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
        lines.append(f"{states[REACHED]} count.")
    return lines


def _table(findings: Findings) -> list[str]:
    """Correlations before and after rescaling, one measure per line."""
    import pandas as pd

    found, after = findings.correlations, findings.before_after
    rows: dict[str, dict[str, str]] = {}
    for measure in findings.measures:
        row = found.loc[measure]
        rows[measure] = {
            name: _interval(row, name.lower()) for name in ("Pearson", "Kendall", "Spearman")
        }
        if after is not None:
            rows[measure]["Spearman, rescaled"] = _interval(after.loc[measure], "after")
    return _columns(pd.DataFrame.from_dict(rows, orient="index"), index=True)


def _interval(row: Any, name: str) -> str:
    """A number with its interval."""
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if value != value:
        return "—"
    return f"{value:.2f} [{low:.2f}, {high:.2f}]" if low == low else f"{value:.2f}"


def _columns(frame: pd.DataFrame, *, index: bool = False) -> list[str]:
    """A table of text."""
    return [f"  {line}" for line in frame.to_string(index=index).splitlines()]
