"""A workload of a moment, and a tool that is not there."""

from __future__ import annotations

from torch import nn

from flatgauge.cli.benchmarks.row import TimingRow
from flatgauge.cli.benchmarks.tool import Tool
from flatgauge.cli.benchmarks.workloads import Kind, Workload, built

ABSENT = Tool(
    "Absent", "absent-tool", "there_is_no_such_module", product=lambda model, batches: abs
)


def tiny(name: str = "W1", *, outputs: int = 4) -> Workload:
    """A workload of a moment."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(),
            nn.Linear(5, outputs),
        )  # fmt: skip

    return built(Kind("tiny", build, None, (1, 4, 4), 40, (10, 20), 1, outputs), name)


def row(tool: str, cost: float, **more) -> TimingRow:
    return TimingRow(**{"workload": "W1", "quantity": "product", "tool": tool, "cost": cost} | more)
