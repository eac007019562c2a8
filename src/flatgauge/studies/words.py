"""A study's findings in words and in a table for a terminal."""

from __future__ import annotations

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
    lines = [findings.study.question, *run_words(findings), *left_out(findings), ""]
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
    return "\n".join(line for line in lines if line is not None)


def run_words(findings: Findings) -> list[str]:
    """What was run, in a sentence.

    Args:
        findings: What was found.

    Returns:
        Sentences.
    """
    recipe, study = findings.study.recipe, findings.study
    many = "all" if recipe.samples is None else f"{recipe.samples:,}"
    width = "" if recipe.width == 1 else f" with {recipe.width:g} times the width"
    factors = " × ".join(
        f"{len(values)} values of {' with '.join(name.split(', '))}"
        for name, values in study.factors.items()
    )
    measured = f"; measured on {study.measured:,} of them" if study.measured else ""
    return [
        f"{len(findings.rows)} of {len(study.runs())} networks `{recipe.network}`{width} on {many} "
        f"training samples of {recipe.data}{measured}: {factors}, "
        f"{len(study.declaration()['seeds'])} seeds."
    ]


def left_out(findings: Findings) -> list[str]:
    """Which networks do not count, and by which rule.

    Args:
        findings: What was found.

    Returns:
        Sentences; none if all count.
    """
    recipe = findings.study.recipe
    states = Counter(row["training"]["state"] for row in findings.rows.values())
    goals = [
        text
        for goal, text in (
            (recipe.loss_goal, f"a training loss of at most {recipe.loss_goal}"),
            (recipe.accuracy_goal, f"a training accuracy of at least {recipe.accuracy_goal}"),
            (recipe.gradient_goal, f"a gradient of at most {recipe.gradient_goal}"),
        )
        if goal is not None
    ]
    lines = []
    if states[MISSED]:
        lines.append(
            f"{states[MISSED]} did not reach {' and '.join(goals)} within {recipe.epochs} epochs: "
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
