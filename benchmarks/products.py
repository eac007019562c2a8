"""What one Hessian-vector product costs, in gradients, here and with other tools.

    python -m benchmarks.products --threads 2 --rounds 5 --markdown products.md

The unit G is the processor time of one gradient over the same samples, by plain PyTorch at the
batch size that suits it best; it is timed before and after everything else. Every tool gets its
batches ready-made, none pays for a DataLoader, and of a few batch sizes each gets the one that
suits it best. flatgauge chooses its own chunk, as it does for users.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

import flatgauge as fg
from benchmarks import rounds, workloads
from benchmarks.peers import PEERS, Peer, quiet
from benchmarks.rounds import Action, Method, Timing
from benchmarks.workloads import Workload
from flatgauge.curvature import Hessian
from flatgauge.estimators import top_eigenvalues

#: Larger errors are flagged: products that far apart are not of the same matrix, and eigenvalues
#: are asked for to this accuracy.
AGREEMENT = 1e-3

COLUMNS = ("workload", "what", "tool", "batch", "cost / G", "spread", "/ best peer", "error")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        workload: On which network and data.
        what: What was computed.
        tool: By what.
        batch: Samples at a time.
        cost: In gradients, the median of all rounds.
        spread: In gradients, the cheapest and the dearest round.
        to_best_peer: Cost divided by that of the best peer that reads batches; None without one.
        error: Relative to flatgauge in double precision.
        gradient_seconds: Processor time of the unit, the median of all rounds.
    """

    workload: str
    what: str
    tool: str
    batch: int
    cost: float
    spread: tuple[float, float]
    to_best_peer: float | None
    error: float
    gradient_seconds: float

    def cells(self) -> tuple[str, ...]:
        """The line as text."""
        flag = "" if self.error <= AGREEMENT else f" (over {AGREEMENT:.0e})"
        return (
            self.workload,
            self.what,
            self.tool,
            str(self.batch),
            f"{self.cost:.2f}",
            "–".join(f"{end:.2f}" for end in self.spread),
            "" if self.to_best_peer is None else f"{self.to_best_peer:.2f}",
            f"{self.error:.0e}{flag}",
        )


