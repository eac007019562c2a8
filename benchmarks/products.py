"""What one Hessian-vector product costs, in gradients, here and with other tools.

    python -m benchmarks.products --threads 2 --rounds 5 --markdown products.md

The unit G is the processor time of one gradient over the same samples, by plain PyTorch at the
batch size that suits it best; it is timed before and after everything else. Every tool gets its
batches ready-made, none pays for a DataLoader, and of a few batch sizes each gets the one that
suits it best. flatgauge chooses its own chunk, as it does for users.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

import flatgauge as fg
from benchmarks import rounds, table, workloads
from benchmarks.comparison import Comparison
from benchmarks.peers import PEERS, Peer, quiet, usable
from benchmarks.rounds import Action, Method, Timing
from benchmarks.table import Row
from benchmarks.workloads import Workload
from flatgauge.curvature import Hessian
from flatgauge.estimators import top_eigenvalues


class Products(Comparison):
    """Products with the Hessian by every tool on one workload.

    Attributes:
        vector: What the Hessian is multiplied by.
        chunk: The chunk flatgauge chooses.
        peers: The peers that can be used, each with its best batch size.
    """

    def __init__(self, workload: Workload, peers: Sequence[Peer]) -> None:
        super().__init__(workload)
        size = sum(param.numel() for param in workload.parameters())
        self.vector = torch.randn(size, generator=Generator().manual_seed(0))
        self.chunk = self.surface().chunk
        self.peers = {peer: self._best_batch(peer) for peer in peers}

    def products(self, count: int) -> list[Row]:
        """Time one product by every tool."""
        with quiet():
            expected = self.precise().hvp(self.vector)
            methods = [
                Method("flatgauge", self._kept),
                Method("flatgauge, first product", lambda: self._first),
                Method("flatgauge, no kept graphs", self._recomputed),
                *(Method(p.name, partial(self._peer_product, p)) for p in self.peers),
            ]
            timings, units = rounds.timed(self.unit, methods, rounds=count)

        def error(result: Tensor) -> float:
            return float((result.double() - expected).norm() / expected.norm())

        return self._beside("product", timings, units, error)

    def eigenvalues(self, count: int) -> list[Row]:
        """Time the largest eigenvalue, wanted to 1e-3, by every tool with all it takes."""
        with quiet():
            expected = self._eigenvalue(self.precise(), tolerance=1e-6, seed=1)
            methods = [
                Method("flatgauge", lambda: lambda: self._eigenvalue(self.surface())),
                *(Method(p.name, partial(self._peer_eigenvalue, p)) for p in self.peers),
            ]
            timings, units = rounds.timed(self.unit, methods, rounds=count)
        return self._beside(
            "top eigenvalue", timings, units, lambda result: abs(result / expected - 1)
        )

    def _beside(
        self,
        what: str,
        timings: Sequence[Timing],
        units: Sequence[float],
        error: Callable[[Any], float],
    ) -> list[Row]:
        """Put costs beside each other."""
        return self.rows(
            *(what, timings, units, error),
            batches={peer.name: batch for peer, batch in self.peers.items()},
            chunk=self.chunk,
            # The mode that holds all samples in one graph has no memory bound: shown, no yardstick.
            yardsticks={peer.name for peer in self.peers if not peer.whole},
        )

    def _kept(self) -> Action:
        surface = self.surface()
        surface.hvp(self.vector)
        return partial(surface.hvp, self.vector)

    def _first(self) -> Tensor:
        return self.surface().hvp(self.vector)

    def _recomputed(self) -> Action:
        surface = self.surface(memory="1MiB", chunk=self.chunk)
        return partial(surface.hvp, self.vector)

    def _eigenvalue(
        self, surface: fg.LossSurface, *, tolerance: float = 1e-3, seed: int = 0
    ) -> float:
        generator = Generator().manual_seed(seed)
        pairs = top_eigenvalues(Hessian(surface), tolerance=tolerance, generator=generator)
        return float(pairs.values[0])

    def _peer_product(self, peer: Peer) -> Action:
        batches = self.workload.batches(self.peers[peer])
        return partial(peer.product(self.workload.model, batches), self.vector)

    def _peer_eigenvalue(self, peer: Peer) -> Action:
        batches = self.workload.batches(self.peers[peer])

        def eigenvalue() -> float:
            torch.manual_seed(0)
            return peer.eigenvalue(self.workload.model, batches)

        return eigenvalue

    def _best_batch(self, peer: Peer) -> int:
        """The batch size that suits a peer best."""
        if peer.whole:
            return len(self.workload.inputs)

        def product(size: int, samples: int) -> Tensor:
            batches = self.workload.batches(size, samples)
            return peer.product(self.workload.model, batches)(self.vector)

        with quiet():
            return self.best(product)


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = table.parser(
        "products",
        "Time Hessian-vector products.",
        eigen="also time the largest eigenvalue, in so many rounds",
    )
    options = parser.parse_args()
    if not options.workloads or not (options.rounds or options.eigen):
        parser.error("there is nothing to time; name workloads, and give `--rounds` or `--eigen`.")
    return options


def sections(options: argparse.Namespace, peers: Sequence[Peer]) -> Iterator[tuple[str, list[Row]]]:
    """Time what the user asks for, workload by workload."""
    for name in options.workloads:
        workload = workloads.load(name, scale=options.scale, folder=options.data)
        comparison = Products(workload, peers)
        rows = comparison.products(options.rounds) if options.rounds else []
        if options.eigen:
            rows += comparison.eigenvalues(options.eigen)
        about = comparison.description(rows)
        yield f"{about}, flatgauge's chunk {comparison.chunk}", rows


def main() -> None:
    """Time what the user asks for, print it, write it."""
    options = arguments()
    rounds.set_threads(options.threads)
    peers = usable(PEERS)
    table.show(options, peers, sections(options, peers))


if __name__ == "__main__":
    main()
