"""Run a pool as tasks of Ray: the cluster, what every task needs, and an executor for the runner.

In: a `RayEngine`, and the code of the user's own networks. Out: `Workers`, whose executor sends a
task and returns Ray's own future. Samples are put into the object store once; the folder with the
user's code is the working directory of the tasks (Ray's `runtime_env`); lost workers are replaced
and errors carried by Ray. Nothing on the nodes reads or writes the pool's folder.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.loading.models import holds, home_of, is_file, split_reference
from flatgauge.runtime.resources import parse_bytes, set_threads
from flatgauge.studies.runner import Workers

if TYPE_CHECKING:
    from flatgauge.studies.data import StudyData
    from flatgauge.studies.tasks import Task

#: Tasks that are sent for each that fits: the next one is there when one ends, and a cluster that
#: grows with what waits sees that there is more. Those that are not sent are left to others.
_AHEAD = 2

#: Seconds between two looks at the cluster.
_PAUSE = 0.5

#: Addresses that Ray resolves itself, at once.
_BY_NAME = ("auto", "local")


@dataclass(frozen=True, kw_only=True)
class RayEngine:
    """Run a pool as tasks of Ray.

    Attributes:
        address: Of a cluster: ``"HOST:PORT"`` of its head, or ``"auto"`` for the one that this
            machine is part of; None takes that of the environment variable ``RAY_ADDRESS``, and if
            there is none starts Ray on this machine for the time of the study. If the process is
            connected already, that connection is used.
        cpus: Processors of a task, and that many threads.
        gpus: Graphics processors that are reserved for a task, for networks of your own that use
            them; flatgauge itself trains and measures networks on processors.
        memory: That is reserved for a task, as ``"2GiB"``; None reserves none.
        retries: How often a task is tried again whose worker or node was lost.
        wait: Seconds to wait for a cluster at the address, and for a node on which a task fits.

    Example:
        >>> RayEngine(address="10.0.0.1:6379", cpus=2, memory="4GiB").needs
        {'CPU': 2, 'GPU': 0, 'memory': 4294967296}
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    memory: str | int | None = None
    retries: int = 3
    wait: float = 60.0

    def __post_init__(self) -> None:
        for name, above in (("cpus", True), ("gpus", False), ("wait", True)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and (value > 0 or (value == 0 and not above))):
                least = "above 0" if above else "of at least 0"
                raise ValueError(f"`{name}={value!r}` must be a finite number {least}.")
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if value > 1 and value != int(value):
                raise ValueError(f"`{name}={value!r}` must be a whole number, or below 1.")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ValueError(f"`retries={self.retries!r}` must be a whole number of at least 0.")
        if self.memory is not None:
            parse_bytes(self.memory)

    @property
    def needs(self) -> dict[str, float]:
        """What a task reserves, by the names that Ray has for it."""
        memory = 0 if self.memory is None else parse_bytes(self.memory)
        return {"CPU": self.cpus, "GPU": self.gpus, "memory": memory}

    @property
    def threads(self) -> int:
        """Threads of a task: no more than the processors that it has."""
        return max(1, int(self.cpus))

    @contextmanager
    def connect(self, code: str | Path | None = None) -> Iterator[Any]:
        """Connect to the cluster; several pools in one block share the connection.

        Args:
            code: A folder with the user's own code, which is sent to the nodes: all files that end
                in ``.py``.

        Yields:
            The module `ray`.

        Raises:
            ConnectionError: If there is no cluster at the address.
        """
        ray = import_ray()
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        _check_address(address, self.wait)
        if ray.is_initialized():
            yield ray
            return
        settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            settings["include_dashboard"] = False
        try:
            with _copy_code(code) as copy:
                if copy is not None:
                    settings["runtime_env"] = {"working_dir": copy}
                ray.init(address=address, **settings)  # Sends the copy.
        except (ConnectionError, SystemExit) as error:  # Ray ends the process where it waits long.
            raise ConnectionError(
                f"`{address}` is no Ray cluster that can be used from here ({error}); start one "
                "with `ray start --head`, give the address that it prints, or leave the address "
                "out to start Ray on this machine."
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()

    @contextmanager
    def workers(self, references: Sequence[str]) -> Iterator[Workers]:
        """The tasks of the cluster as workers for `run_networks`.

        Args:
            references: The user's own code that makes networks, as ``file.py:name``.

        Yields:
            The workers.

        Raises:
            RuntimeError: If no node can hold a task for as long as `wait`.
        """
        code = code_folder(references)
        with self.connect(code) as ray:
            sent = ray.get_runtime_context().runtime_env.get("working_dir")
            executor = _RayExecutor(ray, self, bool(sent))
            _wait_for_room(ray, self)
            try:
                errors = ray.exceptions
                yield Workers(
                    executor,
                    lambda: _AHEAD * max(1, _room(ray, self)),
                    (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError),
                    "resume: with more memory for a task (`--task-memory`, or `memory=`) if it ran "
                    "out of it, else with more `retries`",
                )
            finally:
                executor.cancel_all()


def import_ray() -> Any:
    """The module `ray`, imported only when it is needed; an error says how to install it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "pools and studies on Ray need Ray, which is not installed; run "
            '`pip install "flatgauge[ray]"` here and on all nodes of the cluster.'
        ) from error
    return ray


def code_folder(references: Sequence[str]) -> Path | None:
    """The one folder that holds the user's own code; None if all code is installed."""
    places = [split_reference(reference)[0] for reference in references]
    own = [place for place in places if is_file(place) or holds(Path(), place)]
    folders = sorted({home_of(place) for place in own})
    if len(folders) > 1:
        raise ValueError(
            f"the code of these networks is in {len(folders)} folders ({folders[0]}, "
            f"{folders[1]}, ...), and Ray sends one to the nodes; put it into one folder."
        )
    return folders[0] if folders else None


@contextmanager
def _copy_code(code: str | Path | None) -> Iterator[str | None]:
    """The Python files of a folder in a folder of their own, to be sent without its data."""
    if code is None:
        yield None
        return

    def ignore(folder: str, names: list[str]) -> list[str]:
        return [
            name
            for name in names
            if name.startswith(".") or not (name.endswith(".py") or Path(folder, name).is_dir())
        ]

    with tempfile.TemporaryDirectory(prefix="flatgauge-code-") as copy:
        shutil.copytree(code, copy, ignore=ignore, dirs_exist_ok=True)
        yield copy


class _RayExecutor(Executor):
    """Sends tasks, with samples that every node gets once."""

    def __init__(self, ray: Any, engine: RayEngine, code_sent: bool) -> None:
        self._ray, self._code_sent = ray, code_sent
        self._threads = engine.threads
        self._futures: list[Future[Any]] = []
        self._samples: dict[Any, Any] = {}
        needs = engine.needs
        self._remote = ray.remote(_compute_on_node).options(
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
            memory=needs["memory"] or None,
            max_retries=engine.retries,
        )

    def submit(  # type: ignore[override]
        self, function: Callable[[Task], Any], task: Task, /
    ) -> Future[Any]:
        samples = None
        if task.sample_key is not None:
            if task.sample_key not in self._samples:
                from flatgauge.studies.tasks import load_task_samples

                self._samples[task.sample_key] = self._ray.put(load_task_samples(task))
            samples = self._samples[task.sample_key]
        factory, weights = None, task.weights
        if ":" in task.code:
            place, name = split_reference(task.code)
            if is_file(place):  # In the working directory of tasks, or at the same place as here.
                folder = Path() if self._code_sent else home_of(place)
                factory = f"{folder / Path(place).name}:{name}"
        if isinstance(weights, Path):
            weights = weights.expanduser().read_bytes()
        task = replace(task, factory=factory, weights=weights, folder=None)
        version = metadata.version("flatgauge")
        future: Future[Any] = _unwrap(
            self._remote.remote(function, task, samples, self._threads, version).future()
        )
        self._futures.append(future)
        return future

    def cancel_all(self) -> None:
        """End the tasks that nobody waits for any more, with their processes."""
        for future in self._futures:
            if not future.done():
                self._ray.cancel(future.object_ref, force=True)  # type: ignore[attr-defined]


def _compute_on_node(
    function: Callable[[Task], Any],
    task: Task,
    samples: StudyData | None,
    threads: int,
    version: str,
) -> Any:
    """A step of a network, computed on a node of the cluster."""
    here = metadata.version("flatgauge")
    if here != version:
        raise ImportError(
            f"the node `{platform.node()}` has flatgauge {here}, and the pool is run by {version}; "
            "install the same version on all nodes."
        )
    set_threads(threads)
    return function(replace(task, samples=samples))


def _unwrap(future: Future[Any]) -> Future[Any]:
    """Let a future raise what the task raised, with the node's traceback as its cause."""
    result = future.result

    def get(timeout: float | None = None) -> Any:
        try:
            return result(timeout)
        except Exception as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception):
                raise cause from RuntimeError(f"on a node of the cluster:\n{error}")
            raise

    future.result = get  # type: ignore[method-assign]
    return future


