"""What a run has found so far: for programs, for a page, for a reader."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flatgauge.cli.benchmarks.row import TimingRow
from flatgauge.cli.benchmarks.table import markdown
from flatgauge.cli.benchmarks.targets import judged


@dataclass
class Results:
    """What a run has found so far.

    Attributes:
        facts: Machine, versions and options: what the numbers depend on.
        workloads: What each workload is, by name.
        found: All lines, in their order.
        notes: What there is to say beside them.
        failures: What could not be measured, and why.
        complete: Whether the run went through to its end.
    """

    facts: dict[str, Any]
    workloads: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: list[TimingRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def rows(self) -> list[TimingRow]:
        """All lines, with targets and verdicts."""
        return judged(self.found)

    def header(self) -> str:
        """What the numbers depend on, in a line."""
        return ", ".join(
            f"{name} {value}" for name, value in self.facts.items() if value is not None
        )

    def about(self, name: str, rows: Sequence[TimingRow]) -> str:
        """What a workload is, in a line.

        Args:
            name: The workload.
            rows: Its lines.

        Returns:
            The line; just the name of what is no workload.
        """
        facts = self.workloads.get(name)
        if facts is None:
            return name
        seconds = [row.unit_seconds for row in rows if row.unit_seconds and not row.setting]
        unit = f", G = {1000 * min(seconds):.3g} ms of processor time" if seconds else ""
        return (
            f"{name}: {facts['about']}, {facts['parameters']:,} parameters, "
            f"N = {facts['samples']:,}, loss {facts['loss']:.3g}{unit}"
        )

    def to_json(self) -> str:
        """Everything, for programs."""
        contents = {
            "complete": self.complete,
            "facts": self.facts,
            "workloads": self.workloads,
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
            "failures": self.failures,
        }
        return json.dumps(contents, indent=2, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """Everything, as a page."""
        rows = self.rows
        abouts = [self.about(n, [r for r in rows if r.workload == n]) for n in self.workloads]
        parts = [self.header(), *(f"- {line}" for line in abouts), markdown(rows)]
        parts += [f"- {line}" for line in [*self.notes, *self.failures]]
        return "\n\n".join(filter(None, parts)) + "\n"
