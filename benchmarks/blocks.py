"""What the Hessian's diagonal blocks cost, in gradients, here and with other tools.

    python -m benchmarks.blocks --threads 2 --rounds 5 --eigen --classes --markdown blocks.md

Units, batches and chunks are those of `benchmarks.products`. The model's graph is exported once
and kept, as it is for users who measure more than one thing; what that costs is in one row of its
own. BackPACK gives the diagonal, of which the trace is the sum. The largest eigenvalues of all
layers are asked for to 1e-3, by the same Lanczos from the same start vectors, here on what one
sweep keeps, with curvlinops on products with the block of one layer at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Generator, Tensor

import flatgauge as fg
from benchmarks import rounds, table, workloads
from benchmarks.comparison import Comparison
from benchmarks.peers import (
    BLOCK_PEERS,
    DIAGONAL_PEERS,
    BlockPeer,
    DiagonalPeer,
    Tool,
    quiet,
    usable,
)
from benchmarks.rounds import Action, Method
from benchmarks.table import AGREEMENT, Row
from benchmarks.workloads import Workload
from flatgauge.curvature.blocks import DEFAULT_PROBES, Blocks, block_curvature
from flatgauge.curvature.eigenvalues import block_eigenvalues
from flatgauge.curvature.sweep import Sweeper
from flatgauge.estimators import top_eigenvalues
from flatgauge.estimators.matrix import SupportsMatmul

#: What is swept, by what it is called in the table.
SWEEPS = {
    "all parts": ("trace", "diagonal", "incoming", "outgoing", "relative"),
    "diagonal and trace": ("diagonal", "trace"),
    "trace": ("trace",),
    "unit forms": ("incoming", "outgoing"),
    "incoming forms": ("incoming",),
}

#: Most products to spend on the largest eigenvalue of one layer.
MAX_PRODUCTS = 300


class BlockComparison(Comparison):
    """The blocks by every tool on one workload.

    Attributes:
        kept: The workload as flatgauge sees it, with its graph exported.
        chunk: The chunk flatgauge chooses for sweeps.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.kept = self.surface()
        self.chunk = self.kept.recall("sweeper", lambda: Sweeper(self.kept)).chunk

    def sweeps(self, peers: Sequence[DiagonalPeer], count: int) -> list[Row]:
        """Time sweeps, and the diagonal by other tools.

        Args:
            peers: Those that can be used.
            count: How many rounds count.

        Returns:
            The rows.
        """
        with quiet():
            expected = _joined(block_curvature(self.precise(), SWEEPS["all parts"]))
            batches = {peer: self.best(partial(self._trial_diagonal, peer)) for peer in peers}
            groups = {
                what: [Method("flatgauge", partial(self._sweep, parts))]
                for what, parts in SWEEPS.items()
            }
            groups["all parts"].append(
                Method(
                    "flatgauge, with export",
                    lambda: lambda: block_curvature(self.surface(), SWEEPS["all parts"]),
                )
            )
            groups["diagonal and trace"] += [
                Method(peer.name, partial(self._peer_diagonal, peer, batch))
                for peer, batch in batches.items()
            ]
            methods = [method for group in groups.values() for method in group]
            timings, units = rounds.timed(self.unit, methods, rounds=count)

        def error(result: Blocks | Tensor) -> float:
            parts = {"diagonal": result} if isinstance(result, Tensor) else _joined(result)
            return max(_distance(value, expected[part]) for part, value in parts.items())

        found, remaining = [], iter(timings)
        for what, group in groups.items():
            found += self.rows(
                *(what, list(islice(remaining, len(group))), units, error),
                batches={peer.name: batch for peer, batch in batches.items()},
                chunk=self.chunk,
                yardsticks={peer.name for peer in peers},
            )
        return found

    def eigenvalues(self, peers: Sequence[BlockPeer], count: int) -> list[Row]:
        """Time the largest eigenvalue of every layer.

        Args:
            peers: Those that can be used.
            count: How many rounds count.

        Returns:
            The rows.
        """
        names = list(block_curvature(self.kept, ("trace",)).layers)
        with quiet():
            expected = self._eigenvalues(names, self.precise(), tolerance=1e-6, seed=1)
            batches = {peer: self.best(partial(self._trial_blocks, peer, names)) for peer in peers}
            methods = [
                Method("flatgauge", lambda: partial(self._eigenvalues, names, self.kept)),
                *(
                    Method(peer.name, partial(self._peer_eigenvalues, peer, names, batch))
                    for peer, batch in batches.items()
                ),
            ]
            timings, units = rounds.timed(self.unit, methods, rounds=count)

        def error(result: Mapping[str, float]) -> float:
            return max(abs(result[name] / expected[name] - 1) for name in names)

        return self.rows(
            *(f"top eigenvalues of {len(names)} layers", timings, units, error),
            batches={peer.name: batch for peer, batch in batches.items()},
            chunk=self.chunk,
            yardsticks={peer.name for peer in peers},
        )

    def many_classes(self, count: int) -> list[Row]:
        """Time traces where there are too many classes to sweep every column of a sample.

        The error is against all columns, which are swept and timed once: of the sum of all
        traces, and of the worst layer. It is flagged beyond three of the standard errors that
        come with the traces.

        Args:
            count: How many rounds count.

        Returns:
            The rows.
        """
        chosen = Method("flatgauge", partial(self._sweep, ("trace",), seed=0))
        timings, units = rounds.timed(self.unit, [chosen], rounds=count)
        everything = Method("flatgauge, all columns", lambda: self._all_columns)
        (slow,), _ = rounds.timed(self.unit, [everything], rounds=1, warm_up=0)
        expected, layers = _traces(slow.result), list(slow.result.layers)
        found: Blocks = timings[0].result
        stated = {name: float(block.stderr["trace"]) for name, block in found.items()}
        total = sum(expected.values())

        def of_sum(result: Blocks) -> float:
            return abs(sum(_traces(result).values()) / total - 1)

        def of_worst(result: Blocks) -> float:
            traces = _traces(result)
            return max(abs(traces[name] / expected[name] - 1) for name in layers)

        errors = {
            "trace": (of_sum, sum(stated.values()) / total),
            "trace of every layer": (
                of_worst,
                max(stated[name] / expected[name] for name in layers),
            ),
        }
        rows = []
        for what, (error, stderr) in errors.items():
            rows += self.rows(
                *(what, [*timings, slow], units, error),
                batches={},
                chunk=self.chunk,
                yardsticks=(),
                allowed=max(3 * stderr, AGREEMENT),
            )
        return rows

    def _sweep(self, parts: Iterable[str], seed: int | None = None) -> Action:
        """Ready to sweep the kept surface, which forgets what it found before."""
        held: dict[int, Blocks] = self.kept.recall(("blocks", "", False, DEFAULT_PROBES), dict)
        held.clear()
        generator = None if seed is None else Generator().manual_seed(seed)

        def sweep() -> Blocks:
            blocks = block_curvature(self.kept, parts, generator=generator)
            assert held, "results are kept elsewhere: this one may be an old one"
            return blocks

        return sweep

    def _all_columns(self) -> Blocks:
        return block_curvature(self.kept, ("trace",), all_columns=True)

    def _peer_diagonal(self, peer: DiagonalPeer, batch: int) -> Action:
        return peer.diagonal(self.workload.model, self.workload.batches(batch))

    def _trial_diagonal(self, peer: DiagonalPeer, size: int, samples: int) -> Tensor:
        return peer.diagonal(self.workload.model, self.workload.batches(size, samples))()

    def _eigenvalues(
        self,
        names: Sequence[str],
        surface: fg.LossSurface,
        *,
        tolerance: float = AGREEMENT,
        seed: int = 0,
    ) -> dict[str, float]:
        generator = Generator().manual_seed(seed)
        found = block_eigenvalues(
            surface, names, tolerance=tolerance, max_matvecs=MAX_PRODUCTS, generator=generator
        )
        return {name: pair.value for name, pair in found.items()}

    def _peer_eigenvalues(self, peer: BlockPeer, names: Sequence[str], batch: int) -> Action:
        blocks = self._peer_blocks(peer, names, batch)

        def eigenvalues() -> dict[str, float]:
            generator = Generator().manual_seed(0)
            found = {}
            for name in reversed(names):  # As flatgauge goes: the same start vectors.
                pairs = top_eigenvalues(
                    blocks[name],
                    tolerance=AGREEMENT,
                    max_matvecs=MAX_PRODUCTS,
                    generator=generator,
                )
                found[name] = float(pairs.values[0])
            return found

        return eigenvalues

    def _trial_blocks(
        self, peer: BlockPeer, names: Sequence[str], size: int, samples: int
    ) -> list[Any]:
        """One product with the first block and one with the last."""
        blocks = self._peer_blocks(peer, (names[0], names[-1]), size, samples)
        return [block @ torch.ones(block.shape[0]) for block in blocks.values()]

    def _peer_blocks(
        self, peer: BlockPeer, names: Sequence[str], size: int, samples: int | None = None
    ) -> dict[str, SupportsMatmul]:
        model = self.workload.model
        batches = self.workload.batches(size, samples)
        return {name: peer.block(model, batches, model.get_parameter(name)) for name in names}


