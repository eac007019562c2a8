"""The results of a run: one `TimingRow` per line of the tables, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: What flatgauge is called in the lines that targets are held against.
OWN = "flatgauge"

#: What the cost of a product by counting matrix products is called.
LIMIT = "kept-graph limit"

#: Results further apart are not of the same matrix, and eigenvalues are asked for to this.
AGREEMENT = 1e-3


@dataclass(frozen=True)
class TimingRow:
    """One line of the results.

    Attributes:
        workload: On which network and data.
        quantity: What was computed.
        tool: By what.
        cost: In gradients, the median of all rounds.
        batch: Samples at a time, None where there are none.
        setting: Where in a series, empty outside of them.
        spread: The cheapest and the most expensive round; None for what was not timed.
        rounds: How many counted.
        to_best_peer: Cost divided by that of the best peer; None without one.
        eligible: Whether it may be the best peer.
        error: Relative to flatgauge in double precision, or to all columns; None if not known.
        unit_seconds: Processor time of a gradient, the median of all rounds.
        sample_seconds: Processor time per sample.
        target: What is aimed at, as text.
        verdict: Whether it was met, as text.
    """

    workload: str
    quantity: str
    tool: str
    cost: float
    batch: int | None = None
    setting: str = ""
    spread: tuple[float, float] | None = None
    rounds: int = 0
    to_best_peer: float | None = None
    eligible: bool = False
    error: float | None = None
    unit_seconds: float | None = None
    sample_seconds: float | None = None
    target: str = ""
    verdict: str = ""


@dataclass
class Results:
    """The results so far.

    Attributes:
        facts: Machine, versions and options: what the numbers depend on.
        workloads: What each workload is, by name.
        rows: All lines, in their order.
        notes: Further findings.
        failures: What could not be measured, and why.
        complete: Whether the run went through to its end.
    """

    facts: dict[str, Any]
    workloads: dict[str, str] = field(default_factory=dict)
    rows: list[TimingRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    complete: bool = False

    def about(self, name: str) -> str:
        """A line on a workload and its unit."""
        rows = [row for row in self.rows if row.workload == name and not row.setting]
        seconds = [row.unit_seconds for row in rows if row.unit_seconds]
        unit = f", G = {1000 * min(seconds):.3g} ms of processor time" if seconds else ""
        return f"{name}: {self.workloads[name]}{unit}"

    def to_json(self) -> str:
        """Everything, for programs."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """Everything, as a page."""
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        parts = [facts, *(f"- {self.about(name)}" for name in self.workloads), markdown(self.rows)]
        parts += [f"- {line}" for line in [*self.notes, *self.failures]]
        return "\n\n".join(filter(None, parts)) + "\n"


#: Columns of the tables: a title, and how a line's cell is written.
_COLUMNS: dict[str, Callable[[TimingRow], str]] = {
    "workload": lambda row: row.workload,
    "setting": lambda row: row.setting,
    "quantity": lambda row: row.quantity,
    "tool": lambda row: row.tool,
    "batch": lambda row: "" if row.batch is None else str(row.batch),
    "cost / G": lambda row: f"{row.cost:.2f}",
    "spread": lambda row: _spread(row),
    "/ best peer": lambda row: "" if row.to_best_peer is None else f"{row.to_best_peer:.2f}",
    "error": lambda row: "" if row.error is None else f"{row.error:.0e}",
    "µs / sample": lambda row: (
        "" if row.sample_seconds is None else f"{1e6 * row.sample_seconds:,.1f}"
    ),
    "target": lambda row: row.target,
    "verdict": lambda row: row.verdict,
}

#: Columns of single lines, and of series: lines that have a setting.
SINGLE = tuple(title for title in _COLUMNS if title not in ("setting", "µs / sample"))
SERIES = tuple(title for title in _COLUMNS if title not in ("batch", "error", "target", "verdict"))


def markdown(rows: Sequence[TimingRow]) -> str:
    """Lines as a table in Markdown, series in a table of their own."""
    tables = []
    for titles, lines in (
        (SINGLE, [row for row in rows if not row.setting]),
        (SERIES, [row for row in rows if row.setting]),
    ):
        cells = [[_COLUMNS[title](row) for title in titles] for row in lines]
        if cells:
            table = [titles, ["---"] * len(titles), *cells]
            tables.append("\n".join(f"| {' | '.join(line)} |" for line in table))
    return "\n\n".join(tables)


def _spread(row: TimingRow) -> str:
    """The cheapest and the most expensive round, or that there was one."""
    if row.spread is None:
        return ""
    return "one round" if row.rounds == 1 else "–".join(f"{end:.2f}" for end in row.spread)
