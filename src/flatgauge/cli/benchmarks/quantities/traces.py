"""The trace of the Hessian: exactly by a sweep, or by other tools' estimates.

The model's graph is read once and kept, as it is for users who measure more than one thing; what
that costs is in a line of its own. Estimates come with the error that they had in this run: a peer
is a yardstick whatever its error.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flatgauge.cli.benchmarks.comparison import Entry, TimedComparison
from flatgauge.cli.benchmarks.errors import relative_error
from flatgauge.cli.benchmarks.rounds import Action
from flatgauge.cli.benchmarks.row import OWN, TimingRow
from flatgauge.cli.benchmarks.tool import Number
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.blocks import Blocks

TRACE = "trace"


def measured(comparison: TimedComparison) -> list[TimingRow]:
    """Time the trace by every tool.

    Args:
        comparison: The tools on a workload.

    Returns:
        The rows.
    """
    expected = float(comparison.expected["trace"].sum())

    def error(_: str, result: Any) -> float:
        found = trace_of(result) if isinstance(result, Blocks) else result
        return relative_error(found, expected)

    chunk = comparison.sweep_chunk
    entries = [
        Entry(TRACE, OWN, lambda: comparison.sweep.prepared(("trace",)), chunk),
        Entry(TRACE, f"{OWN}, with export", partial(_exported, comparison), chunk, dear=True),
    ]
    for tool in comparison.tools:
        size = comparison.product_batch(tool) if tool.traces else None
        if size is None:
            continue
        for name, trace in tool.traces.items():
            prepare = partial(_peer, comparison, trace, size)
            entries.append(Entry(TRACE, name, prepare, size, yardstick=True, dear=True))
    return comparison.compare(entries, error)


def trace_of(blocks: Blocks) -> float:
    """The trace of all blocks together."""
    return sum(float(block.values["trace"]) for block in blocks.values())


def _exported(comparison: TimedComparison) -> Action:
    return lambda: block_curvature(comparison.surface(), ("trace",))


def _peer(comparison: TimedComparison, trace: Number, size: int) -> Action:
    batches = comparison.workload.batches(size)

    def estimate() -> float:
        torch.manual_seed(0)
        return trace(comparison.workload.model, batches)

    return estimate