def _traces(blocks: Blocks) -> dict[str, float]:
    """The trace of every block."""
    return {name: float(block.values["trace"]) for name, block in blocks.items()}


def _joined(blocks: Blocks) -> dict[str, Tensor]:
    """Every part of all blocks as one vector."""
    return {
        part: torch.cat([b.values[part].flatten() for b in blocks.values() if part in b.values])
        for part in blocks.parts
    }


def _distance(found: Tensor, expected: Tensor) -> float:
    """How far apart vectors are, relative to the second."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = table.parser(
        "blocks",
        "Time the Hessian's diagonal blocks.",
        eigen="also time the largest eigenvalues of all layers, in so many rounds",
    )
    parser.add_argument(
        "--classes", action="store_true", help="also time traces with 1000 classes, which is slow"
    )
    options = parser.parse_args()
    wanted = options.workloads and (options.rounds or options.eigen)
    if not wanted and not (options.classes and options.rounds):
        parser.error("there is nothing to time; name workloads, and give `--rounds` or `--eigen`.")
    return options


def sections(
    options: argparse.Namespace, diagonals: Sequence[DiagonalPeer], blocks: Sequence[BlockPeer]
) -> Iterator[tuple[str, list[Row]]]:
    """Time what the user asks for, workload by workload."""
    names = [*options.workloads, *([workloads.MANY_CLASSES] if options.classes else [])]
    for name in names:
        workload = workloads.load(name, scale=options.scale, folder=options.data)
        comparison = BlockComparison(workload)
        rows: list[Row] = []
        if name == workloads.MANY_CLASSES:
            rows += comparison.many_classes(options.rounds)
        else:
            if options.rounds:
                rows += comparison.sweeps(diagonals, options.rounds)
            if options.eigen:
                rows += comparison.eigenvalues(blocks, options.eigen)
        yield f"{comparison.description(rows)}, flatgauge's chunk {comparison.chunk}", rows


def main() -> None:
    """Time what the user asks for, print it, write it."""
    options = arguments()
    rounds.set_threads(options.threads)
    diagonals, blocks = usable(DIAGONAL_PEERS), usable(BLOCK_PEERS if options.eigen else ())
    tools: list[Tool] = [*diagonals, *blocks]
    table.show(options, tools, sections(options, diagonals, blocks))


if __name__ == "__main__":
    main()
