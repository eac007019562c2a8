"""The catalogue of measures as text, made from what they declare.

The overview is written from rows of text, which `catalogue_rows` reads from the registry; the
command line keeps them in a file, and so answers without loading torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatgauge.measures.registry import Measure

_FURTHER = "`flatgauge catalogue NAME` explains one in full."

#: From this length on, a line of a docstring goes on in the next one, if that begins no entry.
_FULL = 68
_ENTRY = re.compile(r"[\w`]+( \(.*\))?: |>>> |\.\.\. ")


def catalogue_rows() -> list[dict[str, str]]:
    """Name, symbol, definition, invariances and cost of every measure."""
    from flatgauge.measures import registry
    from flatgauge.measures.registry import GROUPS

    return [
        {
            "name": item.name,
            "symbol": item.symbol,
            "definition": item.definition,
            "invariant_to": ", ".join(group for group in GROUPS if group in item.invariant_to)
            or "nothing",
            "cost": item.cost,
        }
        for item in registry
    ]


def _plugin_lines() -> list[str]:
    """What other packages bring, a line for each."""
    from flatgauge.graph.export import OP_PLUGINS
    from flatgauge.measures import registry

    found: dict[str, list[str]] = {}
    for kind, packages in (("measure", registry.packages), ("op", OP_PLUGINS.packages())):
        for name, package in packages.items():
            found.setdefault(package, []).append(f"{kind} `{name}`")
    return [f"from {package}: {', '.join(items)}" for package, items in found.items()]


def overview(rows: Sequence[dict[str, str]] | None = None) -> str:
    """Every measure in a line or two.

    Args:
        rows: As of `catalogue_rows`, where no other package adds any; None reads the registry.

    Returns:
        The text.
    """
    lines = []
    plugins = _plugin_lines() if rows is None else []
    for row in catalogue_rows() if rows is None else rows:
        lines += [
            f"{row['name']}  [{row['symbol']}]",
            f"    {row['definition']}",
            f"    invariant to: {row['invariant_to']}; cost: {row['cost']}",
        ]
    return "\n".join([*lines, "", *plugins, _FURTHER])


def rich_overview(rows: Sequence[dict[str, str]] | None = None) -> None:
    """Print every measure on a terminal, with colour where it has any; see `overview`."""
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding

    console = Console(highlight=False)
    plugins = _plugin_lines() if rows is None else []
    for row in catalogue_rows() if rows is None else rows:
        console.print(f"[bold]{escape(row['name'])}[/]  [cyan]{escape(row['symbol'])}[/]")
        claims = f"[dim]invariant to[/] {row['invariant_to']}; [dim]cost[/] {escape(row['cost'])}"
        console.print(Padding(f"{escape(row['definition'])}\n{claims}", (0, 0, 0, 4)))
    console.print("\n".join(["", *plugins, _FURTHER]), style="dim", markup=False)


def rich_explain(name: str) -> None:
    """Print what one measure declares on a terminal.

    Args:
        name: Of the measure.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from flatgauge.measures import registry

    console = Console(highlight=False)
    item = registry[name]
    console.print(Text(item.name, style="bold"))
    for word, fact in _facts(item):
        console.print(Text.assemble((f"{word}  ", "dim"), fact))
    for line in ["", *reflow(_text(item).split("\n"))]:
        # The heads of sections stand at the margin and end in a colon.
        head = line.endswith(":") and not line.startswith(" ")
        indent = len(line) - len(line.lstrip())
        console.print(Padding(Text(line.strip(), style="bold" if head else ""), (0, 0, 0, indent)))


def reflow(lines: list[str]) -> list[str]:
    """Join the lines of every paragraph, so that they can be broken to another width.

    Args:
        lines: Of a docstring.

    Returns:
        One line per paragraph, entry of a list, or line of code.

    Example:
        >>> first = "values: One entry of a list whose text goes on in another line, and is long"
        >>> reflow([first, "    enough to be broken.", "other: Short."])[1:]
        ['other: Short.']
    """
    found: list[str] = []
    margins, full = {-1}, False
    for line in lines:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        entry = _ENTRY.match(text) is not None
        if full and text and indent in margins and not entry:
            found[-1] += f" {text}"
        else:
            found.append(line)
            margins = {indent, indent + 4} if entry else {indent}
        full = len(line) >= _FULL and not text.startswith((">>>", "..."))
    return found


def explain(name: str) -> str:
    """Everything one measure declares, and its docstring.

    Args:
        name: Of the measure.

    Returns:
        The text.
    """
    from flatgauge.measures import registry

    item = registry[name]
    facts = (f"{word:<10}  {fact}".rstrip() for word, fact in _facts(item))
    return "\n".join([item.name, *facts, "", _text(item)])


def _text(item: Measure) -> str:
    """The docstring of a measure, with readable formulas."""
    from flatgauge.report.formulas import readable

    return readable(inspect.getdoc(item.function) or "")


def _facts(item: Measure) -> list[tuple[str, ...]]:
    """What a measure declares, with a word for each."""
    return [
        ("symbol", item.symbol),
        ("paper", item.paper),
        ("geometry", item.geometry),
        ("functional", item.functional),
        ("options", ", ".join(f"{key}={value!r}" for key, value in item.options.items())),
    ]


def markdown_page() -> str:
    """The catalogue as a page of the documentation."""
    from flatgauge.measures import registry
    from flatgauge.measures.registry import GROUPS

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
