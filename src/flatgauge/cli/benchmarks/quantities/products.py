"""One Hessian-vector product.

*flatgauge* keeps first-order graphs; its first product builds them, and beyond the memory budget
there are none. For perceptrons, what the matrix products of a kept graph cost, with all units, is
in a line of its own: only what leaves out silent units can be cheaper.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from flatgauge.cli.benchmarks.comparison import Entry, TimedComparison
from flatgauge.cli.benchmarks.errors import distance
from flatgauge.cli.benchmarks.multiplications import kept_graph_limit
from flatgauge.cli.benchmarks.one_graph import fits
from flatgauge.cli.benchmarks.rounds import Action
from flatgauge.cli.benchmarks.row import LIMIT, OWN, TimingRow
from flatgauge.cli.benchmarks.tool import Tool

PRODUCT = "product"


def measured(comparison: TimedComparison) -> list[TimingRow]:
    """Time one product by every tool.

    Args:
        comparison: The tools on a workload.

    Returns:
        The rows.
    """
    expected = comparison.precise().hvp(comparison.vector)
    chunk = comparison.surface().chunk

    def error(_: str, result: Any) -> float:
        return distance(result, expected)

    entries = [
        kept_product(comparison),
        Entry(PRODUCT, f"{OWN}, first product", lambda: partial(_first, comparison), chunk),
        Entry(PRODUCT, f"{OWN}, no kept graphs", partial(_recomputed, comparison, chunk), chunk),
        *peer_products(comparison),
    ]
    rows = comparison.compare(entries, error)
    limit = kept_graph_limit(comparison.workload.model)
    if limit is not None:
        rows.append(TimingRow(comparison.workload.name, PRODUCT, LIMIT, limit))
    return rows


def kept_product(comparison: TimedComparison) -> Entry:
    """A product with graphs that are kept, the memory budget allowing."""

    def prepared() -> Action:
        surface = comparison.surface()
        surface.hvp(comparison.vector)
        return partial(surface.hvp, comparison.vector)

    return Entry(PRODUCT, OWN, prepared, comparison.surface().chunk)


def peer_products(comparison: TimedComparison, *, whole: bool = True) -> list[Entry]:
    """Products by other tools.

    Args:
        comparison: The tools on a workload.
        whole: Whether also by those that take all samples as one batch.

    Returns:
        What to time.
    """
    found = []
    for tool in comparison.tools:
        if tool.product is None or (tool.whole and not (whole and fits(comparison, tool))):
            continue
        size = comparison.product_batch(tool)
        if size is not None:
            prepare = partial(_peer, comparison, tool, size)
            # One graph of all samples has no bound on memory: shown, but no yardstick.
            found.append(Entry(PRODUCT, tool.name, prepare, size, yardstick=not tool.whole))
    return found


def _first(comparison: TimedComparison) -> Tensor:
    return comparison.surface().hvp(comparison.vector)


def _recomputed(comparison: TimedComparison, chunk: int) -> Action:
    surface = comparison.surface(memory="1MiB", chunk=chunk)
    return partial(surface.hvp, comparison.vector)


def _peer(comparison: TimedComparison, tool: Tool, size: int) -> Action:
    assert tool.product is not None
    product = tool.product(comparison.workload.model, comparison.workload.batches(size))
    return partial(product, comparison.vector)
