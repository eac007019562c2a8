"""Work on a study until nothing is open, in one process or several."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flatgauge.analysis.progress import Progress, show_progress
from flatgauge.runtime.resources import set_threads
from flatgauge.studies.findings import Findings
from flatgauge.studies.open_runs import train_open_runs
from flatgauge.studies.ray_engine import RayEngine
from flatgauge.studies.running import complete
from flatgauge.studies.sent_errors import raise_here, sendable
from flatgauge.studies.stacking import SIZE
from flatgauge.studies.store import Store
from flatgauge.studies.study import PATIENCE, Study
from flatgauge.studies.watch import Watch

#: Where a study can run, by name; the first if nothing else is said.
ENGINES = ("local", "ray")

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
    engine: str | RayEngine = ENGINES[0],
    patience: float = PATIENCE,
) -> Findings:
    """Train and measure all networks of a study.

    Args:
        study: The study.
        out: Its folder.
        data: Where data sets are that are read from files.
        resume: Whether to go on with what is in the folder.
        workers: How many processes work on it.
        progress: True for a bar on stderr, or a function.
        engine: ``"local"`` for processes of this machine, ``"ray"``, or a `RayEngine`.
        patience: Seconds after which a process of several is named that does not get on; see
            `Watch`.

    Returns:
        What was found.

    Raises:
        ValueError: If `workers` is not a number of processes, or these are not of this machine.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"`workers={workers!r}` must be a whole number of at least 1.")
    ray = _ray(engine)
    if ray is not None and workers != 1:
        raise ValueError(
            f"`workers={workers}` are processes of this machine; on Ray as many tasks run at once "
            "as fit: leave it out, and give what a task needs, as in `RayEngine(cpus=2)`."
        )
    store, folder = Store(out), None if data is None else str(Path(data).expanduser())
    store.open(study.declaration(), resume=resume)
    store.check_rows(study.runs())
    with show_progress(progress) as tell:
        if ray is not None:
            from flatgauge.studies.ray_work import work_on_ray

            work_on_ray(study, store, folder, ray, tell)
        else:
            _work_together(study, store, folder, workers, tell, patience)
    return Findings.of(study, store, folder)


def _ray(engine: str | RayEngine) -> RayEngine | None:
    """Where to run if not by processes of this machine."""
    if isinstance(engine, RayEngine):
        return engine
    if engine not in ENGINES:
        raise ValueError(
            f"`engine={engine!r}` is unknown; use {' or '.join(map(repr, ENGINES))}, or a "
            "`flatgauge.studies.RayEngine`."
        )
    return RayEngine() if engine == "ray" else None


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
    study: Study,
    store: Store,
    folder: str | None,
    workers: int,
    listener: Progress | None,
    patience: float,
) -> None:
    """Work here, or watch processes that do."""
    if workers == 1:
        work(study, store, folder, listener)
        return
    helpers: list[_Helper] = []
    watch = Watch(patience)
    try:
        for _ in range(workers):
            helpers.append(_Helper(study, store, folder, workers))
            watch.report(helpers[-1].pid, None, time.monotonic())
        while any(helper.process.is_alive() for helper in helpers):
            _tell(listener, f"{workers} processes", store, study.runs())
            time.sleep(_PAUSE)
            for helper in helpers:
                helper.listen(watch)
            for warning in watch.warnings(time.monotonic()):
                sys.stderr.write(f"warning: {warning}\n")
    finally:
        for helper in helpers:
            helper.process.terminate()
            helper.process.join()
    if not all(store.has_row(run) for run in study.runs()):
        codes = ", ".join(str(helper.process.exitcode) for helper in helpers)
        raise RuntimeError(
            f"all processes ended (exit codes {codes}) before the study was done; what is finished "
            "is kept. -9 is often a lack of memory: resume it with fewer `workers`. 1 is often a "
            'script that does not call it under `if __name__ == "__main__":`.'
        )


class _Helper:
    """A process that works on a study, and what it has to say."""

    def __init__(self, study: Study, store: Store, folder: str | None, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._told, telling = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_worker, args=(study, store, folder, workers, telling), daemon=True
        )
        with _without_interrupts():
            self.process.start()
        self.pid = self.process.pid or 0
        telling.close()  # The process has its own end; if it dies, this one sees that.

    def listen(self, watch: Watch) -> None:
        """Note what the process works on; raise here what was raised there."""
        try:
            while self._told.poll():
                said = self._told.recv()
                if isinstance(said, str):
                    watch.report(self.pid, said, time.monotonic())
                else:
                    raise_here(*said)
        except EOFError:  # It ended without a word: it is done, or was killed.
            watch.end(self.pid)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start processes within this: they ignore Ctrl-C also while they import."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _worker(
    study: Study, store: Store, folder: str | None, workers: int, telling: Connection
) -> None:
    """Work in a process of its own, with one thread: networks of a study are small."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that watches.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_threads(1)
    try:
        work(study, store, folder, lambda run, done, of: telling.send(run), workers=workers)
    except Exception as error:
        telling.send(sendable(error))


def _end_with_parent() -> None:
    """Nobody waits for a process whose parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tell(listener: Progress | None, run: str, store: Store, runs: dict[str, Any]) -> None:
    """Say what comes next, and how much is done."""
    if listener is not None:
        listener(run, sum(store.has_row(one) for one in runs), len(runs))
