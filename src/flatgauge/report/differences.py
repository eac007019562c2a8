"""In what runs differ that stand beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatgauge.report.json_text import plain
from flatgauge.report.report import Report

#: What must be the same for numbers to be compared as they stand, and why.
_FACTS = {
    "loss_name": ("losses", "curvature is that of the loss"),
    "samples": ("numbers of samples", "these are not the same data"),
    "dtype": ("precisions", "rounding differs"),
    "weight_decay": ("weight decays", "these are not the same losses"),
    "seed": ("seeds", "random estimates differ by their errors"),
}


def differences(reports: Mapping[str, Report]) -> list[str]:
    """Say in what reports differ that their readers would take for the same.

    Args:
        reports: By name of the model.

    Returns:
        One sentence each; none if there is nothing to say.
    """
    notes = []
    for name, (words, why) in _FACTS.items():
        found = {model: getattr(report.facts, name) for model, report in reports.items()}
        if len(set(found.values())) > 1:
            notes.append(f"different {words}, and {why}: {_listed(found)}")
    return notes + _options(reports)


def _options(reports: Mapping[str, Report]) -> list[str]:
    """Settings of a measure that are not the same for all models."""
    notes: dict[str, list[str]] = {}
    for measure in dict.fromkeys(name for report in reports.values() for name in report):
        taken = {model: r[measure].options for model, r in reports.items() if measure in r}
        taken = {model: options for model, options in taken.items() if options}
        for key in dict.fromkeys(key for options in taken.values() for key in options):
            found = {model: plain(options.get(key)) for model, options in taken.items()}
            if len({repr(value) for value in found.values()}) > 1:
                told = f"different `{key}`, so the values are not comparable: {_listed(found)}"
                notes.setdefault(told, []).append(measure)
    return [f"{', '.join(measures)}: {told}" for told, measures in notes.items()]


def _listed(found: Mapping[str, Any]) -> str:
    words = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in found.values())
    return ", ".join(f"{model} {word}" for model, word in zip(found, words, strict=True))
