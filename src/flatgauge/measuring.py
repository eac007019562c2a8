"""Measure a surface: every measure asked for, one report."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flatgauge.asking import as_keeper, checked_request
from flatgauge.blame import located
from flatgauge.curvature.blocks import block_curvature
from flatgauge.curvature.surrogate import under_surrogate
from flatgauge.curvature.taps import PARTS
from flatgauge.estimators import Estimate
from flatgauge.forecast import memory_estimate
from flatgauge.geometry.balanced import balanced_twin
from flatgauge.measures import BALANCED, Measure
from flatgauge.progress import Progress, shown
from flatgauge.randomness import source
from flatgauge.report import Report, facts_of
from flatgauge.report.run import Facts
from flatgauge.report.table import duration
from flatgauge.surface import LossSurface
from flatgauge.words import GroupError

Keep = Callable[[Report], object]

#: The purpose of the source of randomness that measures of one sweep share.
_SHARED = "curvature"


def measure(
    surface: LossSurface,
    *,
    measures: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None,
    gauge: str | None = None,
    seed: int = 0,
    progress: Progress | bool = False,
    save: str | Path | Keep | None = None,
) -> Report:
    """Measure how flat a surface is at its point.

    Measures that need the exact sweep share one. Random numbers come from sources made of the
    seed and their purpose: a value does not depend on which others are measured beside it.

    Args:
        surface: Where to measure.
        measures: Names of measures, or a mapping from names to their options; None or ``"all"``
            for all, where one that fails is marked in the report and does not lose the others.
            ``"balanced:hessian_trace"`` is the Hessian trace of the balanced form of the model
            (the way to write it that has the smallest norm), where every measure is invariant to
            rescaling.
        gauge: ``"balanced"`` to measure all of them there; None for the model as it is.
        seed: Of everything random.
        progress: True for a bar on stderr; or a function called before each measure with its
            name, how many are done, and how many there are.
        save: A file that holds the report as JSON after every measure that is finished, so that
            neither a failure nor Ctrl-C loses any (`Report.from_json` reads it); or a function
            that is called with the report so far.

    Returns:
        The report: estimates by name, and the facts of the run.

    Raises:
        ValueError: If a measure, an option or a gauge does not exist, or a measure asked for by
            name fails.
        RuntimeError: If the model fails while a measure asked for by name runs.
        MemoryError: If a measure asked for by name does not fit the budget.
        TypeError: If `surface` or `measures` is of the wrong kind.

    Example:
        >>> from flatgauge.examples import two_weights
        >>> report = measure(two_weights(2.0, 3.0), measures=["hessian_trace"])
        >>> report["hessian_trace"].value
        26.0
    """
    wanted = checked_request(surface, measures, gauge, seed)
    # Asked for by name, the answer may be an error.
    strict = measures is not None and measures != "all"
    sweeps = strict and any(set(item.needs) & set(PARTS) for item, _ in wanted)
    with surface.processes.together("measure"), shown(progress, surface) as tell:
        keep = as_keeper(save, surface.processes)
        foreseen = memory_estimate(surface, sweep=sweeps)  # What cannot fit is refused first.
        if progress is True and not surface.processes.rank:
            sys.stderr.write(f"{foreseen}\n")
        return report_of(surface, wanted, seed=seed, strict=strict, progress=tell, keep=keep)


def report_of(
    surface: LossSurface,
    wanted: list[tuple[Measure, dict[str, Any]]],
    *,
    seed: int,
    strict: bool,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> Report:
    """Run measures, and hand over the report after each of them.

    Args:
        surface: Where to measure.
        wanted: The measures, with their options.
        seed: Of everything random.
        strict: Whether the failure of one is an error; else it is marked.
        progress: Called before each measure.
        keep: Called with the report so far after each measure, and with the whole one.

    Returns:
        The report.
    """
    start = time.perf_counter()

    def facts(sweep: str | None) -> Facts:
        return facts_of(surface, seed=seed, sweep=sweep, seconds=time.perf_counter() - start)

    def so_far(estimates: dict[str, Estimate], sweep: str | None) -> None:
        if keep is not None and len(estimates) < len(wanted):
            keep(Report(estimates, facts(sweep), complete=False))

    estimates, sweep = estimates_of(
        surface, wanted, seed=seed, strict=strict, progress=progress, finished=so_far
    )
    report = Report(estimates, facts(sweep))
    if keep is not None:
        keep(report)
    return report


def estimates_of(
    surface: LossSurface,
    wanted: list[tuple[Measure, dict[str, Any]]],
    *,
    seed: int,
    strict: bool,
    progress: Progress | None = None,
    finished: Callable[[dict[str, Estimate], str | None], None] | None = None,
) -> tuple[dict[str, Estimate], str | None]:
    """Run measures that share one sweep.

    Args:
        surface: Where to measure.
        wanted: The measures, with their options.
        seed: Of everything random.
        strict: Whether the failure of one is an error; else it is marked.
        progress: Called before each measure.
        finished: Called after each measure with what this function returns, so far.

    Returns:
        The estimates by name, and what the sweep took, None where there was none.

    Raises:
        Exception: What a measure raises, if `strict` is set.
        GroupError: If the processes cannot go on together.
    """
    sweeps = []
    for gauge in dict.fromkeys(item.gauge for item, _ in wanted):
        needs = _shared([pair for pair in wanted if pair[0].gauge == gauge])
        if needs:
            if progress is not None:
                progress("sweep", 0, len(wanted))
            sweeps.append(_swept(surface, gauge, needs, seed))
    told = " and ".join(sweep for sweep in sweeps if sweep) or None
    estimates: dict[str, Estimate] = {}
    # Eigenvalues of blocks come first: they let go of the columns that the sweep has kept.
    order = sorted(wanted, key=lambda pair: "eigenvalues" not in pair[0].needs)
    for done, (item, options) in enumerate(order):
        if progress is not None:
            progress(item.name, done, len(wanted))
        if item.draws:
            purpose = _SHARED if item.needs else item.name.removeprefix(BALANCED)
            options = options | {"generator": source(seed, purpose)}
        compute = partial(item.function, surface, **options)
        try:
            estimates[item.name] = surface.processes.attempt(
                item.name, compute, same=surface.subject.and_state()
            )
        except GroupError:  # Nothing more can be measured together.
            raise
        except Exception as error:
            if strict:
                raise
            estimates[item.name] = Estimate(
                math.nan, converged=False, notes=(f"could not be measured: {_reason(error)}",)
            )
        if finished is not None:
            finished(_in_order(estimates, wanted), told)
    return _in_order(estimates, wanted), told


def _reason(error: Exception) -> str:
    """Why a measure failed; an error that says nothing by itself is named, with its place."""
    explained = type(error) in (ValueError, RuntimeError, MemoryError)
    return str(error) if explained and str(error) else located(error)


def _in_order(
    estimates: dict[str, Estimate], wanted: list[tuple[Measure, dict[str, Any]]]
) -> dict[str, Estimate]:
    """What there is so far, in the order it was asked for."""
    return {item.name: estimates[item.name] for item, _ in wanted if item.name in estimates}


def _shared(wanted: list[tuple[Measure, dict[str, Any]]]) -> dict[str | None, set[str]]:
    """What one sweep of each loss (by surrogate, None for the own) can yield for all measures."""
    needs: dict[str | None, set[str]] = {}
    for item, options in wanted:
        if not {"all_columns", "probes"} & options.keys():  # These need a sweep of their own.
            surrogate = (item.options | options).get("surrogate")
            chosen = {"eigenvalues"} if options.get("layers") else set()  # of other layers
            needs.setdefault(surrogate, set()).update(item.needed(options) - chosen)
    return {surrogate: found for surrogate, found in needs.items() if found & set(PARTS)}


def _swept(
    surface: LossSurface, gauge: str | None, needs: dict[str | None, set[str]], seed: int
) -> str | None:
    """Sweep once for all measures of the same loss, and say what that took."""
    # Where a sweep fails, the measures that need it say so themselves.
    start, done = time.perf_counter(), 0
    if gauge is not None:
        try:
            surface, _ = surface.processes.attempt("the balance", partial(balanced_twin, surface))
        except GroupError:
            raise
        except Exception:
            return None
    matvecs = surface.matvecs
    for surrogate, found in needs.items():
        try:
            surface.processes.attempt("sweep", partial(_sweep, surface, surrogate, found, seed))
            done += 1
        except GroupError:
            raise
        except Exception:
            continue
    took, spent = duration(time.perf_counter() - start), surface.matvecs - matvecs
    if not done:
        return None
    return f"{took} and {spent} Hessian products" if spent else took


def _sweep(surface: LossSurface, surrogate: str | None, needs: set[str], seed: int) -> None:
    """Sweep once under one loss; the surface holds what comes of it."""
    block_curvature(
        under_surrogate(surface, surrogate),
        needs & set(PARTS),
        estimate="estimates" in needs,
        keep_columns="eigenvalues" in needs,
        generator=source(seed, _SHARED),
    )
