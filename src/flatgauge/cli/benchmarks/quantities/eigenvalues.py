"""The largest eigenvalue of the whole Hessian, to 1e-3, with all it takes from nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator

from flatgauge.cli.benchmarks.comparison import Entry, TimedComparison
from flatgauge.cli.benchmarks.errors import relative_error
from flatgauge.cli.benchmarks.one_graph import fits
from flatgauge.cli.benchmarks.rounds import Action
from flatgauge.cli.benchmarks.row import AGREEMENT, OWN, TimingRow
from flatgauge.cli.benchmarks.tool import Tool
from flatgauge.curvature.operators import Hessian
from flatgauge.estimators.eigenvalues import top_eigenvalues
from flatgauge.surface.surface import LossSurface

EIGENVALUE = "top eigenvalue"


def measured(comparison: TimedComparison) -> list[TimingRow]:
    """Time the largest eigenvalue by every tool; those that are off by more are no yardsticks.

    Args:
        comparison: The tools on a workload.

    Returns:
        The rows.
    """
    expected = _eigenvalue(comparison.precise(), tolerance=1e-6, seed=1)

    def error(_: str, result: Any) -> float:
        return relative_error(result, expected)

    chunk = comparison.surface().chunk
    own = Entry(EIGENVALUE, OWN, lambda: lambda: _eigenvalue(comparison.surface()), chunk)
    entries = [own]
    for tool in comparison.tools:
        if tool.eigenvalue is None or (tool.whole and not fits(comparison, tool)):
            continue
        size = comparison.product_batch(tool)
        if size is not None:
            prepare = partial(_peer, comparison, tool, size)
            entries.append(
                Entry(EIGENVALUE, tool.name, prepare, size, yardstick=not tool.whole),
            )
    return comparison.compare(entries, error, reliable=AGREEMENT)


def _eigenvalue(surface: LossSurface, *, tolerance: float = AGREEMENT, seed: int = 0) -> float:
    generator = Generator().manual_seed(seed)
    pairs = top_eigenvalues(Hessian(surface), tolerance=tolerance, generator=generator)
    return float(pairs.values[0])


def _peer(comparison: TimedComparison, tool: Tool, size: int) -> Action:
    batches = comparison.workload.batches(size)

    def eigenvalue() -> float:
        assert tool.eigenvalue is not None
        torch.manual_seed(0)
        return tool.eigenvalue(comparison.workload.model, batches)

    return eigenvalue
