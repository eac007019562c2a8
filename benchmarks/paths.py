"""What flatness in path space costs.

    python -m benchmarks.paths --threads 2 --rounds 3 --markdown paths.md

Reading the basis paths of a model whose gauge is known, mapping values back to weights, and the
trace by path values: the second sweep after the one that all measures share, or with it. The
error is that of the trace, against the same in double precision. No other tool has any of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

import flatgauge as fg
from benchmarks import rounds, table, workloads
from benchmarks.comparison import Comparison
from benchmarks.rounds import Action, Method
from benchmarks.table import Row
from flatgauge.curvature import block_curvature
from flatgauge.path_space import paths_of
from flatgauge.symmetry.of_surface import gauge_of


class Paths(Comparison):
    """Path space on one workload."""

    def timed(self, count: int) -> list[Row]:
        """Time reading, mapping and measuring.

        Args:
            count: How many rounds count.

        Returns:
            The rows.
        """
        expected = self._trace(self.precise())
        methods = [
            Method("basis paths", self._reading),
            Method("values to weights", self._mapping),
            Method("psi_trace, after the sweep", self._second),
            Method("psi_trace", self._both),
        ]
        timings, units = rounds.timed(self.unit, methods, rounds=count, warm_up=0)
        return self.rows(
            *("path space", timings, units),
            lambda found: abs(found / expected - 1) if isinstance(found, float) else 0.0,
            batches={},
            chunk=self.surface().chunk,
            yardsticks=(),
        )

    def _known(self) -> fg.LossSurface:
        """A surface whose graph and gauge are read."""
        surface = self.surface()
        gauge_of(surface)
        surface.gradient()
        return surface

    def _reading(self) -> Action:
        surface = self._known()
        return lambda: paths_of(surface)

    def _mapping(self) -> Action:
        paths = paths_of(self._known())
        return lambda: paths.to_weights(paths.values)

    def _second(self) -> Action:
        surface = self._known()
        paths_of(surface)
        block_curvature(surface, ("diagonal",), estimate=False)
        return lambda: self._trace(surface)

    def _both(self) -> Action:
        surface = self._known()
        block_curvature(surface, ("trace",), estimate=False)  # Reads the graph.
        return lambda: self._trace(surface)

    @staticmethod
    def _trace(surface: fg.LossSurface) -> float:
        generator = torch.Generator().manual_seed(0)
        return fg.measures.psi_trace(surface, generator=generator).value


def sections(options: argparse.Namespace) -> Iterator[tuple[str, list[Row]]]:
    """Time what the user asks for, workload by workload."""
    for name in options.workloads:
        paths = Paths(workloads.load(name, scale=options.scale, folder=options.data))
        rows = paths.timed(options.rounds)
        found = paths_of(paths.surface())
        yield f"{paths.description(rows)}; {found.describe().splitlines()[0]}", rows


def main() -> None:
    """Time what the user asks for, print it, write it."""
    options = table.parser("paths", "Time path space.", eigen="ignored").parse_args()
    rounds.set_threads(options.threads)
    table.show(options, [], sections(options))


if __name__ == "__main__":
    main()
