"""Tools on one workload, in units of one gradient.

A quantity (`benchmarks.quantities`) lists `Entry`s, what each tool has to do, and `compare` times
them in the same rounds as the gradient. Batch sizes are tried out first, for every tool.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from benchmarks.peers import Batches, Tool, ignore_warnings
from benchmarks.results import TimingRow
from benchmarks.timing import Action, Entry, cheapest, time_entries
from benchmarks.workloads import Workload
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.blocks import Blocks
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.surface.surface import LossSurface

#: Everything that one sweep gives.
ALL_PARTS = ("trace", "diagonal", "incoming", "outgoing", "relative")


class TimedComparison:
    """Tools on one workload.

    Attributes:
        workload: The workload.
        tools: The other tools that can be used.
        rounds: How many rounds count.
        log: Called with lines on what cannot be done.
        gradient_batch: The batch size that suits the gradient best.
        unit: What costs 1: the gradient at this size.
        notes: Findings beside the rows.
    """

    def __init__(
        self,
        workload: Workload,
        tools: Sequence[Tool] = (),
        *,
        rounds: int = 1,
        log: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.workload, self.tools, self.rounds, self.log = workload, tools, rounds, log
        self.notes: list[str] = []
        self._batches: dict[tuple[str, str], int | None] = {}
        self.gradient_batch = self._best_batch(self.gradient)
        self.unit = partial(self.gradient, self.gradient_batch)

    # -- flatgauge's side ---------------------------------------------------------------------

    def surface(self, **options: Any) -> LossSurface:
        """The workload as a surface."""
        data = (self.workload.inputs, self.workload.targets)
        return LossSurface(self.workload.model, "cross_entropy", data, **options)

    def precise(self) -> LossSurface:
        """The reference: double precision, within a budget that full scale would not keep to."""
        return self.surface(dtype=torch.float64, memory="4GiB")

    @cached_property
    def sweep_surface(self) -> LossSurface:
        """A surface for sweeps, whose graph is read once."""
        return self.surface().copy()

    @cached_property
    def sweep_chunk(self) -> int:
        """The chunk that flatgauge chooses for sweeps."""
        return sweep_of(self.sweep_surface).chunk_size

    def prepare_sweep(self, parts: Iterable[str], *, all_columns: bool = False) -> Action:
        """A sweep for these parts on a copy, which knows the model's graph but no numbers.

        With `all_columns`, also where a sample has so many outputs that some would be combined.
        """
        generator = Generator().manual_seed(0)  # For combinations of many classes.
        options: dict[str, Any] = {"all_columns": all_columns, "generator": generator}
        return partial(block_curvature, self.sweep_surface.copy(), tuple(parts), **options)

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        """Every part of all blocks in double precision."""
        return flat_parts(block_curvature(self.precise(), ALL_PARTS))

    @cached_property
    def vector(self) -> Tensor:
        """What the Hessian is multiplied by."""
        size = sum(param.numel() for param in self.workload.parameters())
        return torch.randn(size, generator=Generator().manual_seed(0))

    # -- batches ------------------------------------------------------------------------------

    def peers(
        self, ability: str, trial: Callable[[Tool, Batches], Action] | None = None
    ) -> Iterator[tuple[Tool, Batches]]:
        """The tools with an ability, and batches of the size that suits each best.

        Args:
            ability: The attribute of `Tool`.
            trial: What sizes are tried out with; a Hessian product if not given.

        Yields:
            A tool and its batches; one that fails is left out, which is logged.
        """
        purpose, trial = ("product", self.prepare_product) if trial is None else (ability, trial)
        for tool in (tool for tool in self.tools if getattr(tool, ability)):
            key = (tool.name, purpose)
            if key not in self._batches:

                def attempt(size: int, samples: int, tool: Tool = tool) -> object:
                    return trial(tool, self.workload.batches(size, samples))()

                try:
                    with ignore_warnings():
                        self._batches[key] = self._best_batch(attempt)
                except Exception as error:  # Other people's code can raise anything.
                    reason = str(error).partition("\n")[0] or type(error).__name__
                    self.log(f"skipping {tool.name} on {self.workload.name} ({purpose}): {reason}")
                    self._batches[key] = None
            size = self._batches[key]
            if size is not None:
                yield tool, self.workload.batches(size)

    def prepare_product(self, tool: Tool, batches: Batches) -> Action:
        """A Hessian product by another tool."""
        assert tool.product is not None
        return partial(tool.product(self.workload.model, batches), self.vector)

    def _best_batch(self, action: Callable[[int, int], object]) -> int:
        """The cheapest size, tried out on a quarter of the samples or one large batch."""
        workload = self.workload
        samples = max(len(workload.inputs) // 4, workload.sizes[-1])
        trials: dict[int, Action] = {
            size: partial(action, size, samples) for size in workload.sizes
        }
        return cheapest(trials, repeats=min(self.rounds, 3))

    # -- timing -------------------------------------------------------------------------------

    def compare(
        self,
        entries: Sequence[Entry],
        error: Callable[[str, Any], float | None],
        *,
        reliable: float | None = None,
        setting: str = "",
    ) -> list[TimingRow]:
        """Time entries beside each other.

        Args:
            entries: What to time, all in the same rounds.
            error: From a quantity and a result to how far off it is.
            reliable: Peers with a larger error are not eligible; None for no such condition.
            setting: Where in a series.

        Returns:
            A row for every entry.
        """
        with ignore_warnings():
            timings, units = time_entries(self.unit, entries, rounds=self.rounds)
        rows = []
        for entry, timing in zip(entries, timings, strict=True):
            off = error(entry.quantity, timing.result)
            trusted = reliable is None or (off is not None and off <= reliable)
            row = TimingRow(
                workload=self.workload.name,
                quantity=entry.quantity,
                tool=entry.tool,
                cost=timing.median,
                batch=entry.batch,
                setting=setting,
                spread=timing.spread,
                rounds=len(timing.ratios),
                eligible=entry.eligible and trusted,
                error=off,
                unit_seconds=statistics.median(units),
                sample_seconds=statistics.median(timing.seconds) / len(self.workload.inputs),
            )
            rows.append(row)
        best: dict[str, float] = {}
        for row in rows:
            if row.eligible:
                best[row.quantity] = min(row.cost, best.get(row.quantity, row.cost))
        return [
            replace(row, to_best_peer=row.cost / best[row.quantity])
            if row.quantity in best
            else row
            for row in rows
        ]

    def description(self) -> str:
        """A line on the workload."""
        workload = self.workload
        with torch.no_grad():
            loss = F.cross_entropy(workload.model(workload.inputs[:1000]), workload.targets[:1000])
        size = sum(param.numel() for param in workload.parameters())
        samples = len(workload.inputs)
        return f"{workload.about}, {size:,} parameters, N = {samples:,}, loss {float(loss):.3g}"

    def gradient(self, size: int, samples: int | None = None) -> list[Tensor]:
        """The gradient of the summed loss by plain PyTorch, so many samples at a time."""
        params = self.workload.parameters()
        sums = [torch.zeros_like(param) for param in params]
        for inputs, targets in self.workload.batches(size, samples):
            loss = F.cross_entropy(self.workload.model(inputs), targets, reduction="sum")
            for total, part in zip(sums, torch.autograd.grad(loss, params), strict=True):
                total += part
        return sums


def flat_parts(blocks: Blocks) -> dict[str, Tensor]:
    """Every part of all blocks as one vector."""
    return {
        part: torch.cat([b.values[part].flatten() for b in blocks.values() if part in b.values])
        for part in blocks.parts
    }


def relative_error(found: float, expected: float) -> float:
    """How far off a number is, relative to what it should be."""
    return abs(found / expected - 1)


def distance(found: Tensor, expected: Tensor) -> float:
    """How far apart vectors are, relative to the second."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
