"""Flatness in path space.

Reading the basis paths of a model whose gauge is known, mapping values back to weights, and the
trace by path values: the second sweep after the one that all measures share, or with it. The
error is that of the trace, against the same in double precision. No other tool has any of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flatgauge.cli.benchmarks.comparison import Entry, TimedComparison
from flatgauge.cli.benchmarks.rounds import Action
from flatgauge.cli.benchmarks.row import OWN, TimingRow
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.measures.grid import psi_trace
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.find import surface_gauge
from flatgauge.symmetry.paths.basis import surface_paths


def measured(comparison: TimedComparison) -> list[TimingRow]:
    """Time reading, mapping and measuring.

    Args:
        comparison: The workload.

    Returns:
        The rows.
    """
    expected = _trace(comparison.precise())

    def error(_: str, result: Any) -> float | None:
        return abs(result / expected - 1) if isinstance(result, float) else None

    actions = {
        "basis paths": _reading,
        "path values to weights": _mapping,
        "psi_trace, after the sweep": _second,
        "psi_trace": _both,
    }
    chunk = comparison.surface().chunk
    entries = [
        Entry(name, OWN, partial(prepare, comparison), chunk) for name, prepare in actions.items()
    ]
    comparison.notes.append(surface_paths(comparison.surface()).describe().splitlines()[0])
    return comparison.compare(entries, error)


def _known(comparison: TimedComparison) -> LossSurface:
    """A surface whose graph and gauge are read."""
    surface = comparison.surface()
    surface_gauge(surface)
    surface.gradient()
    return surface


def _reading(comparison: TimedComparison) -> Action:
    surface = _known(comparison)
    return lambda: surface_paths(surface)


def _mapping(comparison: TimedComparison) -> Action:
    paths = surface_paths(_known(comparison))
    return lambda: paths.to_weights(paths.values)


def _second(comparison: TimedComparison) -> Action:
    surface = _known(comparison)
    surface_paths(surface)
    block_curvature(surface, ("diagonal",), estimate=False)
    return lambda: _trace(surface)


def _both(comparison: TimedComparison) -> Action:
    surface = _known(comparison)
    block_curvature(surface, ("trace",), estimate=False)  # Reads the graph.
    return lambda: _trace(surface)


def _trace(surface: LossSurface) -> float:
    generator = torch.Generator().manual_seed(0)
    return psi_trace(surface, generator=generator).value
