"""Sweeping a surface anew without reading its graph anew, as often as wanted."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Generator

from flatgauge.cli.benchmarks.rounds import Action
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.blocks import Blocks
from flatgauge.surface.surface import LossSurface


def forget(surface: LossSurface) -> None:
    """Let a surface forget all that it found at its parameters, but not its model's graph.

    The parameters are moved and moved back, which is what a surface forgets at, under whatever
    names it keeps things.

    Args:
        surface: The surface; its model should be its own (`LossSurface.copy`).
    """
    param = surface.model.get_parameter(surface.names[0])
    before = param.detach().clone()
    with torch.no_grad():
        param.add_(1)
        _ = surface.functional_model  # Reads the model.
        param.copy_(before)
    _ = surface.functional_model


class FreshSweep:
    """Ready to sweep a surface that knows its graph and nothing else.

    Args:
        surface: The surface; its model should be its own (`LossSurface.copy`).
    """

    def __init__(self, surface: LossSurface) -> None:
        self.surface = surface
        self._last: Blocks | None = None

    def prepared(self, parts: Iterable[str], *, all_columns: bool = False) -> Action:
        """Forget what was found; sweep when called.

        Args:
            parts: What to sweep for.
            all_columns: Whether also where a sample has many outputs.

        Returns:
            What sweeps, once.
        """
        wanted = tuple(parts)
        forget(self.surface)

        def sweep() -> Blocks:
            generator = Generator().manual_seed(0)  # For mixtures, where there are many classes.
            blocks = block_curvature(
                self.surface, wanted, all_columns=all_columns, generator=generator
            )
            if blocks is self._last or blocks.parts != frozenset(wanted):
                raise AssertionError("the surface gave back what it had found before")
            self._last = blocks
            return blocks

        return sweep
