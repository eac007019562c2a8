"""The catalogue of measures as text, made from what they declare."""

from __future__ import annotations

import inspect

from flatgauge.measures import GROUPS, registry
from flatgauge.report.table import aligned


def overview() -> str:
    """Every measure in a line or two, for a terminal."""
    lines = []
    for item in registry:
        groups = ", ".join(group for group in GROUPS if group in item.invariant_to) or "nothing"
        lines += [
            f"{item.name}  [{item.symbol}]",
            f"    {item.definition}",
            f"    invariant to: {groups}; cost: {item.cost}",
        ]
    return "\n".join([*lines, "", "`flatgauge catalogue NAME` explains one in full."])


def explain(name: str) -> str:
    """Everything one measure declares, and its docstring.

    Args:
        name: Of the measure.

    Returns:
        The text.
    """
    item = registry[name]
    facts = [
        ("symbol", item.symbol),
        ("paper", item.paper),
        ("geometry", item.geometry),
        ("functional", item.functional),
        ("options", ", ".join(f"{key}={value!r}" for key, value in item.options.items())),
    ]
    return "\n".join([item.name, *aligned(facts), "", inspect.getdoc(item.function) or ""])


def markdown_page() -> str:
    """The catalogue as a page of the documentation."""
    lines = [
        "# Catalogue of measures",
        "",
        "Made from what each measure declares (`flatgauge catalogue --markdown`); lower is flatter,"
        " always.",
        "",
        "| measure | symbol | definition | geometry | functional | invariant to | cost | from |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for item in registry:
        groups = ", ".join(group for group in GROUPS if group in item.invariant_to)
        cells = (
            f"`{item.name}`",
            item.symbol,
            item.definition,
            item.geometry,
            item.functional,
            groups,
            item.cost,
            item.paper,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## What a measure can be invariant to", "", "| group | moves |", "|---|---|"]
    lines += [f"| `{group}` | {moves} |" for group, moves in GROUPS.items()]
    return "\n".join(lines)
