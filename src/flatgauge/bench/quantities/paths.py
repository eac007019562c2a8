"""Flatness in path space.

Reading the basis paths of a model whose gauge is known, mapping values back to weights, and the
trace by path values: the second sweep after the one that all measures share, or with it. The
error is that of the trace, against the same in double precision. No other tool has any of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flatgauge.bench.comparison import Comparison, Entry
from flatgauge.bench.rounds import Action
from flatgauge.bench.row import OWN, Row
from flatgauge.curvature import block_curvature
from flatgauge.measures import psi_trace
from flatgauge.path_space import paths_of
from flatgauge.surface import LossSurface
from flatgauge.symmetry.of_surface import gauge_of


def measured(comparison: Comparison) -> list[Row]:
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
    comparison.notes.append(paths_of(comparison.surface()).describe().splitlines()[0])
    return comparison.compare(entries, error)


def _known(comparison: Comparison) -> LossSurface:
    """A surface whose graph and gauge are read."""
    surface = comparison.surface()
    gauge_of(surface)
    surface.gradient()
    return surface


def _reading(comparison: Comparison) -> Action:
    surface = _known(comparison)
    return lambda: paths_of(surface)


def _mapping(comparison: Comparison) -> Action:
    paths = paths_of(_known(comparison))
    return lambda: paths.to_weights(paths.values)


def _second(comparison: Comparison) -> Action:
    surface = _known(comparison)
    paths_of(surface)
    block_curvature(surface, ("diagonal",), estimate=False)
    return lambda: _trace(surface)


def _both(comparison: Comparison) -> Action:
    surface = _known(comparison)
    block_curvature(surface, ("trace",), estimate=False)  # Reads the graph.
    return lambda: _trace(surface)


def _trace(surface: LossSurface) -> float:
    generator = torch.Generator().manual_seed(0)
    return psi_trace(surface, generator=generator).value
