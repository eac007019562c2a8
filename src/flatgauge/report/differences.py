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

#: Settings that change how well a value is known, and not what it is.
_ACCURACY = {"tolerance", "starts", "steps", "probes", "all_columns", "solver", "method"}


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
    held: dict[str, list[str]] = {}
    for measure, told in uneven_options(reports).items():
        held.setdefault(told, []).append(measure)
    return notes + [
        f"{', '.join(names)}: not comparable, as {told}" for told, names in held.items()
    ]


def uneven_options(reports: Mapping[str, Report]) -> dict[str, str]:
    """The measures that were not taken of all models with the same settings.

    Args:
        reports: By name of the model.

    Returns:
        By measure, which setting differs, and how. Some radii follow the model by default: pass
        one, the smallest, for all.
    """
    uneven = {}
    for measure in dict.fromkeys(name for report in reports.values() for name in report):
        taken = {model: r[measure].options for model, r in reports.items() if measure in r}
        taken = {model: options for model, options in taken.items() if options}
        keys = dict.fromkeys(key for options in taken.values() for key in options)
        for key in (key for key in keys if key not in _ACCURACY):
            found = {model: plain(options.get(key)) for model, options in taken.items()}
            if len({repr(value) for value in found.values()}) > 1:
                uneven[measure] = f"`{key}` differs: {_listed(found)}"
    return uneven


def _listed(found: Mapping[str, Any]) -> str:
    words = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in found.values())
    return ", ".join(f"{model} {word}" for model, word in zip(found, words, strict=True))
