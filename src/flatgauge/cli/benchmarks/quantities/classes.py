"""Trace and diagonal where there are too many classes to sweep every column of a sample.

The error is against all columns, which are swept and timed once.
"""

from __future__ import annotations

from flatgauge.cli.benchmarks.comparison import Entry, TimedComparison
from flatgauge.cli.benchmarks.errors import distance, joined
from flatgauge.cli.benchmarks.quantities.traces import trace_of
from flatgauge.cli.benchmarks.rounds import Action
from flatgauge.cli.benchmarks.row import OWN, TimingRow

PARTS = ("trace", "diagonal")


def measured(comparison: TimedComparison) -> list[TimingRow]:
    """Time one sweep for trace and diagonal: a row for each, as their errors differ.

    Args:
        comparison: The workload.

    Returns:
        The rows.
    """
    sweep, chunk = comparison.sweep, comparison.sweep_chunk

    def everything() -> Action:
        return sweep.prepared(PARTS, all_columns=True)

    def entries(part: str) -> list[Entry]:
        return [
            Entry(part, OWN, lambda: sweep.prepared(PARTS), chunk),
            Entry(part, f"{OWN}, all columns", everything, chunk, dear=True),
        ]

    timings, units = comparison.timed(entries("both"))
    found, expected = (timing.result for timing in timings)
    errors = {
        "trace": abs(trace_of(found) / trace_of(expected) - 1),
        "diagonal": distance(joined(found)["diagonal"], joined(expected)["diagonal"]),
    }
    worst = max(
        abs(float(found[name].values["trace"]) / float(block.values["trace"]) - 1)
        for name, block in expected.layers.items()
    )
    comparison.notes.append(f"worst layer's trace off by {worst:.0e}")
    return [
        row
        for part in PARTS
        for row in comparison.rows(entries(part), timings, units, (errors[part], 0.0))
    ]
