"""Work on a study until nothing is open, in one process or several."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

from flatgauge.progress import Progress, shown
from flatgauge.studies.findings import Findings
from flatgauge.studies.open_runs import train_open_runs
from flatgauge.studies.running import complete
from flatgauge.studies.stacking import SIZE
from flatgauge.studies.store import Store
from flatgauge.studies.study import Study

#: Seconds between two looks at runs that other processes hold.
_PAUSE = 0.5


def run_study(
    study: Study,
    out: str | Path,
    *,
    data: str | Path | None = None,
    resume: bool = False,
    workers: int = 1,
    progress: Progress | bool = False,
) -> Findings:
    """Train and measure all networks of a study.

    Args:
        study: The study.
        out: Its folder.
        data: Where data sets are that are read from files.
        resume: Whether to go on with what is in the folder.
        workers: How many processes work on it.
        progress: True for a bar on stderr, or a function.

    Returns:
        What was found.

    Raises:
        ValueError: If `workers` is not a number of processes.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"`workers={workers!r}` must be a whole number of at least 1.")
    store, folder = Store(out), None if data is None else str(Path(data).expanduser())
    store.open(study.declaration(), resume=resume)
    with shown(progress) as tell:
        _work_together(study, store, folder, workers, tell)
    return Findings.of(study, store, folder)


def work(
    study: Study,
    store: Store,
    folder: str | None,
    listener: Progress | None = None,
    *,
    workers: int = 1,
) -> None:
    """Take one open run after the other, beside other processes, until all are done.

    Networks that are trained faster together than one by one are trained first, in stacks.

    Args:
        study: The study.
        store: Its folder.
        folder: Where data sets are.
        listener: Called before each run.
        workers: How many processes share the work, so that none takes it all.
    """
    runs = study.runs()
    train_open_runs(
        study,
        store,
        folder,
        size=min(SIZE, -(-len(runs) // workers)),
        listener=lambda run: _tell(listener, run, store, runs),
    )
    while True:
        waiting, found = [run for run in runs if not store.has_row(run)], False
        for run in waiting:
            with store.held(run) as mine:
                if mine and not store.has_row(run):
                    _tell(listener, run, store, runs)
                    complete(study, run, store, folder)
                    found = True
        if not waiting:
            return
        if not found:  # Others hold what is left; if one of them dies, its runs come free.
            time.sleep(_PAUSE)


def _work_together(
    study: Study, store: Store, folder: str | None, workers: int, listener: Progress | None
) -> None:
    """Work here, or watch processes that do."""
    if workers == 1:
        work(study, store, folder, listener)
        return
    context = multiprocessing.get_context("spawn")
    helpers = [
        context.Process(target=_worker, args=(study, store, folder, workers), daemon=True)
        for _ in range(workers)
    ]
    for helper in helpers:
        helper.start()
    try:
        while any(helper.is_alive() for helper in helpers):
            _tell(listener, f"{workers} processes", store, study.runs())
            time.sleep(_PAUSE)
    finally:
        for helper in helpers:
            helper.terminate()
            helper.join()
    if not all(store.has_row(run) for run in study.runs()):
        codes = ", ".join(str(helper.exitcode) for helper in helpers)
        raise RuntimeError(
            f"all processes ended (exit codes {codes}) before the study was done; what they said "
            "is on stderr; resume it, perhaps with `workers=1`."
        )


def _worker(study: Study, store: Store, folder: str | None, workers: int) -> None:
    """Work in a process of its own, with one thread: networks of a study are small."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    threadpool_limits(1)
    work(study, store, folder, workers=workers)


def _tell(listener: Progress | None, run: str, store: Store, runs: dict[str, Any]) -> None:
    """Say what comes next, and how much is done."""
    if listener is not None:
        listener(run, sum(store.has_row(one) for one in runs), len(runs))
