"""The suite: quantities on workloads, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from flatgauge.cli.benchmarks import rounds, workloads
from flatgauge.cli.benchmarks.comparison import TimedComparison
from flatgauge.cli.benchmarks.peers import PEERS
from flatgauge.cli.benchmarks.quantities import OTHERS, QUANTITIES
from flatgauge.cli.benchmarks.results import Results
from flatgauge.cli.benchmarks.row import TimingRow
from flatgauge.cli.benchmarks.tool import Tool, usable

if TYPE_CHECKING:
    from flatgauge.cli.benchmarks.plan import BenchPlan

Tell = Callable[[str], object]


def run(
    plan: BenchPlan,
    *,
    tools: Sequence[Tool] | None = None,
    tell: Tell = lambda line: None,
    kept: Callable[[Results], object] = lambda results: None,
    shown: Callable[[str, list[TimingRow]], object] = lambda about, rows: None,
    strict: bool = False,
) -> Results:
    """Measure what a plan says.

    Args:
        plan: The plan.
        tools: The other tools, None for all; those that cannot be imported are left out.
        tell: Called with lines on progress, and on what is left out.
        kept: Called with the results so far whenever a quantity is finished.
        shown: Called with what a workload is and its rows, as soon as they are there; also when
            the run is interrupted.
        strict: Whether what fails ends the run; else it is noted, and the run goes on.

    Returns:
        The results.
    """
    begin = time.monotonic()
    found = usable(PEERS if tools is None else tools, tell)
    facts = rounds.machine() | {
        "rounds": plan.rounds,
        "scale": plan.scale,
        "data": "synthetic" if plan.data is None else "MNIST and CIFAR-10",
    }
    results = Results(facts | {tool.package: tool.version for tool in found})

    def attempt(name: str, what: str, measure: Callable[[], Iterable[TimingRow]]) -> None:
        passed = time.monotonic() - begin
        tell(f"{passed:6.0f} s  {name if name == what else f'{name}: {what}'}")
        try:
            results.found += measure()
        except Exception as error:  # One that fails must not lose hours of others.
            if strict:
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            results.failures.append(f"{name}, {what}: {reason}")
            tell(f"failed: {results.failures[-1]}")
        kept(results)

    def section(name: str, start: int) -> None:
        rows = results.rows[start:]
        if rows:
            shown(results.about(name, rows), rows)

    for name, wanted in plan.pairs():
        start = len(results.found)
        try:
            _on_workload(name, wanted, plan, found, results, tell, attempt)
        finally:
            section(name, start)
    for name in [name for name in plan.quantities if name in OTHERS]:
        start = len(results.found)
        try:
            attempt(name, name, partial(_other, name, plan))
        finally:
            section(name, start)
    results.complete = True
    kept(results)
    return results


def _on_workload(
    name: str,
    wanted: Sequence[str],
    plan: BenchPlan,
    tools: Sequence[Tool],
    results: Results,
    tell: Tell,
    attempt: Callable[[str, str, Callable[[], Iterable[TimingRow]]], None],
) -> None:
    """Measure everything on one workload."""
    workload = workloads.load(name, scale=plan.scale, folder=plan.data)
    comparison = TimedComparison(workload, tools, rounds=plan.rounds, tell=tell)
    results.workloads[name] = comparison.description()
    for quantity in wanted:
        attempt(name, quantity, partial(QUANTITIES[quantity].measured, comparison))
        results.notes += [f"{name}, {quantity}: {note}" for note in comparison.notes]
        comparison.notes.clear()


def _other(name: str, plan: BenchPlan) -> Iterable[TimingRow]:
    """Measure something that has networks and units of its own."""
    if name == "discovery":
        from flatgauge.cli.benchmarks.quantities import discovery

        return list(discovery.measured())
    from flatgauge.cli.benchmarks.quantities import stacking

    return list(stacking.measured(plan.rounds, plan.data))
