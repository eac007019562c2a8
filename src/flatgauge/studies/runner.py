"""Run the steps that the networks of a pool still need, on any executor.

In: the names of the networks, a function that gives the next step of each (train, measure, or None
when it is finished), and an executor: this process, processes of this machine, or Ray. Out: the
results, saved one by one as they arrive.

How it works. Only this process, the driver, writes to the pool's folder. Before it works on a
network it takes that network's file lock, so several drivers can share one folder, also from
several machines. A lock is released when its process ends, even by SIGKILL; the next run does what
is missing. What a step returns is saved before the next step of that network is sent, so a
measurement that fails does not cost the training before it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatgauge.runtime.resources import set_threads
from flatgauge.studies.store import PoolStore

if TYPE_CHECKING:
    from flatgauge.analysis.request import Progress

#: What a worker computes next for a network: a function, and what it is called with.
Step = tuple[Callable[[Any], Any], Any]

#: Seconds after which a network that takes ten times as long as others is named.
PATIENCE = 60.0

#: Seconds between two looks at networks that another driver works on.
_PAUSE = 0.5

#: How many times the median of the finished steps is long.
_LONG = 10

#: Networks that a driver claims at most, each by an open file.
_MOST_CLAIMED = 400


@dataclass(frozen=True)
class Workers:
    """Where steps are computed.

    Attributes:
        executor: Computes them.
        slots: How many to have submitted at once; asked again before each.
        losses: Errors that mean a lost worker: the network is left to a later run, and the others
            are finished first.
        advice: What to do about a lost worker.
    """

    executor: Executor
    slots: Callable[[], int]
    losses: tuple[type[BaseException], ...] = ()
    advice: str = ""


@dataclass
class _Running:
    """A network that is being worked on, and what holds its lock."""

    name: str
    lock: Any
    step: Step
    since: float
    named: bool = False


def run_networks(
    names: Iterable[str],
    next_step: Callable[[str], Step | None],
    save: Callable[[str, Any], None],
    *,
    store: PoolStore,
    workers: Workers,
    progress: Progress = lambda name, done, total: None,
    patience: float = PATIENCE,
) -> None:
    """Compute and save what the networks still need.

    Args:
        names: All networks of the pool.
        next_step: What a network needs next, None if it is finished.
        save: Keeps the result of a step; called in this process only.
        store: Whose rows say what is finished, and whose locks keep other drivers away.
        workers: Where to compute.
        progress: Called with a network's name, the number finished, and the total.
        patience: After so many seconds on one network, and ten times what the others took, its
            name is logged, as it may hang.

    Raises:
        RuntimeError: If a network fails or a worker dies. What was saved stays.
    """
    loop = _Loop(list(names), next_step, save, store, workers, progress, patience)
    try:
        loop.run()
    finally:
        loop.release_all()
    if loop.lost:
        name, error = next(iter(loop.lost.items()))
        others = f", and {len(loop.lost) - 1} more were" if len(loop.lost) > 1 else ""
        raise RuntimeError(
            f"network `{name}` was lost with its worker{others} ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]}). All others are finished and kept; "
            f"{workers.advice}."
        ) from error


class _Loop:
    """What waits, what runs, and what was lost."""

    def __init__(
        self,
        names: list[str],
        next_step: Callable[[str], Step | None],
        save: Callable[[str, Any], None],
        store: PoolStore,
        workers: Workers,
        progress: Progress,
        patience: float,
    ) -> None:
        self._names, self._next_step, self._save = names, next_step, save
        self._store, self._workers, self._progress = store, workers, progress
        self._waiting = deque(name for name in names if name not in store.rows())
        self._running: dict[Future[Any], _Running] = {}
        self._patience = patience
        self._took: dict[Any, list[float]] = {}
        self.lost: dict[str, BaseException] = {}

    def run(self) -> None:
        """Until nothing waits and nothing runs."""
        while self._waiting or self._running:
            self._claim()
            if not self._running:
                if self._waiting:  # Others hold what is left; if one of them dies, it is free.
                    time.sleep(_PAUSE)
                continue
            for future in wait(self._running, _PAUSE, FIRST_COMPLETED).done:
                self._take(future)
            self._name_slow()

    def release_all(self) -> None:
        """Leave what runs to others."""
        for running in self._running.values():
            running.lock.release()

    def _claim(self) -> None:
        """Submit networks that nobody else works on, as many as there is room for."""
        for _ in range(len(self._waiting)):
            if len(self._running) >= min(_MOST_CLAIMED, self._workers.slots()):
                return
            name = self._waiting.popleft()
            with ExitStack() as undo:
                lock = self._store.try_claim(name)
                if lock is None:
                    self._waiting.append(name)
                    continue
                undo.callback(lock.release)
                step = self._next_step(name)  # None: another driver finished it meanwhile.
                if step is not None:
                    self._submit(name, lock, step)
                    undo.pop_all()

    def _submit(self, name: str, lock: Any, step: Step) -> None:
        rows = self._store.rows()
        self._progress(name, sum(one in rows for one in self._names), len(self._names))
        function, task = step
        with _naming(name):
            future = self._workers.executor.submit(function, task)
        self._running[future] = _Running(name, lock, step, time.monotonic())

    def _take(self, future: Future[Any]) -> None:
        """Save a result, and send the network's next step."""
        running = self._running[future]
        try:
            with _naming(running.name):
                self._save(running.name, future.result())
        except self._workers.losses as error:
            del self._running[future]
            self.lost[running.name] = error
            running.lock.release()
            return
        took = self._took.setdefault(running.step[0], [])
        took.append(time.monotonic() - running.since)
        step = self._next_step(running.name)
        del self._running[future]
        if step is None:
            running.lock.release()
        else:
            with ExitStack() as undo:
                undo.callback(running.lock.release)
                self._submit(running.name, running.lock, step)
                undo.pop_all()

    def _name_slow(self) -> None:
        """Name networks that take far longer than others."""
        now = time.monotonic()
        for running in self._running.values():
            took = self._took.get(running.step[0])
            usual = statistics.median(took) if took else self._patience
            if not running.named and now - running.since > max(self._patience, _LONG * usual):
                running.named = True
                logging.getLogger("flatgauge").warning(
                    "warning: network `%s` has been worked on for %.0f s; if it hangs, interrupt "
                    "(Ctrl-C) and resume: what is finished is kept.",
                    running.name,
                    now - running.since,
                )


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say in errors of a user's code which network they come from."""
    try:
        yield
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a worker process died while it computed `{name}` or another network, often for lack "
            "of memory. What is finished is kept: resume with fewer `workers`. In a script, call "
            'this under `if __name__ == "__main__":`.'
        ) from error
    except RuntimeError as error:
        raise RuntimeError(f"network `{name}` failed: {error}") from error


# -- processes of this machine ------------------------------------------------------------------


@contextmanager
def local_workers(count: int) -> Iterator[Workers]:
    """Compute in this process (one worker) or in processes of one thread each (several)."""
    if count == 1:
        yield Workers(_InlineExecutor(), lambda: 1)
        return
    context = multiprocessing.get_context("spawn")  # A forked worker would inherit held locks.
    executor = ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker)
    try:
        with _delayed_interrupts():
            for _ in range(count):  # Each starts a process, as none is idle yet.
                executor.submit(int)
        yield Workers(executor, lambda: count)
    finally:
        # All are idle now; on errors and Ctrl-C do not wait for those that are not.
        processes = list((executor._processes or {}).values())
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


class _InlineExecutor(Executor):
    """Computes at once, in the calling thread; Ctrl-C passes through."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def _delayed_interrupts() -> Iterator[None]:
    """Start processes within this: they see no Ctrl-C while they import; it comes afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows.
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    """Prepare a worker: one thread, Ctrl-C left to the driver, end when the driver ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    set_threads(1)
    threading.Thread(target=_end_with_driver, daemon=True).start()


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    if driver is not None:
        driver.join()
        os._exit(1)