class Comparison:
    """Every tool on one workload.

    Attributes:
        workload: The workload.
        vector: What the Hessian is multiplied by.
        chunk: The chunk flatgauge chooses.
        peers: The peers that can be used, each with its best batch size.
    """

    def __init__(self, workload: Workload, peers: Sequence[Peer]) -> None:
        self.workload = workload
        size = sum(param.numel() for param in workload.parameters())
        self.vector = torch.randn(size, generator=Generator().manual_seed(0))
        self.chunk = self._surface().chunk
        self._unit = partial(self._gradient, self._best(self._gradient))
        self.peers = {peer: self._best_batch(peer) for peer in peers}

    def products(self, count: int) -> list[Row]:
        """Time one product by every tool."""
        with quiet():
            expected = self._precise().hvp(self.vector)
            methods = [
                Method("flatgauge", self._kept),
                Method("flatgauge, first product", lambda: self._first),
                Method("flatgauge, no kept graphs", self._recomputed),
                *(Method(p.name, partial(self._peer_product, p)) for p in self.peers),
            ]
            timings, units = rounds.timed(self._unit, methods, rounds=count)

        def error(result: Tensor) -> float:
            return float((result.double() - expected).norm() / expected.norm())

        return self._rows("product", timings, units, error)

    def eigenvalues(self, count: int) -> list[Row]:
        """Time the largest eigenvalue, wanted to 1e-3, by every tool with all it takes."""
        with quiet():
            expected = self._eigenvalue(self._precise(), tolerance=1e-6, seed=1)
            methods = [
                Method("flatgauge", lambda: lambda: self._eigenvalue(self._surface())),
                *(Method(p.name, partial(self._peer_eigenvalue, p)) for p in self.peers),
            ]
            timings, units = rounds.timed(self._unit, methods, rounds=count)
        return self._rows(
            "top eigenvalue", timings, units, lambda result: abs(result / expected - 1)
        )

    def _rows(
        self,
        what: str,
        timings: Sequence[Timing],
        units: Sequence[float],
        error: Callable[[Any], float],
    ) -> list[Row]:
        """Put costs beside each other."""
        batches = {peer.name: batch for peer, batch in self.peers.items()}
        # The mode that holds all samples in one graph has no memory bound: shown, no yardstick.
        bounded = {peer.name for peer in self.peers if not peer.whole}
        costs = [timing.median for timing in timings if timing.name in bounded]
        return [
            Row(
                workload=self.workload.name,
                what=what,
                tool=timing.name,
                batch=batches.get(timing.name, self.chunk),
                cost=timing.median,
                spread=timing.spread,
                to_best_peer=timing.median / min(costs) if costs else None,
                error=error(timing.result),
                gradient_seconds=statistics.median(units),
            )
            for timing in timings
        ]

    def _surface(self, **options: Any) -> fg.LossSurface:
        data = (self.workload.inputs, self.workload.targets)
        return fg.LossSurface(self.workload.model, "cross_entropy", data, **options)

    def _precise(self) -> fg.LossSurface:
        """The reference: double precision, within a budget that full scale would not keep to."""
        return self._surface(dtype=torch.float64, memory="4GiB")

    def _kept(self) -> Action:
        surface = self._surface()
        surface.hvp(self.vector)
        return partial(surface.hvp, self.vector)

    def _first(self) -> Tensor:
        return self._surface().hvp(self.vector)

    def _recomputed(self) -> Action:
        surface = self._surface(memory="1MiB", chunk=self.chunk)
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
            return self._best(product)

    def _best(self, action: Callable[[int, int], object]) -> int:
        """The cheapest batch size, tried out on a quarter of the samples or one large batch."""
        samples = max(len(self.workload.inputs) // 4, self.workload.sizes[-1])
        trials: dict[int, Action] = {
            size: partial(action, size, samples) for size in self.workload.sizes
        }
        return rounds.cheapest(trials)

    def _gradient(self, size: int, samples: int | None = None) -> list[Tensor]:
        """The gradient of the summed loss by plain PyTorch."""
        params = self.workload.parameters()
        sums = [torch.zeros_like(param) for param in params]
        for inputs, targets in self.workload.batches(size, samples):
            loss = F.cross_entropy(self.workload.model(inputs), targets, reduction="sum")
            for total, part in zip(sums, torch.autograd.grad(loss, params), strict=True):
                total += part
        return sums


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def description(comparison: Comparison, seconds: float) -> str:
    """What a workload was, in a line."""
    workload = comparison.workload
    with torch.no_grad():
        loss = float(
            F.cross_entropy(workload.model(workload.inputs[:1000]), workload.targets[:1000])
        )
    return (
        f"{workload.name}: {workload.about}, {len(comparison.vector):,} parameters, "
        f"N = {len(workload.inputs):,}, loss {loss:.3g}, G = {seconds:.2f} s of processor time, "
        f"flatgauge's chunk {comparison.chunk}"
    )


def usable_peers() -> list[Peer]:
    """The peers that can be imported; says why others cannot."""
    usable = []
    for peer in PEERS:
        reason = peer.missing()
        if reason is None:
            usable.append(peer)
        else:
            print(f"skipping {peer.name}: {reason}")
    return usable


def arguments() -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.products", description="Time Hessian-vector products."
    )
    names = tuple(workloads.KINDS)
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples")
    parser.add_argument("--data", metavar="DIR", help="folder of MNIST and CIFAR-10")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5, help="that count; 0 times no products")
    parser.add_argument(
        "--eigen",
        type=int,
        nargs="?",
        const=3,
        default=0,
        metavar="ROUNDS",
        help="also time the largest eigenvalue, in so many rounds",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not options.rounds and not options.eigen:
        parser.error("`--rounds 0` leaves nothing to time; give more, or `--eigen`.")
    return options


def main() -> None:
    """Time what the user asks for, print it, write it."""
    options = arguments()
    rounds.set_threads(options.threads)
    facts = rounds.machine() | {"rounds": options.rounds, "data": options.data or "synthetic"}
    peers = usable_peers()
    facts |= {peer.package: peer.version for peer in peers}
    text = [", ".join(f"{name} {value}" for name, value in facts.items())]
    rows: list[Row] = []
    for name in options.workloads:
        workload = workloads.load(name, scale=options.scale, folder=options.data)
        comparison = Comparison(workload, peers)
        found = comparison.products(options.rounds) if options.rounds else []
        if options.eigen:
            found += comparison.eigenvalues(options.eigen)
        text.append(description(comparison, found[0].gradient_seconds))
        print(f"{text[-1]}\n\n{table(found)}\n", flush=True)
        rows += found
    markdown = "\n\n".join([*text, table(rows)])
    print(markdown)
    if options.markdown:
        options.markdown.write_text(markdown + "\n")
    if options.json:
        content = {"machine": facts, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