def _check_address(address: str, wait: float) -> None:
    """Wait until something answers at an address: Ray itself waits for minutes."""
    if address in _BY_NAME:
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"`address={address!r}` is no address of a Ray cluster; write HOST:PORT, as "
            "`ray start --head` prints it (port 6379 unless it was given another), or auto for the "
            "cluster that this machine is part of."
        )
    deadline = time.monotonic() + wait
    while True:
        left = max(0.1, min(5.0, deadline - time.monotonic()))
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left):
                return
        except OSError as error:
            if time.monotonic() + _PAUSE > deadline:
                raise ConnectionError(
                    f"no Ray cluster answers at `{address}` within {wait:g} s ({error}); see that "
                    "it runs (`ray status` on its head), that the port can be reached from here, "
                    "or wait longer for it (`--wait`, or `wait=`)."
                ) from error
        time.sleep(_PAUSE)


def _nodes(ray: Any) -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _room(ray: Any, engine: RayEngine) -> int:
    """How many tasks fit on the nodes of the cluster."""
    needs = {name: amount for name, amount in engine.needs.items() if amount}
    return sum(
        min(int(node.get(name, 0) / amount) for name, amount in needs.items())
        for node in _nodes(ray)
    )


def _wait_for_room(ray: Any, engine: RayEngine) -> None:
    """Refuse a cluster on which no task fits for long."""
    deadline = time.monotonic() + engine.wait
    while not _room(ray, engine):
        if time.monotonic() > deadline:
            nodes = "; ".join(_amounts(node) for node in _nodes(ray))
            raise RuntimeError(
                f"no node of the cluster can hold a task of {_amounts(engine.needs)}, for "
                f"{engine.wait:g} s now; its nodes have {nodes or 'ended'}. What is finished is "
                "kept: resume with tasks that need less, or once there is such a node."
            )
        time.sleep(_PAUSE)


def _amounts(resources: Mapping[str, float]) -> str:
    """What a node has or a task needs, as text."""
    memory = resources.get("memory", 0)
    parts = [f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU")]
    return ", ".join(parts + ([f"{memory / 2**30:.3g} GiB"] if memory else []))
