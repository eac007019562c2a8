"""Studies on Ray: a cluster of two nodes on this machine, one of which is killed at work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import call
from small_studies import TINY, tiny_study

from flatgauge.studies import RayEngine, Study
from flatgauge.studies.ray_engine import _compute_on_node, code_folder

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason='needs Ray: pip install "flatgauge[ray]"'
)

#: A network that needs a file beside it. On the node that is to be killed it never comes to an end
#: once there is a row; on any node of Ray it dies if it is asked to.
NETS = """
import os, signal, time
from pathlib import Path
from torch import nn

def net():
    from layers import hidden
    folder = os.environ.get("TEST_STALLS")
    if folder and list(Path(folder).glob("*/rows.jsonl")):
        Path(folder, "stalled").touch()
        time.sleep(600)
    folder, until = os.environ.get("TEST_WAITS"), time.monotonic() + 60
    while folder and list(Path(folder).glob("*/rows.jsonl")) and time.monotonic() < until:
        if Path(folder, "stalled").exists():  # The other node has its task.
            break
        time.sleep(0.02)
    return nn.Sequential(nn.Flatten(), hidden(), nn.ReLU(), nn.Linear(8, 10))

def dying():
    with open(os.environ["TEST_DEATHS"], "a") as log:
        log.write("x")
    os.kill(os.getpid(), signal.SIGKILL)

def unfitting():
    return nn.Linear(3, 10)
"""
LAYERS = "from torch import nn\ndef hidden(): return nn.Linear(64, 8)\n"

#: Bytes of shared memory of a node; what tests send is far less.
STORE = 80 * 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimpleNamespace]:
    """A cluster that is stopped and removed in any case, and this process connected to it."""
    patch = pytest.MonkeyPatch()
    # Short, as paths of sockets are limited; and no other cluster of this machine is in it.
    folder = Path(tempfile.mkdtemp(prefix="fg-", dir="/tmp"))
    (folder / "ray").mkdir()
    patch.setenv("RAY_TMPDIR", str(folder))
    patch.setenv("TMPDIR", str(folder))  # For tasks: those that are killed leave their files.
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # Other processes may fill the machine.
    patch.setenv("OMP_NUM_THREADS", "2")  # On nodes: tasks of one processor use one all the same.
    patch.setenv("TEST_DEATHS", str(folder / "deaths"))
    patch.delenv("RAY_ADDRESS", raising=False)
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    try:
        out, settings = str(folder / "out"), {"num_cpus": 1, "object_store_memory": STORE}
        nodes.add_node(**settings, include_dashboard=False, env_vars={"TEST_WAITS": out})
        doomed = nodes.add_node(**settings, env_vars={"TEST_STALLS": out})
        own = folder / "own"
        write_own(own)
        with RayEngine(address=nodes.address, wait=30).connect(code=own):
            yield SimpleNamespace(nodes=nodes, doomed=doomed, folder=folder, own=own)
    finally:
        nodes.shutdown()
        patch.undo()
        shutil.rmtree(folder, ignore_errors=True)


def write_own(place: Path) -> None:
    """A folder with a user's own network and data."""
    place.mkdir()
    (place / "nets.py").write_text(NETS)
    (place / "layers.py").write_text(LAYERS)
    generator = np.random.default_rng(0)
    arrays = {
        f"{name}_{split}": part
        for split in ("train", "test")
        for name, part in (
            ("x", generator.normal(size=(60, 1, 8, 8)).astype("float32")),
            ("y", generator.integers(0, 10, size=60)),
        )
    }
    np.savez(place / "data.npz", **arrays)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def own_study(own: Path, seeds: int, **changes) -> Study:
    recipe = TINY.but(network=f"{own / 'nets.py'}:net", data=str(own / "data.npz"))
    factors = {"batch": [8, 32], "random_labels": [0.0, 0.5]}
    return tiny_study(**{"recipe": recipe, "factors": factors, "seeds": seeds} | changes)


def rows_of(folder: Path) -> dict[str, object]:
    """All that is in the rows, bit for bit, without times; no network has two."""

    def timeless(value: object) -> object:
        if not isinstance(value, dict):
            return value
        times = ("seconds", "finished")
        return {name: timeless(part) for name, part in value.items() if name not in times}

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_bytes().splitlines()]
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    return {row["name"]: timeless(row) for row in sorted(rows, key=lambda row: row["name"])}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    done = (folder / "models").glob("*.safetensors")
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in done}


@needs_ray
@pytest.mark.slow
def test_what_goes_wrong_is_reported(cluster: SimpleNamespace, tmp_path: Path) -> None:
    file = cluster.own / "nets.py"
    broken = own_study(cluster.own, 1, recipe=TINY.but(network=f"{file}:unfitting"))
    with pytest.raises(RuntimeError, match=r"^network `batch-\d+_random_.*` failed") as caught:
        broken.run(tmp_path / "broken", engine="ray")
    assert "on a node of the cluster:" in str(caught.value.__cause__.__cause__)
    with pytest.raises(RuntimeError, match=r"hold a task of 1 CPU, 1 GPU, for 0\.5 s now; its n"):
        broken.run(tmp_path / "large", engine=RayEngine(gpus=1, wait=0.5))
    # A worker that dies is replaced, and reported at last; all others are finished.
    dying = own_study(cluster.own, 1, factors={"network": [f"{file}:dying", f"{file}:net"]})
    lost, kept = dying.runs()
    with pytest.raises(RuntimeError, match=f"network `{lost}` was lost with its worker .*Crashed"):
        dying.run(tmp_path / "dying", engine=RayEngine(retries=1))
    assert (cluster.folder / "deaths").read_text() == 2 * "x"
    assert list(rows_of(tmp_path / "dying")) == [kept]


