"""The largest eigenvalue of every layer's block, to 1e-3.

By the same Lanczos from the same start vectors: here on what one sweep keeps, with other tools on
products with the block of one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator

from flatgauge.cli.benchmarks.comparison import Entry, TimedComparison
from flatgauge.cli.benchmarks.errors import relative_error
from flatgauge.cli.benchmarks.fresh import forget
from flatgauge.cli.benchmarks.rounds import Action
from flatgauge.cli.benchmarks.row import AGREEMENT, OWN, TimingRow
from flatgauge.cli.benchmarks.tool import Tool
from flatgauge.curvature.block_eigenvalues import block_eigenvalues
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.estimators.eigenvalues import top_eigenvalues
from flatgauge.estimators.linalg import SupportsMatmul
from flatgauge.surface.surface import LossSurface

EIGENVALUES = "layers' top eigenvalues"

#: Most products to spend on one layer.
_MAX_PRODUCTS = 300


def measured(comparison: TimedComparison) -> list[TimingRow]:
    """Time the largest eigenvalue of every layer.

    Args:
        comparison: The tools on a workload.

    Returns:
        The rows.
    """
    surface = comparison.sweep.surface
    layers = sweep_of(surface).plan.layers
    names = [name for name in surface.names if name in layers]
    expected = _eigenvalues(names, comparison.precise(), tolerance=1e-6, seed=1)

    def error(_: str, result: Any) -> float:
        return max(relative_error(result[name], expected[name]) for name in names)

    entries = [Entry(EIGENVALUES, OWN, partial(_own, names, surface), comparison.sweep_chunk)]
    for tool in comparison.tools:
        if tool.block is None:
            continue
        size = comparison.batch(tool, "block", partial(_trial, comparison, names))
        if size is not None:
            prepare = partial(_peer, comparison, names, tool, size)
            entries.append(Entry(EIGENVALUES, tool.name, prepare, size, yardstick=True, dear=True))
    comparison.notes.append(f"{len(names)} layers")
    return comparison.compare(entries, error)


def _own(names: Sequence[str], surface: LossSurface) -> Action:
    forget(surface)
    return partial(_eigenvalues, names, surface)


def _eigenvalues(
    names: Sequence[str], surface: LossSurface, *, tolerance: float = AGREEMENT, seed: int = 0
) -> dict[str, float]:
    generator = Generator().manual_seed(seed)
    found = block_eigenvalues(
        surface, names, tolerance=tolerance, max_matvecs=_MAX_PRODUCTS, generator=generator
    )
    return {name: pair.value for name, pair in found.items()}


def _peer(comparison: TimedComparison, names: Sequence[str], tool: Tool, size: int) -> Action:
    blocks = _blocks(comparison, names, tool, size)

    def eigenvalues() -> dict[str, float]:
        generator = Generator().manual_seed(0)
        found = {}
        for name in reversed(names):  # As flatgauge goes: the same start vectors.
            pairs = top_eigenvalues(
                blocks[name],
                tolerance=AGREEMENT,
                max_matvecs=_MAX_PRODUCTS,
                generator=generator,
            )
            found[name] = float(pairs.values[0])
        return found

    return eigenvalues


def _trial(
    comparison: TimedComparison, names: Sequence[str], tool: Tool, size: int, samples: int
) -> list[Any]:
    """One product with the first block and one with the last."""
    blocks = _blocks(comparison, (names[0], names[-1]), tool, size, samples)
    return [block @ torch.ones(block.shape[0]) for block in blocks.values()]


def _blocks(
    comparison: TimedComparison,
    names: Sequence[str],
    tool: Tool,
    size: int,
    samples: int | None = None,
) -> dict[str, SupportsMatmul]:
    assert tool.block is not None
    model, batches = comparison.workload.model, comparison.workload.batches(size, samples)
    return {name: tool.block(model, batches, model.get_parameter(name)) for name in names}
