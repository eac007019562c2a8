"""Nothing is lost and nothing is done twice, whatever happens to the processes of a pool."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flatgauge.studies import store as store_module
from flatgauge.studies.runner import Workers, local_workers, run_networks
from flatgauge.studies.store import PoolStore

NAMES = [f"net-{number}" for number in range(5)]
DECLARATION = {"name": "toy", "measures": {}}

#: What happens, in the order of time, for every network.
MOMENTS = (
    *("claimed", "training", "half a checkpoint", "checkpoint kept", "measuring", "row begun"),
    *("half a row", "row written", "row kept", "released"),
)


class Toy:
    """A pool whose steps take no time; every step leaves a line in a log, and may be its last."""

    def __init__(self, folder: Path, dies: tuple[str, str] | None = None) -> None:
        self.folder, self._dies = folder, dies
        self.store = PoolStore(folder)
        self.store.open(DECLARATION, resume=True)

    def at(self, moment: str, name: str) -> None:
        if (moment, name) == self._dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def log(self, line: str) -> None:
        with open(self.folder / "log", "a") as file:
            file.write(f"{line}\n")

    def next_step(self, name: str) -> tuple[Callable[[str], object], str] | None:
        if name in self.store.rows():
            return None
        self.at("claimed", name)
        return (self.measure if self.store.model_path(name).exists() else self.train), name

    def train(self, name: str) -> bytes:
        self.at("training", name)
        self.log(f"train {name}")
        return f"weights of {name}".encode()

    def measure(self, name: str) -> dict[str, object]:
        self.at("measuring", name)
        self.log(f"measure {name}")
        weights = self.store.model_path(name).read_text()
        return {"columns": {}, "scores": {}, "state": weights, "measured": None, "rescaled": None}

    def save(self, name: str, result: object) -> None:
        if isinstance(result, bytes):
            with self.dying_in_write("half a checkpoint", name):
                self.store.save_model(name, result)
            self.at("checkpoint kept", name)
        else:
            self.at("row begun", name)
            with self.dying_in_write("half a row", name):
                self.store.append(name, result)
            self.at("row kept", name)

    @contextlib.contextmanager
    def dying_in_write(self, moment: str, name: str) -> Iterator[None]:
        """Before a file is on disk: half of it is there, or (for rows) all of it."""
        fsync = os.fsync

        def die(handle: int) -> None:
            size = os.fstat(handle).st_size
            if (moment, name) == self._dies:
                os.ftruncate(handle, size - 7)  # The system need not have written all of it.
            self.at(moment, name)
            if moment == "half a row":
                self.at("row written", name)
            fsync(handle)

        os.fsync = die
        try:
            yield
        finally:
            os.fsync = fsync

    def run(self, workers: Workers, **options: object) -> None:
        def progress(name: str, done: int, total: int) -> None:
            if done:  # The network before was released.
                self.at("released", NAMES[done - 1])

        run_networks(
            NAMES,
            self.next_step,
            self.save,
            store=self.store,
            workers=workers,
            **{"progress": progress} | options,
        )


def run_here(folder: Path, dies: tuple[str, str] | None = None) -> None:
    with local_workers(1) as workers:
        Toy(folder, dies).run(workers)


def in_child(work: Callable[[], None]) -> int:
    """Do something in a process of its own."""
    process = os.fork()
    if not process:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return process


def end_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def check_whole(folder: Path, steps: dict[str, int] | None = None) -> None:
    """Every network has one row, with its own weights; steps were done as often as expected."""
    whole = Counter()
    for line in (folder / "rows.jsonl").read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            whole[row["name"]] += 1
            assert row["state"] == f"weights of {row['name']}"
    assert whole == dict.fromkeys(NAMES, 1)
    assert list(PoolStore(folder).rows().keys() ^ set(NAMES)) == []
    done = Counter((folder / "log").read_text().split("\n")[:-1])
    expected = {f"{step} {name}": 1 for name in NAMES for step in ("train", "measure")}
    assert done == expected | (steps or {})
    assert not list((folder / "models").glob(".*.safetensors"))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", [NAMES[0], NAMES[3]])
def test_killed_at_any_moment_it_continues(moment: str, name: str, tmp_path: Path) -> None:
    """Twenty moments: only the step that was cut off is done again."""
    assert end_of(in_child(lambda: run_here(tmp_path, (moment, name)))) == -signal.SIGKILL
    before = dict(PoolStore(tmp_path).rows())
    run_here(tmp_path)
    again = {
        "half a checkpoint": {f"train {name}": 2},
        "row begun": {f"measure {name}": 2},
        "half a row": {f"measure {name}": 2},
    }
    check_whole(tmp_path, again.get(moment))
    assert all(PoolStore(tmp_path).rows()[known] == row for known, row in before.items())


def test_killed_again_and_again(tmp_path: Path) -> None:
    for moment, name in zip(MOMENTS, [*NAMES, *NAMES], strict=True):
        end_of(in_child(functools.partial(run_here, tmp_path, (moment, name))))
    run_here(tmp_path)
    done = Counter((tmp_path / "log").read_text().split())
    assert {*NAMES, "train", "measure"} == set(done)
    rows = [
        line for line in (tmp_path / "rows.jsonl").read_bytes().splitlines() if line[-1:] == b"}"
    ]
    assert sorted(json.loads(line)["name"] for line in rows) == NAMES


def test_two_drivers_share_a_pool(tmp_path: Path) -> None:
    class Slow(Toy):
        def measure(self, name: str) -> dict[str, object]:
            time.sleep(0.05)
            return super().measure(name)

    def work() -> None:
        with local_workers(1) as workers:
            Slow(tmp_path).run(workers)

    drivers = [in_child(work) for _ in range(3)]
    assert [end_of(driver) for driver in drivers] == [0, 0, 0]
    check_whole(tmp_path)


def test_what_a_killed_driver_worked_on_another_takes(tmp_path: Path) -> None:
    class Stuck(Toy):
        def measure(self, name: str) -> dict[str, object]:
            if name == NAMES[0]:
                (self.folder / "stuck").touch()
                time.sleep(600)
            return super().measure(name)

    def work() -> None:
        with local_workers(1) as workers:
            Stuck(tmp_path).run(workers)

    stuck = in_child(work)
    while not (tmp_path / "stuck").exists():
        time.sleep(0.01)
    other = in_child(lambda: run_here(tmp_path))
    deadline = time.monotonic() + 60
    while len(PoolStore(tmp_path).rows()) < len(NAMES) - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert NAMES[0] not in PoolStore(tmp_path).rows()
    os.kill(stuck, signal.SIGKILL)
    assert (end_of(stuck), end_of(other)) == (-signal.SIGKILL, 0)
    check_whole(tmp_path)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_full_disk_loses_nothing(rows: int, tmp_path: Path) -> None:
    """No room for all of a row: what was written of it is removed."""
    run_here(tmp_path / "whole")
    lines = (tmp_path / "whole" / "rows.jsonl").read_bytes().splitlines(keepends=True)
    room = sum(map(len, lines[:rows])) + len(lines[rows]) // 2

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        with pytest.raises(OSError, match=r"rows.jsonl` cannot be written: it would be larger th"):
            run_here(tmp_path / "full")

    assert end_of(in_child(fill)) == 0
    assert (tmp_path / "full" / "rows.jsonl").read_bytes() == b"".join(lines[:rows])
    run_here(tmp_path / "full")
    check_whole(tmp_path / "full", {f"measure {NAMES[rows]}": 2})


def test_a_network_that_fails_is_named_and_the_ones_before_are_kept(tmp_path: Path) -> None:
    class Failing(Toy):
        def measure(self, name: str) -> dict[str, object]:
            if name == NAMES[2]:
                raise RuntimeError("no room")
            return super().measure(name)

    with local_workers(1) as workers, pytest.raises(RuntimeError, match="`net-2` failed: no room"):
        Failing(tmp_path).run(workers)
    assert list(PoolStore(tmp_path).rows()) == NAMES[:2]
    run_here(tmp_path)  # Its lock is free again, also within this process.
    check_whole(tmp_path)


def test_lost_workers_are_reported_after_all_others_are_done(tmp_path: Path) -> None:
    class Losing(Toy):
        def train(self, name: str) -> bytes:
            if name == NAMES[1]:
                raise TimeoutError("node down\nand more")
            return super().train(name)

    with local_workers(1) as workers:
        losing = Workers(workers.executor, workers.slots, (TimeoutError,), "try again")
        with pytest.raises(
            RuntimeError, match=r"`net-1` was lost with its worker \(TimeoutError: n"
        ):
            Losing(tmp_path).run(losing)
    assert set(PoolStore(tmp_path).rows()) == {*NAMES} - {NAMES[1]}
    run_here(tmp_path)
    check_whole(tmp_path)


def test_a_network_that_takes_long_is_named_once(tmp_path: Path, capfd, monkeypatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("flatgauge.studies.runner._PAUSE", 0.02)

    class Slow(Toy):
        def measure(self, name: str) -> dict[str, object]:
            time.sleep(0.5 if name == NAMES[4] else 0)
            return super().measure(name)

    with ThreadPoolExecutor(1) as threads:
        Slow(tmp_path).run(Workers(threads, lambda: 1), patience=0.1)
    said = capfd.readouterr().err
    assert said.count("warning: network `net-4` has been worked on for") == 1
    assert said.count("warning:") == 1


# -- processes of this machine ------------------------------------------------------------------


def die_once(folder: str) -> dict[str, object]:
    """The step of a worker: one of them is killed while it works."""
    try:
        Path(folder, "first").unlink()
    except FileNotFoundError:
        return {"columns": {}, "scores": {}, "state": "", "measured": None, "rescaled": None}
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.slow
def test_a_dead_worker_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "first").touch()
    store = PoolStore(tmp_path)
    store.open(DECLARATION, resume=True)

    def run() -> None:
        with local_workers(2) as workers:
            run_networks(
                NAMES,
                lambda name: None if name in store.rows() else (die_once, str(tmp_path)),
                store.append,
                store=store,
                workers=workers,
            )

    with pytest.raises(RuntimeError, match=r"a worker process died while it computed .* is kept"):
        run()
    kept = (tmp_path / "rows.jsonl").read_bytes() if store.rows() else b""
    run()
    lines = (tmp_path / "rows.jsonl").read_bytes()
    assert lines.startswith(kept)
    assert sorted(json.loads(line)["name"] for line in lines.splitlines()) == NAMES


def test_the_store_reads_only_what_was_appended(tmp_path: Path, monkeypatch) -> None:
    run_here(tmp_path)
    store = PoolStore(tmp_path)
    assert len(store.rows()) == 5
    monkeypatch.setattr(store_module.json, "loads", None)
    assert len(store.rows()) == 5
