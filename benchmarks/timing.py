"""Timing beside a unit, in rounds: the entries and the unit that they are measured in, in turn.

The unit is timed before and after every entry, because the speed of a shared machine drifts by
more than the differences of interest; an entry's cost is the ratio to these two.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Action = Callable[[], Any]


@dataclass(frozen=True)
class Entry:
    """Something to time.

    Attributes:
        quantity: What it computes.
        tool: What computes it.
        prepare: Sets it up, untimed, in every round; returns what is timed.
        batch: Samples at a time.
        eligible: Whether it may be the best peer.
        once: Whether it costs so much (more than some forty units) that it is timed only in the
            last round, without a warm-up.
    """

    quantity: str
    tool: str
    prepare: Callable[[], Action]
    batch: int | None = None
    eligible: bool = False
    once: bool = False


@dataclass
class Timing:
    """The cost of an entry, round by round, and its result in the last round.

    Attributes:
        ratios: Its costs in units.
        seconds: The same in seconds of processor time.
        result: What it returned last.
    """

    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    result: Any = None

    @property
    def median(self) -> float:
        """The median over the rounds, in units."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The cheapest and the most expensive round."""
        return min(self.ratios), max(self.ratios)


def cpu_seconds(action: Action) -> tuple[float, Any]:
    """The processor time of all threads that an action takes, and its result."""
    gc.collect()
    start = time.process_time()
    result = action()
    # A coarse clock must not make a unit of zero.
    return max(time.process_time() - start, 1e-7), result


def time_entries(
    unit: Action, entries: Sequence[Entry], *, rounds: int
) -> tuple[list[Timing], list[float]]:
    """Time entries beside a unit.

    Args:
        unit: What costs 1.
        entries: What to time. Every round begins with another one.
        rounds: How many rounds count; one more before them is a warm-up.

    Returns:
        The timings in the order of the entries, and the seconds of every unit.

    Raises:
        ValueError: If no round counts.
    """
    if rounds < 1:
        raise ValueError(f"`rounds={rounds}` times nothing; use at least 1.")
    # Where nothing is repeated, further rounds would time nothing but units.
    warm_up, rounds = (0, 1) if all(entry.once for entry in entries) else (1, rounds)
    timings = [Timing() for _ in entries]
    units: list[float] = []
    gc.freeze()
    try:
        for number in range(warm_up + rounds):
            before, _ = cpu_seconds(unit)
            for position in range(len(entries)):
                index = (position + number) % len(entries)
                if entries[index].once and number < warm_up + rounds - 1:
                    continue
                action = entries[index].prepare()
                seconds, result = cpu_seconds(action)
                del action
                after, _ = cpu_seconds(unit)
                if number >= warm_up:
                    timings[index].ratios.append(seconds / ((before + after) / 2))
                    timings[index].seconds.append(seconds)
                    timings[index].result = result
                    units.append(after)
                before = after
    finally:
        gc.unfreeze()
    return timings, units


def cheapest(actions: dict[int, Action], *, repeats: int = 3) -> int:
    """The setting whose action is cheapest: the best time of a few repeats counts."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(repeats):
        for setting, action in actions.items():
            best[setting] = min(best[setting], cpu_seconds(action)[0])
    return min(best, key=lambda setting: best[setting])


def machine() -> dict[str, Any]:
    """What the times depend on."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "waiting": os.environ.get("OMP_WAIT_POLICY", "default").lower(),
    }