@needs_ray
@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_node_is_killed_and_nothing_is_lost_or_double(
    cluster: SimpleNamespace, tmp_path: Path
) -> None:
    own, alone, shared = cluster.own, tmp_path / "alone", cluster.folder / "out" / "shared"
    own_study(own, 3).run(alone)
    # Begun by processes of this machine, with a network that is trained and not measured.
    own_study(own, 1).run(shared)
    rows = shared / "rows.jsonl"
    rows.write_bytes(b"".join(rows.read_bytes().splitlines(keepends=True)[:-1]))
    kept = [(stamps(shared), rows.read_bytes())]

    def progress(name: str, done: int, total: int) -> None:
        if done > 3 and own.exists():
            own.rename(tmp_path / "away")  # Nodes do not have the user's files.
        if (cluster.folder / "out" / "stalled").exists() and len(kept) == 1:
            kept.append((stamps(shared), rows.read_bytes()))
            cluster.nodes.remove_node(cluster.doomed, allow_graceful=False)

    found = own_study(own, 2).run(shared, engine="ray", resume=True, progress=progress)
    assert len(kept) == 2, "no node was killed"
    assert len(found.rows) == 8
    assert {row["measured"]["facts"]["threads"] for row in found.rows.values()} == {1}
    (tmp_path / "away").rename(own)
    # And finished by processes of this machine.
    kept.append((stamps(shared), rows.read_bytes()))
    own_study(own, 3).run(shared, resume=True)
    for networks, before in kept:
        assert networks.items() <= stamps(shared).items()
        assert rows.read_bytes().startswith(before)
    assert rows_of(shared) == rows_of(alone)


@needs_ray
@pytest.mark.slow
def test_ctrl_c_ends_the_tasks_and_keeps_what_is_finished(
    cluster: SimpleNamespace, tmp_path: Path
) -> None:
    words = ["study", "rescaling", "--only", "f1", "--out", "here", "--engine", "ray"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flatgauge", *words, "--address", cluster.nodes.address],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # A terminal interrupts all processes of a command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    locks = tmp_path / "here" / "f1" / "locks"
    while process.poll() is None and not list(locks.glob("rescaling*")):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), told
    assert told.splitlines() == [
        "f1: 12 networks, 1 CPU each on Ray, in here/f1",
        "interrupted: of 12 networks 0 are trained and 0 measured, in here/f1; --resume goes on",
    ]


# -- what is asked before a pool runs on Ray: no cluster is needed -------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus": 0}, "`cpus=0` must be a finite number above 0"),
        ({"cpus": 1.5}, r"`cpus=1.5` must be a whole number, or below 1"),
        ({"gpus": -1}, "`gpus=-1` must be a finite number of at least 0"),
        ({"wait": float("inf")}, "`wait=inf` must be a finite number above 0"),
        ({"retries": 1.0}, r"`retries=1.0` must be a whole number of at least 0"),
        ({"memory": "much"}, "`memory='much'` is not an amount of memory"),
    ],
)
def test_what_a_task_needs_is_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayEngine(**options)


def test_engines_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`engine='dask'` is unknown; use 'local' or 'ray', or a"):
        tiny_study().run(tmp_path, engine="dask")
    with pytest.raises(ValueError, match="`workers=2` are processes of this machine; on Ray as"):
        tiny_study().run(tmp_path, engine="ray", workers=2)


def test_a_node_with_another_version_is_refused() -> None:
    with pytest.raises(ImportError, match=r"the pool is run by 0\.0\.1; install the same version"):
        _compute_on_node(lambda task: task, None, None, threads=1, version="0.0.1")


def test_ray_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r'run `pip install "flatgauge\[ray\]"` here'):
        tiny_study().run(tmp_path, engine="ray")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--address", "auto"], "`--address` is for Ray; add `--engine ray`, or leave it out."),
        (["--task-cpus", "2"], "`--task-cpus` is for Ray; add `--engine ray`, or leave it out."),
        (["--engine", "ray", "--workers", "2"], "`--workers 2` are processes of this machine;"),
        (["--engine", "ray", "--task-cpus", "0"], "`cpus=0.0` must be a finite number above 0."),
        (["--engine", "ray", "--address", "here"], "`address='here'` is no address of a Ray"),
    ],
)
def test_words_that_do_not_go_together(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
) -> None:
    if "--address" in words and "--engine" in words:
        pytest.importorskip("ray", reason='needs Ray: pip install "flatgauge[ray]"')
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, "study", "rescaling", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


@needs_ray
def test_nobody_answers_at_an_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    engine = RayEngine(address=address, wait=0.3)
    with pytest.raises(ConnectionError, match=f"no Ray cluster answers at `{address}` within 0.3"):
        engine.connect().__enter__()


@pytest.mark.slow
def test_the_folder_of_a_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "nets.py").touch()
    monkeypatch.chdir(tmp_path)
    assert code_folder(["kit/nets.py:a", str(tmp_path / "kit" / "other.py:b")]) == tmp_path / "kit"
    assert code_folder(["kit.nets:a"]) == tmp_path
    assert code_folder(["math:sqrt"]) is None
    with pytest.raises(ValueError, match=r"is in 2 folders .* put it into one folder"):
        code_folder(["kit/nets.py:a", "nets.py:b"])
