"""All measures together, beside PyHessian's eigenvalue and trace.

One call of `fg.measure` for κ, κ_τ, ρ, relative flatness, both normalized sharpnesses, Fisher-Rao
norm, path norm, trace and largest eigenvalue of the Hessian, both Riemannian eigenvalues, and the
trace by path values, at their defaults, from nothing (the export of the model included), beside
PyHessian's `eigenvalues(top_n=1)` and `trace()` at theirs. The error is that of the trace.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flatgauge.analysis.measurement import measure
from flatgauge.cli.benchmarks.comparison import Entry, TimedComparison
from flatgauge.cli.benchmarks.errors import relative_error
from flatgauge.cli.benchmarks.rounds import Action
from flatgauge.cli.benchmarks.row import OWN, TimingRow
from flatgauge.cli.benchmarks.tool import Tool

TOGETHER = "measures together"

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


def measured(comparison: TimedComparison) -> list[TimingRow]:
    """Time all measures together, and the peers' eigenvalue and trace.

    Args:
        comparison: The tools on a workload.

    Returns:
        The rows.
    """
    expected = float(comparison.expected["trace"].sum())
    shares: dict[str, float] = {}

    def error(_: str, result: Any) -> float:
        return relative_error(result, expected)

    chunk = comparison.surface().chunk
    own = partial(_measured, comparison, shares)
    entries = [Entry(TOGETHER, OWN, lambda: own, chunk, dear=True)]
    for tool in comparison.tools:
        size = comparison.product_batch(tool) if tool.summary else None
        if size is not None:
            prepare = partial(_peer, comparison, tool, size)
            entries.append(Entry(TOGETHER, tool.name, prepare, size, yardstick=True, dear=True))
    rows = comparison.compare(entries, error)
    whole = sum(shares.values())
    told = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in shares.items())
    comparison.notes.append(f"of the measures' time after the sweep: {told}")
    return rows


def _measured(comparison: TimedComparison, shares: dict[str, float]) -> float:
    report = measure(comparison.surface(), measures=MEASURES)
    shares.update({name: estimate.seconds for name, estimate in report.items()})
    return report["hessian_trace"].value


def _peer(comparison: TimedComparison, tool: Tool, size: int) -> Action:
    batches = comparison.workload.batches(size)

    def summary() -> float:
        assert tool.summary is not None
        torch.manual_seed(0)
        return tool.summary(comparison.workload.model, batches)

    return summary
