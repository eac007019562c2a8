"""Work on a study by tasks of Ray, which are sent, watched, and kept when they come back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from flatgauge.analysis.progress import Progress
from flatgauge.studies.carried_code import carried_code
from flatgauge.studies.holding import Held
from flatgauge.studies.preparing import NOISE, clean_samples, sample_key
from flatgauge.studies.ray_engine import RayEngine
from flatgauge.studies.ray_task import Failed, Job, complete_at_once, complete_far_away, packed
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.running import named
from flatgauge.studies.sent_errors import raise_here
from flatgauge.studies.store import Store
from flatgauge.studies.study import Study

#: Seconds between two looks at runs that other processes hold, and at the nodes.
_PAUSE = 0.5

#: Tasks that are sent for each that fits: the next one is there when one ends, and a cluster that
#: grows with what waits sees that there is more. Those that are not sent are left to others.
_AHEAD = 2

#: Seconds that tasks have to end when they are called back.
_FAREWELL = 2.0

#: Runs that are held at most, each by an open file.
_MOST = 400


def work_on_ray(
    study: Study, store: Store, folder: str | None, engine: RayEngine, listener: Progress
) -> None:
    """Send every open run to the cluster, and keep what comes back, until all are done.

    Args:
        study: The study.
        store: Its folder; only this process reads and writes it.
        folder: Where data sets are.
        engine: Where to run.
        listener: Told of progress.

    Raises:
        RuntimeError: If runs were lost too often, or no node can hold a task.
    """
    with engine.connected() as ray, Held(store) as held:
        driver = _Driver(ray, study, store, folder, engine, held, listener)
        try:
            driver.work()
        finally:
            driver.call_back()
    if driver.lost_for_good:
        raise RuntimeError(_told(driver.lost_for_good, engine))


class _Driver:
    """What is open, what is out, and what was lost."""

    def __init__(
        self,
        ray: Any,
        study: Study,
        store: Store,
        folder: str | None,
        engine: RayEngine,
        held: Held,
        listener: Progress,
    ) -> None:
        self._ray, self._study, self._store, self._folder = ray, study, store, folder
        self._engine, self._held, self._listener = engine, held, listener
        self._runs = study.runs()
        self._open = deque(run for run in self._runs if not store.has_row(run))
        self._out: dict[Any, str] = {}
        self._losses: dict[str, int] = {}
        self.lost_for_good: dict[str, Exception] = {}
        needs = engine.needs
        # A client outside of the cluster (ray://) gets all of a task at its end.
        self._streams = not ray.util.client.ray.is_connected()
        self._task = ray.remote(complete_far_away if self._streams else complete_at_once).options(
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
            memory=needs["memory"] or None,
            num_returns="streaming" if self._streams else 1,
            max_retries=0,  # Tried again from here, where it is counted and told.
        )
        self._shared_study = ray.put(study)
        self._shared_samples: dict[Any, Any] = {}
        # Gathered once: all runs have the same code, also if it is edited meanwhile.
        own = {recipe.network for recipe in self._runs.values() if ":" in recipe.network}
        self._codes = {reference: carried_code(reference) for reference in own}
        self._nodes = _Nodes(ray, engine)

    def work(self) -> None:
        """Until nothing is open that was not lost for good."""
        while self._open or self._out:
            self._nodes.look()
            self._send()
            if not self._out:  # Others hold what is left; if one of them dies, its runs come free.
                time.sleep(_PAUSE)
                continue
            self._tell()
            ready, _ = self._ray.wait(list(self._out), timeout=_PAUSE)
            for task in ready:
                self._nodes.work_is_done()
                self._take(task)

    def call_back(self) -> None:
        """End the tasks that are out, as nobody waits for them any more."""
        tasks = list(self._out)
        for task in tasks:
            self._ray.cancel(task)  # It can still remove its folder.
        if tasks:
            self._ray.wait(tasks, num_returns=len(tasks), timeout=_FAREWELL)
        for task in tasks:
            self._ray.cancel(task, force=True)

    def _send(self) -> None:
        """Send as many tasks as are worth waiting for a place."""
        many = min(_MOST, _AHEAD * max(1, self._nodes.room))
        for _ in range(len(self._open)):
            if len(self._out) >= many:
                return
            run = self._open.popleft()
            if not self._held.take(run):
                self._open.append(run)
            elif self._store.has_row(run):  # Another process finished it meanwhile.
                self._held.release(run)
            else:
                self._out[self._sent(run, self._runs[run])] = run

    def _sent(self, run: str, recipe: Recipe) -> Any:
        """A task that completes a run."""
        with named(run):
            samples = self._samples(recipe)
        job = Job(
            run=run,
            model=self._store.contents(run, "models"),
            code=self._codes.get(recipe.network),
            threads=self._engine.threads,
            version=metadata.version("flatgauge"),
        )
        return self._task.remote(self._shared_study, samples, job)

    def _samples(self, recipe: Recipe) -> Any:
        """The samples of a recipe, of which every node gets one copy."""
        if recipe.data == NOISE:
            return None
        key = sample_key(recipe)
        if key not in self._shared_samples:
            self._shared_samples[key] = self._ray.put(packed(clean_samples(recipe, self._folder)))
        return self._shared_samples[key]

    def _take(self, task: Any) -> None:
        """Keep what a task has finished, or see why it has not."""
        errors, run = self._ray.exceptions, self._out[task]
        try:
            came = [self._ray.get(next(task))] if self._streams else self._ray.get(task)
        except errors.RayTaskError as error:
            raise RuntimeError(
                f"a node of the cluster cannot begin run `{run}` ({_last_line(error)}); install "
                f"flatgauge {metadata.version('flatgauge')} and what your own code imports on all "
                "nodes."
            ) from error
        except errors.RayError as error:
            del self._out[task]
            self._lose(run, error)
            return
        for part in came:
            if isinstance(part, Failed):
                del self._out[task]
                raise_here(part.error, part.text)
            self._store.keep(run, part.part, part.contents)
            if part.part == "rows":
                del self._out[task]
                self._held.release(run)

    def _lose(self, run: str, error: Exception) -> None:
        """Try a run again whose worker or node is gone, if it was not tried often enough."""
        self._losses[run] = self._losses.get(run, 0) + 1
        if self._losses[run] <= self._engine.retries:
            self._open.append(run)
            return
        self.lost_for_good[run] = error
        self._held.release(run)

    def _tell(self) -> None:
        """Say what is going on, and how much is done."""
        done = sum(self._store.has_row(run) for run in self._runs)
        self._listener(f"{len(self._out)} tasks on Ray", done, len(self._runs))


class _Nodes:
    """The nodes of a cluster, looked at now and then."""

    def __init__(self, ray: Any, engine: RayEngine) -> None:
        self._ray, self._engine = ray, engine
        self._looked = -float("inf")
        self._hopeful = time.monotonic()
        self.room = 0

    def look(self) -> None:
        """See how many tasks fit, and give up if there was no room for too long."""
        now = time.monotonic()
        if now - self._looked < _PAUSE:
            return
        self._looked = now
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        self.room = sum(_fitting(node, self._engine.needs) for node in nodes)
        if self.room:
            self._hopeful = now
        elif now - self._hopeful > self._engine.wait:
            raise RuntimeError(
                f"no node of the cluster can hold a task of {_amounts(self._engine.needs)}, for "
                f"{self._engine.wait:g} s now; its nodes have "
                f"{'; '.join(map(_amounts, nodes)) or 'ended'}. What is finished is kept: resume "
                "with tasks that need less, or once there is such a node."
            )

    def work_is_done(self) -> None:
        """Something came back, so there is a node."""
        self._hopeful = time.monotonic()


def _fitting(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How many tasks a node can hold."""
    return min(int(node.get(name, 0) / amount) for name, amount in needs.items() if amount)


def _amounts(resources: Mapping[str, float]) -> str:
    """What a node has or a task needs, in words."""
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    memory = resources.get("memory", 0)
    told = [f"{cpus:g} CPU", f"{gpus:g} GPU"] + ([f"{memory / 2**30:.3g} GiB"] if memory else [])
    return ", ".join(told)


def _last_line(error: Exception) -> str:
    """What an error says in the end."""
    return str(error).strip().splitlines()[-1].strip()


def _told(lost: Mapping[str, Exception], engine: RayEngine) -> str:
    """Which runs were lost, and what to do."""
    run, error = next(iter(lost.items()))
    others = f", and {len(lost) - 1} more were" if len(lost) > 1 else ""
    why = str(error).strip().splitlines()[0]
    return (
        f"run `{run}` was lost with its worker or node {engine.retries + 1} times{others} (at "
        f"last: {type(error).__name__}: {why}). All other runs are finished and kept; if it ran "
        "out of memory, resume with more for a task (`--task-memory`, or `memory=`), else with "
        "more `retries`."
    )
