"""Tools on one workload, in units of one gradient."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from flatgauge.cli.benchmarks import rounds
from flatgauge.cli.benchmarks.errors import joined
from flatgauge.cli.benchmarks.fresh import FreshSweep
from flatgauge.cli.benchmarks.rounds import Action, Method, Timing
from flatgauge.cli.benchmarks.row import TimingRow
from flatgauge.cli.benchmarks.tool import Tool, quiet
from flatgauge.cli.benchmarks.workloads import Workload
from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.surface.surface import LossSurface

#: Everything that one sweep gives.
ALL_PARTS = ("trace", "diagonal", "incoming", "outgoing", "relative")

#: From a tool, a batch size and a number of samples to something whose time tells how the tool
#: gets along with such batches.
Trial = Callable[[Tool, int, int], object]


@dataclass(frozen=True)
class Entry:
    """Something to time.

    Attributes:
        quantity: What it computes.
        tool: What computes it.
        prepare: Sets it up, untimed; returns what is timed.
        batch: Samples at a time.
        yardstick: Whether the best peer is looked for here.
        dear: Whether it is done only once.
    """

    quantity: str
    tool: str
    prepare: Callable[[], Action]
    batch: int | None = None
    yardstick: bool = False
    dear: bool = False


class TimedComparison:
    """Tools on one workload.

    Attributes:
        workload: The workload.
        tools: The other tools that can be used.
        rounds: How many rounds count.
        tell: Called with lines on what cannot be done.
        gradient_batch: The batch size that suits the gradient best.
        unit: What costs 1: the gradient at this size.
        notes: What there is to say beside the rows.
    """

    def __init__(
        self,
        workload: Workload,
        tools: Sequence[Tool] = (),
        *,
        rounds: int = 1,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.workload, self.tools, self.rounds, self.tell = workload, tools, rounds, tell
        self.notes: list[str] = []
        self._batches: dict[tuple[str, str], int | None] = {}
        self.gradient_batch = self._best(self.gradient)
        self.unit = partial(self.gradient, self.gradient_batch)

    # -- flatgauge's side ---------------------------------------------------------------------

    def surface(self, **options: Any) -> LossSurface:
        """The workload as flatgauge sees it."""
        data = (self.workload.inputs, self.workload.targets)
        return LossSurface(self.workload.model, "cross_entropy", data, **options)

    def precise(self) -> LossSurface:
        """The reference: double precision, within a budget that full scale would not keep to."""
        return self.surface(dtype=torch.float64, memory="4GiB")

    @cached_property
    def sweep(self) -> FreshSweep:
        """The workload with its graph read."""
        return FreshSweep(self.surface().copy())

    @cached_property
    def sweep_chunk(self) -> int:
        """The chunk that flatgauge chooses for sweeps."""
        return sweep_of(self.sweep.surface).chunk_size

    @cached_property
    def expected(self) -> dict[str, Tensor]:
        """Every part of all blocks in double precision."""
        return joined(block_curvature(self.precise(), ALL_PARTS))

    @cached_property
    def vector(self) -> Tensor:
        """What the Hessian is multiplied by."""
        size = sum(param.numel() for param in self.workload.parameters())
        return torch.randn(size, generator=Generator().manual_seed(0))

    # -- batches ------------------------------------------------------------------------------

    def batch(self, tool: Tool, how: str, trial: Trial) -> int | None:
        """The batch size that suits a tool best, tried out once.

        Args:
            tool: The tool.
            how: What it is tried out with.
            trial: From the tool, a batch size and a number of samples to something to time.

        Returns:
            The size; None if the tool fails, which is told.
        """
        if tool.whole:
            return len(self.workload.inputs)
        key = (tool.name, how)
        if key not in self._batches:
            try:
                with quiet():
                    self._batches[key] = self._best(partial(trial, tool))
            except Exception as error:  # Other people's code can raise anything.
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                self.tell(f"skipping {tool.name} on {self.workload.name} ({how}): {reason}")
                self._batches[key] = None
        return self._batches[key]

    def product_batch(self, tool: Tool) -> int | None:
        """The batch size that suits a tool's products best."""

        def trial(tool: Tool, size: int, samples: int) -> Tensor:
            assert tool.product is not None
            batches = self.workload.batches(size, samples)
            return tool.product(self.workload.model, batches)(self.vector)

        return self.batch(tool, "product", trial)

    def _best(self, action: Callable[[int, int], object]) -> int:
        """The cheapest size, tried out on a quarter of the samples or one large batch."""
        workload = self.workload
        samples = max(len(workload.inputs) // 4, workload.sizes[-1])
        trials: dict[int, Action] = {
            size: partial(action, size, samples) for size in workload.sizes
        }
        return rounds.cheapest(trials, repeats=min(self.rounds, 3))

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
            reliable: Peers with a larger error are no yardsticks; None for no such condition.
            setting: Where in a series.

        Returns:
            A row for every entry.
        """
        timings, units = self.timed(entries)
        errors = [error(e.quantity, t.result) for e, t in zip(entries, timings, strict=True)]
        return self.rows(entries, timings, units, errors, reliable=reliable, setting=setting)

    def timed(self, entries: Sequence[Entry]) -> tuple[list[Timing], list[float]]:
        """Time entries beside the gradient.

        Args:
            entries: What to time, all in the same rounds.

        Returns:
            What they cost, and the seconds of every gradient.
        """
        methods = [Method(entry.tool, entry.prepare, entry.dear) for entry in entries]
        # Where nothing is repeated, further rounds would time nothing but units.
        count, warm_up = (1, 0) if all(e.dear for e in entries) else (self.rounds, 1)
        with quiet():
            return rounds.timed(self.unit, methods, rounds=count, warm_up=warm_up)

    def rows(
        self,
        entries: Sequence[Entry],
        timings: Sequence[Timing],
        units: Sequence[float],
        errors: Sequence[float | None],
        *,
        reliable: float | None = None,
        setting: str = "",
    ) -> list[TimingRow]:
        """Put costs beside each other.

        Args:
            entries: What was timed.
            timings: What it cost.
            units: The seconds of every gradient.
            errors: How far off the results are.
            reliable: Peers with a larger error are no yardsticks; None for no such condition.
            setting: Where in a series.

        Returns:
            A row for every entry.
        """
        counts = [
            entry.yardstick and (reliable is None or (off is not None and off <= reliable))
            for entry, off in zip(entries, errors, strict=True)
        ]
        best: dict[str, float] = {}
        for entry, timing, counted in zip(entries, timings, counts, strict=True):
            if counted:
                known = best.get(entry.quantity, timing.median)
                best[entry.quantity] = min(known, timing.median)
        return [
            self._row(entry, timing, units, best.get(entry.quantity), counted, off, setting)
            for entry, timing, counted, off in zip(entries, timings, counts, errors, strict=True)
        ]

    def _row(
        self,
        entry: Entry,
        timing: Timing,
        units: Sequence[float],
        best: float | None,
        counted: bool,
        error: float | None,
        setting: str,
    ) -> TimingRow:
        """One entry as a line."""
        return TimingRow(
            workload=self.workload.name,
            quantity=entry.quantity,
            tool=entry.tool,
            cost=timing.median,
            batch=entry.batch,
            setting=setting,
            spread=timing.spread,
            rounds=len(timing.ratios),
            to_best_peer=None if best is None else timing.median / best,
            yardstick=counted,
            error=error,
            unit_seconds=statistics.median(units),
            sample_seconds=statistics.median(timing.seconds) / len(self.workload.inputs),
        )

    def description(self) -> dict[str, Any]:
        """What the workload is."""
        workload = self.workload
        inputs, targets = workload.inputs[:1000], workload.targets[:1000]
        with torch.no_grad():
            loss = float(F.cross_entropy(workload.model(inputs), targets))
        return {
            "about": workload.about,
            "parameters": sum(param.numel() for param in workload.parameters()),
            "samples": len(workload.inputs),
            "loss": loss,
            "gradient_batch": self.gradient_batch,
        }

    def gradient(self, size: int, samples: int | None = None) -> list[Tensor]:
        """The gradient of the summed loss by plain PyTorch.

        Args:
            size: Samples at a time.
            samples: How many; None for all.

        Returns:
            In the order of the model's parameters.
        """
        params = self.workload.parameters()
        sums = [torch.zeros_like(param) for param in params]
        for inputs, targets in self.workload.batches(size, samples):
            loss = F.cross_entropy(self.workload.model(inputs), targets, reduction="sum")
            for total, part in zip(sums, torch.autograd.grad(loss, params), strict=True):
                total += part
        return sums
