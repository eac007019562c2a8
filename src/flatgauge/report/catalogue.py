"""The catalogue of measures as text, made from what they declare."""

from __future__ import annotations

import inspect

from flatgauge.measures import GROUPS, Measure, registry
from flatgauge.report.latex_text import readable
from flatgauge.report.table import aligned

_FURTHER = "`flatgauge catalogue NAME` explains one in full."


def overview() -> str:
    """Every measure in a line or two, for a terminal."""
    lines = []
    for item in registry:
        lines += [
            f"{item.name}  [{item.symbol}]",
            f"    {item.definition}",
            f"    invariant to: {_claims(item)}; cost: {item.cost}",
        ]
    return "\n".join([*lines, "", _FURTHER])


def rich_overview() -> None:
    """Print every measure on a terminal, with colour where it has any."""
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding

    console = Console(highlight=False)
    for item in registry:
        console.print(f"[bold]{escape(item.name)}[/]  [cyan]{escape(item.symbol)}[/]")
        told = f"[dim]invariant to[/] {_claims(item)}; [dim]cost[/] {escape(item.cost)}"
        console.print(Padding(f"{escape(item.definition)}\n{told}", (0, 0, 0, 4)))
    console.print(f"\n{_FURTHER}", style="dim", markup=False)


def rich_explain(name: str) -> None:
    """Print what one measure declares on a terminal.

    Args:
        name: Of the measure.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    title, *lines = explain(name).split("\n")
    console.print(Text(title, style="bold"))
    for line in lines:
        # The heads of sections stand at the margin and end in a colon.
        head = line.endswith(":") and not line.startswith(" ")
        indent = len(line) - len(line.lstrip())
        console.print(Padding(Text(line.strip(), style="bold" if head else ""), (0, 0, 0, indent)))


def _claims(item: Measure) -> str:
    """What a measure is invariant to, in a line."""
    return ", ".join(group for group in GROUPS if group in item.invariant_to) or "nothing"


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
    text = readable(inspect.getdoc(item.function) or "")
    return "\n".join([item.name, *aligned(facts), "", text])


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
