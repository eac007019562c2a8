"""The suite: quantities on workloads, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from flatgauge.bench import rounds, workloads
from flatgauge.bench.comparison import Comparison
from flatgauge.bench.peers import PEERS
from flatgauge.bench.quantities import OTHERS, QUANTITIES, USUAL
from flatgauge.bench.results import Results
from flatgauge.bench.row import Row
from flatgauge.bench.tool import Tool, usable

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        workloads: On which workloads.
        quantities: What of them.
        rounds: How many rounds count.
        scale: What share of the samples to take.
        data: Where MNIST and CIFAR-10 lie; None for synthetic images.
    """

    workloads: Sequence[str] = tuple(workloads.KINDS)
    quantities: Sequence[str] = USUAL
    rounds: int = 3
    scale: float = 1.0
    data: str | None = None

    def __post_init__(self) -> None:
        _check("workloads", self.workloads, list(workloads.KINDS))
        _check("quantities", self.quantities, [*QUANTITIES, *OTHERS])
        if self.rounds < 1:
            raise ValueError(f"`rounds={self.rounds}` times nothing; use at least 1.")
        if not self.scale > 0:
            raise ValueError(f"`scale={self.scale:g}` leaves no samples; use 1 for all of them.")
        if not any(True for _ in self.pairs()) and not set(self.quantities) & set(OTHERS):
            raise ValueError(
                f"none of {', '.join(self.quantities)} is measured on "
                f"{', '.join(self.workloads)}; `classes` needs {workloads.MANY_CLASSES}, all "
                f"others one of {', '.join(workloads.STANDARD)}."
            )

    def pairs(self) -> Iterable[tuple[str, list[str]]]:
        """The workloads that something is measured on, each with what that is."""
        for name in self.workloads:
            wanted = [
                quantity
                for quantity in self.quantities
                if quantity in QUANTITIES and name in QUANTITIES[quantity].workloads
            ]
            if wanted:
                yield name, wanted


def run(
    plan: Plan,
    *,
    tools: Sequence[Tool] | None = None,
    tell: Tell = lambda line: None,
    kept: Callable[[Results], object] = lambda results: None,
    shown: Callable[[str, list[Row]], object] = lambda about, rows: None,
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

    def attempt(name: str, what: str, measure: Callable[[], Iterable[Row]]) -> None:
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
    plan: Plan,
    tools: Sequence[Tool],
    results: Results,
    tell: Tell,
    attempt: Callable[[str, str, Callable[[], Iterable[Row]]], None],
) -> None:
    """Measure everything on one workload."""
    workload = workloads.load(name, scale=plan.scale, folder=plan.data)
    comparison = Comparison(workload, tools, rounds=plan.rounds, tell=tell)
    results.workloads[name] = comparison.description()
    for quantity in wanted:
        attempt(name, quantity, partial(QUANTITIES[quantity].measured, comparison))
        results.notes += [f"{name}, {quantity}: {note}" for note in comparison.notes]
        comparison.notes.clear()


def _other(name: str, plan: Plan) -> Iterable[Row]:
    """Measure something that has networks and units of its own."""
    if name == "discovery":
        from flatgauge.bench.quantities import discovery

        return list(discovery.measured())
    from flatgauge.bench.quantities import stacking

    return list(stacking.measured(plan.rounds, plan.data))


def _check(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that are not known, and none at all."""
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        given = ", ".join(map(repr, wrong)) or "nothing"
        raise ValueError(f"`{what}` has {given}; there are {', '.join(known)}.")
