"""Tools on one workload, in units of one gradient."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flatgauge as fg
from benchmarks import rounds
from benchmarks.rounds import Action, Timing
from benchmarks.table import AGREEMENT, Row
from benchmarks.workloads import Workload


class Comparison:
    """Tools on one workload.

    Attributes:
        workload: The workload.
        unit: What costs 1: the gradient, at the batch size that suits it best.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.unit = partial(self._gradient, self.best(self._gradient))

    def surface(self, **options: Any) -> fg.LossSurface:
        """The workload as flatgauge sees it."""
        data = (self.workload.inputs, self.workload.targets)
        return fg.LossSurface(self.workload.model, "cross_entropy", data, **options)

    def precise(self) -> fg.LossSurface:
        """The reference: double precision, within a budget that full scale would not keep to."""
        return self.surface(dtype=torch.float64, memory="4GiB")

    def best(self, action: Callable[[int, int], object]) -> int:
        """The cheapest batch size, tried out on a quarter of the samples or one large batch.

        Args:
            action: What to do with batches of a size, of so many samples.

        Returns:
            The size.
        """
        samples = max(len(self.workload.inputs) // 4, self.workload.sizes[-1])
        trials: dict[int, Action] = {
            size: partial(action, size, samples) for size in self.workload.sizes
        }
        return rounds.cheapest(trials)

    def rows(
        self,
        what: str,
        timings: Sequence[Timing],
        units: Sequence[float],
        error: Callable[[Any], float],
        *,
        batches: Mapping[str, int],
        chunk: int,
        yardsticks: Collection[str],
        allowed: float = AGREEMENT,
    ) -> list[Row]:
        """Put costs beside each other.

        Args:
            what: What was computed.
            timings: What it cost.
            units: The seconds of every unit.
            error: How far off a result is.
            batches: The batch sizes of peers, by name.
            chunk: That of flatgauge.
            yardsticks: The peers among which the best is looked for.
            allowed: Larger errors are flagged.

        Returns:
            A row for every timing.
        """
        costs = [timing.median for timing in timings if timing.name in yardsticks]
        return [
            Row(
                workload=self.workload.name,
                what=what,
                tool=timing.name,
                batch=batches.get(timing.name, chunk),
                cost=timing.median,
                spread=timing.spread,
                to_best_peer=timing.median / min(costs) if costs else None,
                error=error(timing.result),
                gradient_seconds=statistics.median(units),
                allowed=allowed,
            )
            for timing in timings
        ]

    def description(self, rows: Sequence[Row]) -> str:
        """What the workload was, in a line."""
        workload = self.workload
        size = sum(param.numel() for param in workload.parameters())
        with torch.no_grad():
            loss = float(
                F.cross_entropy(workload.model(workload.inputs[:1000]), workload.targets[:1000])
            )
        return (
            f"{workload.name}: {workload.about}, {size:,} parameters, "
            f"N = {len(workload.inputs):,}, loss {loss:.3g}, "
            f"G = {rows[0].gradient_seconds:.2f} s of processor time"
        )

    def _gradient(self, size: int, samples: int | None = None) -> list[Tensor]:
        """The gradient of the summed loss by plain PyTorch."""
        params = self.workload.parameters()
        sums = [torch.zeros_like(param) for param in params]
        for inputs, targets in self.workload.batches(size, samples):
            loss = F.cross_entropy(self.workload.model(inputs), targets, reduction="sum")
            for total, part in zip(sums, torch.autograd.grad(loss, params), strict=True):
                total += part
        return sums
