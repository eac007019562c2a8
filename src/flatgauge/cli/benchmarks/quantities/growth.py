"""How the costs of a product and of a sweep grow: with samples, with width, with classes.

On the perceptron, in gradients over the same samples and in processor time per sample. Where a cost
in gradients stays level, it grows as a gradient does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from flatgauge.cli.benchmarks.comparison import TimedComparison
from flatgauge.cli.benchmarks.networks import mlp
from flatgauge.cli.benchmarks.quantities.products import kept_product, peer_products
from flatgauge.cli.benchmarks.quantities.sweeps import diagonals, whole_sweep
from flatgauge.cli.benchmarks.row import TimingRow
from flatgauge.cli.benchmarks.workloads import KINDS, Kind, Workload, batch_sizes, built

#: Shares of all samples.
SHARES = (0.1, 0.3, 1.0)
WIDTHS = (64, 128, 256, 512, 1024)
CLASSES = (10, 100, 1000)

#: More classes than this are more than BackPACK's memory bears.
_MOST_CLASSES = 10


def measured(comparison: TimedComparison) -> list[TimingRow]:
    """Time product and sweep in every setting.

    Args:
        comparison: The tools on the perceptron.

    Returns:
        The rows.
    """
    rows = []
    for setting, workload, classes in _settings(comparison.workload):
        here = TimedComparison(
            workload, comparison.tools, rounds=comparison.rounds, tell=comparison.tell
        )
        entries = [kept_product(here), *peer_products(here, whole=False), whole_sweep(here)]
        if classes <= _MOST_CLASSES:
            entries += diagonals(here)
        rows += here.compare(entries, lambda quantity, result: None, setting=setting)
    return rows


def _settings(largest: Workload) -> Iterator[tuple[str, Workload, int]]:
    """What each setting is called, its workload, and how many classes that has."""
    for share in SHARES:
        samples = max(round(len(largest.inputs) * share / 20), 1) * 20
        sizes = batch_sizes(samples, KINDS[largest.name].batches)
        inputs, targets = largest.inputs[:samples], largest.targets[:samples]
        fewer = replace(largest, inputs=inputs, targets=targets, sizes=sizes)
        yield f"N = {samples:,}", fewer, 10
    for width in WIDTHS:
        yield f"width {width}", _perceptron(largest, 2000, width=width), 10
    for classes in CLASSES:
        yield f"{classes:,} classes", _perceptron(largest, 1000, classes=classes), classes


def _perceptron(like: Workload, samples: int, *, classes: int = 10, width: int = 512) -> Workload:
    """A perceptron of another shape, on synthetic images."""
    about = f"MLP 784-{width}⁵-{classes}"
    build = partial(mlp, classes, width)
    kind = Kind(about, build, None, (1, 28, 28), samples, (250, 500, 1000), 1, classes)
    return built(kind, like.name, scale=like.scale)
