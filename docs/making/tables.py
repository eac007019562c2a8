"""Tables in written pages that are made from the registry and from the benchmark's, between marks.

`<!-- made: NAME -->` and `<!-- end -->` enclose what the function of that name below gives;
`python docs/build.py --tables` puts it there, and a test sees that it is up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from flatgauge.measures import GROUPS, Measure, registry

ROOT = Path(__file__).parents[2]

_MADE = re.compile(r"(<!-- made: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

#: The groups in the words of a reader who has not met them yet.
_COLUMNS = {
    "layerwise": "layers",
    "nodewise": "units",
    "permutation": "order",
    "output_scale": "output scale",
    "branches": "branches",
}

#: What the speed table shows of the benchmark's tables, which have so many columns.
_WORKLOADS = {"W1": "MLP 784-512⁵-10", "W2": "LeNet-5"}
_QUANTITIES = {
    "product": "one Hessian product",
    "trace": "trace of the Hessian (here exact)",
    "top eigenvalue": "largest eigenvalue, to 1e-3",
    "layers' top eigenvalues": "largest eigenvalue of every layer",
}
_BENCHMARK = 8


def pages() -> list[Path]:
    """The written pages that hold such tables."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [path for path in found if _MADE.search(path.read_text())]


def refreshed(text: str) -> str:
    """A page with the tables of today.

    Args:
        text: The page.

    Returns:
        The page.
    """
    return _MADE.sub(lambda found: f"{found[1]}{_TABLES[found[2]]()}\n{found[4]}", text)


def refresh() -> None:
    """Bring the tables of all written pages up to date."""
    for path in pages():
        path.write_text(refreshed(path.read_text()))


def invariances() -> str:
    """Measures of one family in a row, with what cannot move them."""
    rows = [("measures", "in units of", *_COLUMNS.values())]
    for (geometry, claims), items in _families().items():
        names = ", ".join(f"`{item.name}`" for item in items)
        rows.append((names, geometry, *_marks(claims)))
    return _table(rows)


def costs() -> str:
    """Every measure in a row: what it asks, what cannot move it, and what it costs."""
    rows = [("measure", "asks for", *_COLUMNS.values(), "cost")]
    for item in registry:
        asked = f"{item.functional}, {item.geometry}"
        rows.append((f"`{item.name}`", asked, *_marks(item.invariant_to), item.cost))
    return _table(rows)


def groups() -> str:
    """The ways of rewriting a network."""
    return _table([("group", "what is done"), *((f"`{g}`", moves) for g, moves in GROUPS.items())])


def speed() -> str:
    """What the main quantities cost here and with the best other tool, by the performance page."""
    measured: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    for line in (ROOT / "docs/performance.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == _BENCHMARK and cells[1] in _QUANTITIES:
            workload, what, tool, _, cost, _, ratio, _ = cells
            side = "ours" if tool == "flatgauge" else "best" if ratio == "1.00" else None
            if side:
                measured.setdefault((what, workload), {})[side] = (cost, tool)
    rows = [
        ("in gradients", *(f"{name}: flatgauge | best other tool" for name in _WORKLOADS.values()))
    ]
    for what, words in _QUANTITIES.items():
        row = [words]
        for workload in _WORKLOADS:
            (ours, _), (best, tool) = (measured[what, workload][side] for side in ("ours", "best"))
            row.append(f"**{ours}** | {best} ({tool.partition(',')[0]})")
        rows.append(tuple(row))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * (1 + 2 * len(_WORKLOADS)), *lines[1:]])


def _families() -> dict[tuple[str, frozenset[str]], list[Measure]]:
    """Measures by geometry and claims."""
    found: dict[tuple[str, frozenset[str]], list[Measure]] = {}
    for item in registry:
        shown = item.invariant_to.intersection(_COLUMNS)
        found.setdefault((item.geometry, shown), []).append(item)
    return found


def _marks(claims: Iterable[str]) -> list[str]:
    return ["✓" if group in claims else "" for group in _COLUMNS]


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


_TABLES = {"invariances": invariances, "costs": costs, "groups": groups, "speed": speed}
