"""Timing beside a unit, in rounds: what is measured and what it is measured in, in turn.

The unit is timed before and after every method, because the speed of a shared machine drifts
by more than the differences of interest; a method's cost is the ratio to these two.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

Action = Callable[[], Any]

#: The shortest time that is taken for one, in seconds.
_TICK = 1e-7


@dataclass(frozen=True)
class Method:
    """Something to time.

    Attributes:
        name: What it is called.
        prepare: Sets it up, untimed, in every round; returns what is timed.
        dear: Whether it costs so much (more than some forty units) that it is done only once, in
            the last round, without a warm-up.
    """

    name: str
    prepare: Callable[[], Action]
    dear: bool = False


@dataclass
class Timing:
    """The cost of a method in units, round by round, and its result in the last round.

    Attributes:
        name: What it is called.
        ratios: Its costs.
        seconds: The same in seconds of processor time.
        result: What came out last.
    """

    name: str
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    result: Any = None

    @property
    def median(self) -> float:
        """The middle of all rounds."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The cheapest and the dearest round."""
        return min(self.ratios), max(self.ratios)


@contextmanager
def settled() -> Iterator[None]:
    """Have what is there now looked at for garbage once, not before every timing."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def cpu_seconds(action: Action) -> tuple[float, Any]:
    """Do something.

    Args:
        action: What to do.

    Returns:
        The processor time of all threads of this process, and the result.
    """
    gc.collect()
    start = time.process_time()
    result = action()
    # A clock too coarse for a tiny workload must not make a unit of zero.
    return max(time.process_time() - start, _TICK), result


def timed(
    unit: Action, methods: Sequence[Method], *, rounds: int, warm_up: int = 1
) -> tuple[list[Timing], list[float]]:
    """Time methods beside a unit.

    Args:
        unit: What costs 1.
        methods: What to time. Every round begins with another one.
        rounds: How many rounds count.
        warm_up: How many rounds before them do not.

    Returns:
        What the methods cost, in their order, and the seconds of every unit.

    Raises:
        ValueError: If no round counts.
    """
    if rounds < 1:
        raise ValueError(f"`rounds={rounds}` times nothing; use at least 1.")
    timings = [Timing(method.name) for method in methods]
    units: list[float] = []
    with settled():
        for number in range(warm_up + rounds):
            before, _ = cpu_seconds(unit)
            for position in range(len(methods)):
                index = (position + number) % len(methods)
                if methods[index].dear and number < warm_up + rounds - 1:
                    continue
                action = methods[index].prepare()
                seconds, result = cpu_seconds(action)
                del action
                after, _ = cpu_seconds(unit)
                if number >= warm_up:
                    timings[index].ratios.append(seconds / ((before + after) / 2))
                    timings[index].seconds.append(seconds)
                    timings[index].result = result
                    units.append(after)
                before = after
    return timings, units


def cheapest(actions: dict[int, Action], *, repeats: int = 3) -> int:
    """Try a few settings out, in turn, and say which was cheapest.

    Args:
        actions: What to do under each setting.
        repeats: How often; the best time of each counts.

    Returns:
        The setting.
    """
    best = dict.fromkeys(actions, float("inf"))
    with settled():
        for _ in range(repeats):
            for setting, action in actions.items():
                best[setting] = min(best[setting], cpu_seconds(action)[0])
    return min(best, key=lambda setting: best[setting])


def machine() -> dict[str, Any]:
    """What the times depend on."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "waiting": os.environ.get("OMP_WAIT_POLICY", "default").lower(),
    }


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo") as lines:
            named = (line for line in lines if line.startswith("model name"))
            return next(named).partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
