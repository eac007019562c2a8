"""What the site needs beyond Sphinx: pages from the registry, MathML, links of names.

Enter: the registry of measures, the public names, `caveats.toml`. Leave, written before Sphinx
reads the sources: `measures/` (a page for every measure, two tables) and `reference/` (a page for
every public name and package). None of them is committed.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import shutil
import tomllib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from docutils import nodes

import flatgauge as fg
from example_run import NETWORKS, example_run
from flatgauge.measures import GROUPS, Measure, registry
from flatgauge.report.formulas import mathml

DOCS = Path(__file__).parent
#: Packages with a page of their own, beside the names of `flatgauge` itself.
PACKAGES = ("estimators", "curvature", "symmetry", "geometry", "measures", "studies.networks")
PACKAGES += ("studies.statistics",)
#: Groups that the table of costs shows, in the words of a reader who has not met them yet.
COLUMNS = {
    "layerwise": "layers",
    "nodewise": "units",
    "permutation": "order",
    "output_scale": "output scale",
    "branches": "branches",
}
FENCE = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
#: Code in a line that is no link yet, and links to files of which there is no page.
CODE = re.compile(r"(?<![\[`])`([\w.]+)(\([^`]*\))?`(?![`\]])")
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:(?:\.\./)+(?:src|tests)|results/README)[^)]*\)")


def setup(app: Any) -> dict[str, bool]:
    """Connect everything to Sphinx."""
    app.add_html_math_renderer(
        "mathml", (partial(write_math, "inline"), None), (partial(write_math, "block"), None)
    )
    # Before the gallery, whose scripts enter measures of their own into the registry.
    app.connect("builder-inited", write_pages, priority=100)
    app.connect("source-read", link_names)
    app.connect("autodoc-process-docstring", cite_papers)
    return {"parallel_read_safe": True}


def write_math(display: str, writer: Any, node: Any) -> None:
    """Write a formula as MathML; one that cannot be written stops the build."""
    element = mathml(" ".join(node.astext().split()), display=display)
    if element is None:
        raise ValueError(f"the formula `{node.astext()}` cannot be written as MathML.")
    writer.body.append(element)
    raise nodes.SkipNode


def link_names(app: Any, page: str, source: list[str]) -> None:
    """Link measures and public names to their pages, outside of headings and code."""
    known = {item.name: f"measures/{item.name}" for item in registry}
    known |= {f"fg.{name}": f"reference/{name}" for name in fg.__all__}

    def link(found: re.Match[str]) -> str:
        target = known.get(found[1], page)
        if target == page:
            return found[0]
        return f"[{found[0]}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}.md)"

    if app.env.doc2path(page).endswith(".md"):
        parts = FENCE.split(OUTSIDE.sub(r"\1", source[0]))
        for k in range(0, len(parts), 2):
            lines = parts[k].split("\n")
            parts[k] = "\n".join(x if x.startswith("#") else CODE.sub(link, x) for x in lines)
        # Doctest wants an empty line before the fence that closes an example.
        source[0] = re.sub(r"\n\n```$", "\n```", "".join(parts), flags=re.MULTILINE)


def cite_papers(app: Any, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Turn ``[key]`` in a docstring into a citation, and keep ``|x|`` from being a substitution."""
    for k, line in enumerate(lines):
        if "math:" not in line and ">>>" not in line:
            line = re.sub(r"(?<![`|\w])\|([^\s|`][^|`]*)\|", r"\\|\1\\|", line)
        lines[k] = re.sub(r"(?<![\w`])\[([a-z]+\d{4}[a-z]*\w*)\](?!_)", r":cite:t:`\1`", line)


def write_pages(app: Any) -> None:
    """Write all pages and tables that are made."""
    for folder in ("measures", "reference"):
        shutil.rmtree(DOCS / folder, ignore_errors=True)
        (DOCS / folder).mkdir()
    write_measures(DOCS / "measures")
    write_reference(DOCS / "reference")


