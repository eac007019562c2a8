"""The glossary of a page, made from what the measures declare."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatgauge.measures import registry
from flatgauge.measures.registry import GROUPS, Measure
from flatgauge.report.formulas import mathml, unicode_formula

if TYPE_CHECKING:
    from flatgauge.analysis.measurement import Report


@dataclass(frozen=True)
class Entry:
    """What a measure is.

    Attributes:
        name: Of the measure.
        symbol: How papers write it.
        definition: In one sentence.
        mathml: The formula, None where it can be shown as text only.
        formula: The formula as text, "" where there is none.
        invariant_to: The groups of rewritings that leave it unchanged.
        geometry: How distance is measured.
        functional: What is asked of the loss.
        cost: In passes over the data.
        paper: Where it comes from.
    """

    name: str
    symbol: str
    definition: str
    mathml: str | None
    formula: str
    invariant_to: list[str]
    geometry: str
    functional: str
    cost: str
    paper: str


def glossary_of(names: Iterable[str]) -> list[Entry]:
    """Explain measures.

    Args:
        names: Of measures; what the registry does not know is left out.

    Returns:
        One entry for each, in the order of the registry, balanced ones last.
    """
    wanted = [name for name in dict.fromkeys(names) if name in registry]
    order = {item.name: place for place, item in enumerate(registry)}
    wanted.sort(key=lambda name: order.get(name, len(order)))
    return [_entry(registry[name]) for name in wanted]


def skeletons_of(reports: Mapping[str, Report]) -> dict[str, str]:
    """The skeletons that the measures of basis paths were taken with.

    Args:
        reports: By name of the model.

    Returns:
        By measure; several where models differ.
    """
    found: dict[str, dict[str, None]] = {}
    for report in reports.values():
        for name, estimate in report.items():
            if "skeleton" in estimate.options:
                found.setdefault(name, {})[str(estimate.options["skeleton"])] = None
    return {name: " or ".join(names) for name, names in found.items()}


def linked(names: Iterable[str], skeletons: Mapping[str, str]) -> dict[str, str]:
    """The measures that a page links to its glossary, each with its skeleton.

    Args:
        names: Of measures; what the registry does not know is left out.
        skeletons: By measure.

    Returns:
        By measure the skeleton that its values depend on, "" where there is none.
    """
    return {entry.name: skeletons.get(entry.name, "") for entry in glossary_of(names)}


def _entry(item: Measure) -> Entry:
    latex = formula_of(item)
    return Entry(
        name=item.name,
        symbol=item.symbol,
        definition=item.definition,
        mathml=mathml(latex) if latex else None,
        formula=unicode_formula(latex),
        invariant_to=[group for group in GROUPS if group in item.invariant_to],
        geometry=item.geometry,
        functional=item.functional,
        cost=item.cost,
        paper=item.paper,
    )


def formula_of(item: Measure) -> str:
    """The first formula in a measure's docstring, "" where it has none."""
    found = re.search(r"\.\. math:: (.*?)(?:\n\n|\Z)", inspect.getdoc(item.function) or "", re.S)
    return " ".join(found[1].split()) if found else ""
