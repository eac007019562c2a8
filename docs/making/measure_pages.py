"""One page for every measure, made from what it declares and from its docstring."""

from __future__ import annotations

import inspect

from flatgauge.measures import GROUPS, Measure, registry
from making.caveats import caveats
from making.docstrings import parsed, prose, section
from making.example_run import TOLD, example_run

#: The order of a page; what a docstring has beyond these stands in the reference.
_SECTIONS = {
    "Definition": "Definition",
    "Invariance": "What does not move it",
    "Cost": "Cost",
    "Example": "Example",
}


def measure_pages() -> dict[str, str]:
    """Every page by its address, with an overview."""
    pages = {f"measures/{item.name}.md": _page(item) for item in registry}
    return {"measures/index.md": overview(), **pages}


def overview() -> str:
    """All measures in a table, each with a link."""
    run = example_run()
    lines = [
        "---\nhide: [toc]\n---",
        "",
        "# All measures",
        "",
        f"{len(registry)} measures; lower is flatter, always. Every one of them can also be taken "
        "at the [balanced point](../gauge.md#balancing) (`balanced:NAME`), which makes it "
        "invariant to every rescaling.",
        "",
        f"The numbers are of {TOLD}. No output differs by one bit.",
        "",
        "| measure | symbol | in a sentence | as trained | rescaled |",
        "|---|---|---|---|---|",
    ]
    for item in registry:
        before, after = run.before[item.name], run.after[item.name]
        moved = "the same" if before.value == after.value else f"**{after.value:.3g}**"
        name = f"[`{item.name}`]({item.name}.md)"
        lines.append(_row(name, item.symbol, item.definition, f"{before.value:.3g}", moved))
    return "\n".join(lines)


def _page(item: Measure) -> str:
    found = parsed(inspect.getdoc(item.function) or "")
    facts = {
        "symbol": item.symbol,
        "from": item.paper,
        "geometry × functional": f"{item.geometry} × {item.functional}",
        "invariant to": ", ".join(f"`{g}`" for g in GROUPS if g in item.invariant_to) or "nothing",
        "cost": item.cost,
    }
    rows = [_row(f"**{key}**", value) for key, value in facts.items()]
    lines = [
        f"# {item.name}",
        "",
        item.definition,
        "",
        "| | |",
        "|---|---|",
        *rows,
    ]
    for name, head in _SECTIONS.items():
        lines += ["", f"## {head}", "", section(name, found.sections[name])]
        if name == "Example":
            lines += ["", _measured(item)]
    lines += ["", "## Bear in mind", "", *(f"- {point}" for point in caveats(item))]
    lines += ["", "## Options", "", section("Args", found.sections["Args"])]
    lines += ["", f"**Returns** {prose(found.sections['Returns'])}"]
    lines += ["", "## Reference", "", section("Reference", found.sections["Reference"])]
    return "\n".join(lines)


def _measured(item: Measure) -> str:
    """What it gives for a real network, written in two ways."""
    run = example_run()
    before, after = run.before[item.name], run.after[item.name]
    same = before.value == after.value
    lines = [
        f"Of {TOLD}:",
        "",
        "```pycon",
        f">>> name = {item.name!r}",
        ">>> trained, rescaled = (fg.measure(surface)[name] for surface in both)",
        ">>> print(trained)",
        str(before),
        ">>> print(rescaled)",
        str(after),
        ">>> trained.value == rescaled.value",
        str(same),
        "```",
    ]
    if before.layers:
        lines += ["", "| layer | as trained | rescaled |", "|---|---|---|"]
        for name, value in before.layers.items():
            lines.append(_row(f"`{name}`", f"{value:.4g}", f"{after.layers[name]:.4g}"))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    """A row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
