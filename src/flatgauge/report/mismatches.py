"""In what runs differ that stand beside each other, and what that means for their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatgauge.report.json_text import plain
from flatgauge.report.report import Report

#: What must be the same for numbers to be compared as they stand, and why.
_MEANING = {
    "loss_name": ("losses", "curvature is that of the loss"),
    "samples": ("numbers of samples", "these are not the same data"),
    "weight_decay": ("weight decays", "these are not the same losses"),
}

#: What moves numbers a little, and why.
_ACCURACY_FACTS = {
    "dtype": ("precisions", "rounding differs"),
    "seed": ("seeds", "random estimates differ by their errors"),
}

#: Settings that change how well a value is known, and not what it is.
_ACCURACY = {"tolerance", "starts", "steps", "probes", "all_columns", "solver", "method"}

#: From how many times the smallest loss on another one is no longer like it.
_UNLIKE = 3.0

#: Losses that differ by less are all of models that fit.
_FITTED = 1e-4


def warnings_of(reports: Mapping[str, Report]) -> list[str]:
    """Say what makes a comparison of models meaningless, or that of some measures.

    Args:
        reports: By name of the model.

    Returns:
        One sentence each; none if there is nothing to warn of.
    """
    held: dict[str, list[str]] = {}
    for measure, told in uneven_options(reports).items():
        held.setdefault(told, []).append(measure)
    return [
        *_unlike(reports, _MEANING),
        *_other_data(reports),
        *_other_fit(reports),
        *_other_architecture(reports),
        *(f"{', '.join(names)}: not comparable, as {told}" for told, names in held.items()),
    ]


def notes_of(reports: Mapping[str, Report]) -> list[str]:
    """Say in what runs differ that moves their numbers a little.

    Args:
        reports: By name of the model.

    Returns:
        One sentence each; none if there is nothing to say.
    """
    return _unlike(reports, _ACCURACY_FACTS)


def _unlike(reports: Mapping[str, Report], facts: Mapping[str, tuple[str, str]]) -> list[str]:
    """The facts in which runs differ, with the reason why that matters."""
    notes = []
    for name, (words, why) in facts.items():
        found = {model: getattr(report.facts, name) for model, report in reports.items()}
        if len(set(found.values())) > 1:
            notes.append(f"different {words}, and {why}: {_listed(found)}")
    return notes


def _other_data(reports: Mapping[str, Report]) -> list[str]:
    """Whether models were measured on other samples, where that is not told by their number."""
    known = {m: r.facts for m, r in reports.items() if r.facts.data_digest}
    if len({facts.samples for facts in known.values()}) > 1 or not known:
        return []
    first = next(iter(known))
    odd = [m for m, facts in known.items() if facts.data_digest != known[first].data_digest]
    if not odd:
        return []
    return [
        f"not the same data: the samples of {', '.join(odd)} are not those of {first}, or come in "
        "another order; differences are those of the models and of the data, and are not paired"
    ]


def _other_fit(reports: Mapping[str, Report]) -> list[str]:
    """Whether models fit the data differently well."""
    losses = {model: report.facts.loss for model, report in reports.items()}
    low, high = min(losses.values()), max(losses.values())
    if not (high - low > (_UNLIKE - 1) * abs(low) and high - low > _FITTED):
        return []
    return [
        f"the losses are unlike: {_listed(losses)}; a model that fits better is flatter for that "
        "alone (the curvature of cross-entropy falls with the loss), so compare models at like "
        "losses, or by `normalized_sharpness`, which does not see the scale of the outputs"
    ]


def _other_architecture(reports: Mapping[str, Report]) -> list[str]:
    """Whether models are other functions of other numbers of parameters."""
    found = {m: f"{r.facts.model} of {r.facts.parameters:,}" for m, r in reports.items()}
    sizes = {report.facts.parameters for report in reports.values()}
    if len(sizes) > 1:
        return [
            f"different architectures, with different numbers of parameters: {_listed(found)}; "
            "sums over weights, units and layers grow with their number, and radii mean something "
            "else, so that ranks between them say little"
        ]
    if len(set(found.values())) > 1:
        return [f"different classes of models: {_listed(found)}; see that they are alike"]
    return []


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