def write_measures(folder: Path) -> None:
    """Write a page for every measure, the overview, and the tables that other pages include."""
    before, after = example_run()
    costs, overview = [], []
    for item in registry:
        one, two = before[item.name].value, after[item.name].value
        moved = "the same" if one == two else f"**{two:.3g}**"
        link = f"[`{item.name}`]({item.name}.md)"
        overview.append((link, item.symbol, item.definition, f"{one:.3g}", moved))
        ticks = ("✓" if group in item.invariant_to else "" for group in COLUMNS)
        asked = f"{item.functional}, {item.geometry}"
        costs.append((f"`{item.name}`", asked, *ticks, item.cost))
        (folder / f"{item.name}.md").write_text(measure_page(item))
    heads = ("measure", "asks for", *COLUMNS.values(), "cost")
    (folder / "costs.inc").write_text(table(heads, costs))
    groups = [(f"`{group}`", what) for group, what in GROUPS.items()]
    (folder / "groups.inc").write_text(table(("group", "what is done"), groups))
    heads = ("measure", "symbol", "in a sentence", "as trained", "rescaled")
    text = (
        f"{len(registry)} measures; lower is flatter, always. Every one of them can also be taken "
        "at the [balanced point](../gauge.md#balancing) (`balanced:NAME`), which makes it "
        f"invariant to every rescaling.\n\nThe numbers are of {NETWORKS}. No output differs by "
        "one bit."
    )
    parts = ["# All measures", text, table(heads, overview), toctree(m.name for m in registry)]
    (folder / "index.md").write_text("\n\n".join(parts))


def write_reference(folder: Path) -> None:
    """Write a page for every public name and package, and the overview."""
    rows = []
    for name in [*fg.__all__, *PACKAGES]:
        module = name in PACKAGES
        item = importlib.import_module(f"flatgauge.{name}") if module else getattr(fg, name)
        title = f"flatgauge.{name}" if module else f"fg.{name}"
        kind = "module" if module else "class" if inspect.isclass(item) else "function"
        options = {
            "module": "   :members:\n   :imported-members:\n   :no-index:\n",
            "class": "   :members:\n   :inherited-members: dict\n",
        }
        body = f".. auto{kind}:: flatgauge.{name}\n{options.get(kind, '')}"
        (folder / f"{name}.md").write_text(f"# {title}\n\n```{{eval-rst}}\n{body}```\n")
        summary = " ".join((inspect.getdoc(item) or "").partition("\n\n")[0].split())
        rows.append((f"[`{title}`]({name}.md)", summary.replace("``", "`")))
    parts = ["# Public names", table(("name", ""), rows), toctree([*fg.__all__, *PACKAGES])]
    (folder / "index.md").write_text("\n\n".join(parts))


def measure_page(item: Measure) -> str:
    """What a measure declares, its docstring, what to bear in mind, and the example's values."""
    facts = {
        "symbol": item.symbol,
        "from": item.paper,
        "geometry × functional": f"{item.geometry} × {item.functional}",
        "invariant to": ", ".join(f"`{g}`" for g in GROUPS if g in item.invariant_to) or "nothing",
        "cost": item.cost,
    }
    before, after = (report[item.name] for report in example_run())
    rows = [("all", str(before).strip(), str(after).strip())]
    for name, value in (before.layers or {}).items():
        rows.append((f"`{name}`", f"{value:.4g}", f"{after.layers[name]:.4g}"))
    parts = [
        f"# {item.name}\n\n{item.definition}",
        table(("", ""), [(f"**{key}**", value) for key, value in facts.items()]),
        f"```{{eval-rst}}\n.. autofunction:: flatgauge.measures.{item.name}\n```",
        "## Bear in mind",
        "\n".join(f"- {point}" for point in caveats(item)),
        f"## On an example\n\nOf {NETWORKS}:",
        table(("layer", "as trained", "rescaled"), rows),
    ]
    return "\n\n".join(parts)


def caveats(item: Measure) -> list[str]:
    """What to bear in mind with a measure, from what it declares about itself."""
    texts = tomllib.loads((DOCS / "caveats.toml").read_text())
    found = [texts["geometry"].get(item.geometry), texts["functional"].get(item.functional)]
    moved = [f"*{group}* ({GROUPS[group]})" for group in GROUPS if group not in item.invariant_to]
    if moved:
        found.append(f"It makes no claim under {', '.join(moved)}.")
    for (option, value), groups in item.not_with.items():
        lost = ", ".join(group for group in GROUPS if group in groups)
        found.append(f"With `{option}={value!r}` it is not invariant to {lost}.")
    if item.draws:
        found.append(
            "It may draw random numbers: `fg.measure(..., seed=)` fixes them, and the function "
            "itself takes a `generator=`."
        )
    return [point for point in found if point]


def toctree(pages: Iterable[str]) -> str:
    """The pages below a page, for the navigation."""
    return "\n".join(["```{toctree}", ":hidden:", "", *pages, "```", ""])


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])
