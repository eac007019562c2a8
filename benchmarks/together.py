"""What all measures together cost, beside PyHessian's eigenvalue and trace.

    python -m benchmarks.together --threads 2 --rounds 3 --markdown together.md

One call of `fg.measure` for κ, κ_τ, ρ, relative flatness, both normalized sharpnesses, Fisher-Rao
norm, path norm, trace and largest eigenvalue of the Hessian, both Riemannian eigenvalues, and the
trace by path values, at their defaults, from nothing (the export of the model included), beside
PyHessian's `eigenvalues(top_n=1)` and `trace()` at theirs. The error is that of the trace.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import flatgauge as fg
from benchmarks import rounds, table, workloads
from benchmarks.comparison import Comparison
from benchmarks.peers import SUMMARY_PEERS, SummaryPeer, quiet, usable
from benchmarks.rounds import Action, Method
from benchmarks.table import Row

#: What is measured together.
MEASURES = (
    "kappa_max",
    "kappa_sum",
    "kappa_trace_max",
    "kappa_trace_sum",
    "rho_max",
    "rho_sum",
    "relative_flatness",
    "matrix_normalized_sharpness",
    "normalized_sharpness",
    "fisher_rao_norm",
    "path_norm",
    "hessian_trace",
    "hessian_max_eigenvalue",
    "riemannian_max_eigenvalue",
    "riemannian_max_eigenvalue_nodewise",
    "psi_trace",
)

#: What PyHessian's trace may be off: its stopping rule is no error bound.
_ALLOWED = 0.5


class Together(Comparison):
    """All measures on one workload."""

    def timed(self, peers: Sequence[SummaryPeer], count: int) -> list[Row]:
        """Time all measures together, and the peers' eigenvalue and trace.

        Args:
            peers: Those that can be used.
            count: How many rounds count.

        Returns:
            The rows.
        """
        with quiet():
            expected = fg.measures.hessian_trace(self.precise()).value
            batches = {peer: self.best(partial(self._trial, peer)) for peer in peers}
            methods = [
                Method("flatgauge", lambda: self._measured),
                *(Method(p.name, partial(self._peer, p, size)) for p, size in batches.items()),
            ]
            timings, units = rounds.timed(self.unit, methods, rounds=count, warm_up=0)
        return self.rows(
            *(f"{len(MEASURES)} measures, or eigenvalue and trace", timings, units),
            lambda trace: abs(trace / expected - 1),
            batches={peer.name: size for peer, size in batches.items()},
            chunk=self.surface().chunk,
            yardsticks={peer.name for peer in peers},
            allowed=_ALLOWED,
        )

    def _measured(self) -> float:
        report = fg.measure(self.surface(), measures=MEASURES)
        self.shares = {name: estimate.seconds for name, estimate in report.items()}
        return report["hessian_trace"].value

    def _peer(self, peer: SummaryPeer, size: int) -> Action:
        batches = self.workload.batches(size)
        return lambda: peer.trace_after_eigenvalue(self.workload.model, batches)

    def _trial(self, peer: SummaryPeer, size: int, samples: int) -> object:
        return peer.product(self.workload.model, self.workload.batches(size, samples))


def sections(
    options: argparse.Namespace, peers: Sequence[SummaryPeer]
) -> Iterator[tuple[str, list[Row]]]:
    """Time what the user asks for, workload by workload."""
    for name in options.workloads:
        together = Together(workloads.load(name, scale=options.scale, folder=options.data))
        rows = together.timed(peers, options.rounds)
        whole = sum(together.shares.values())
        shares = ", ".join(
            f"{name} {seconds / whole:.0%}" for name, seconds in together.shares.items()
        )
        yield f"{together.description(rows)}; of flatgauge's time after the sweep: {shares}", rows


def main() -> None:
    """Time what the user asks for, print it, write it."""
    options = table.parser(
        "together", "Time all measures together.", eigen="ignored: they are among the measures"
    ).parse_args()
    rounds.set_threads(options.threads)
    peers = usable(SUMMARY_PEERS)
    table.show(options, peers, sections(options, peers))


if __name__ == "__main__":
    main()
