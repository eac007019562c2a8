"""One sweep for all parts of all layers, or for the forms of units alone.

All parts are trace, diagonal, incoming and outgoing forms of every unit and relative flatness, of
every layer; BackPACK gives the diagonal alone. No other tool has the forms of units.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from flatgauge.cli.benchmarks.comparison import ALL_PARTS, Entry, TimedComparison
from flatgauge.cli.benchmarks.errors import distance, joined
from flatgauge.cli.benchmarks.rounds import Action
from flatgauge.cli.benchmarks.row import OWN, TimingRow
from flatgauge.cli.benchmarks.targets import DIAGONAL_ALONE
from flatgauge.cli.benchmarks.tool import Tool
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.blocks import Blocks

SWEEP = "all parts"


def measured(comparison: TimedComparison) -> list[TimingRow]:
    """Time the sweep for all parts, and the diagonal by other tools.

    Args:
        comparison: The tools on a workload.

    Returns:
        The rows.
    """
    entries = [
        whole_sweep(comparison),
        Entry(
            *(SWEEP, f"{OWN}, with export", partial(_exported, comparison)),
            comparison.sweep_chunk,
            dear=True,
        ),
        *diagonals(comparison),
    ]
    return comparison.compare(entries, partial(_error, comparison.expected))


def unit_forms(comparison: TimedComparison) -> list[TimingRow]:
    """Time the sweep for the forms of what leaves units, and for those of what enters them.

    Args:
        comparison: The tools on a workload.

    Returns:
        The rows.
    """
    entries = [
        Entry(
            *(f"{side} forms", OWN, partial(comparison.sweep.prepared, (side,))),
            comparison.sweep_chunk,
        )
        for side in ("outgoing", "incoming")
    ]
    return comparison.compare(entries, partial(_error, comparison.expected))


def whole_sweep(comparison: TimedComparison) -> Entry:
    """A sweep for all parts."""
    prepare = partial(comparison.sweep.prepared, ALL_PARTS)
    return Entry(SWEEP, OWN, prepare, comparison.sweep_chunk)


def diagonals(comparison: TimedComparison) -> list[Entry]:
    """The diagonal by other tools."""
    found = []
    for tool in comparison.tools:
        if tool.diagonal is None:
            continue
        size = comparison.batch(tool, "diagonal", partial(_trial, comparison))
        if size is not None:
            prepare = partial(_peer, comparison, tool, size)
            found.append(Entry(SWEEP, DIAGONAL_ALONE, prepare, size, yardstick=True))
    return found


def _error(expected: dict[str, Tensor], _: str, result: Any) -> float:
    """The error of the worst part."""
    parts = joined(result) if isinstance(result, Blocks) else {"diagonal": result}
    return max(distance(value, expected[part]) for part, value in parts.items())


def _exported(comparison: TimedComparison) -> Action:
    return lambda: block_curvature(comparison.surface(), ALL_PARTS)


def _peer(comparison: TimedComparison, tool: Tool, size: int, samples: int | None = None) -> Action:
    assert tool.diagonal is not None
    return tool.diagonal(comparison.workload.model, comparison.workload.batches(size, samples))


def _trial(comparison: TimedComparison, tool: Tool, size: int, samples: int) -> object:
    return _peer(comparison, tool, size, samples)()
