"""Studies on Ray: a cluster of two nodes on this machine, one of which is killed at work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flatgauge.studies.preparing import clean_samples
from flatgauge.studies.ray_task import Job, complete_far_away, packed
from small_studies import TINY, tiny_study

from flatgauge.studies import RayEngine, Study

pytestmark = pytest.mark.skipif(
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
    if folder and list(Path(folder).glob("*/rows/*.json")):
        Path(folder, "stalled").touch()
        time.sleep(600)
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
        nodes.add_node(num_cpus=1, object_store_memory=STORE, include_dashboard=False)
        stalls = {"TEST_STALLS": str(folder / "out")}
        doomed = nodes.add_node(num_cpus=1, object_store_memory=STORE, env_vars=stalls)
        with RayEngine(address=nodes.address, wait=30).connected():
            yield SimpleNamespace(nodes=nodes, doomed=doomed, folder=folder)
    finally:
        nodes.shutdown()
        patch.undo()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a user's own network and data."""
    place = tmp_path / "own"
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
    return place


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
    """All that is in the rows, bit for bit, without times."""

    def timeless(value: object) -> object:
        if not isinstance(value, dict):
            return value
        times = ("seconds", "finished")
        return {name: timeless(part) for name, part in value.items() if name not in times}

    rows = sorted((folder / "rows").glob("*.json"))
    return {path.stem: timeless(json.loads(path.read_text())) for path in rows}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    done = [*(folder / "models").glob("*.safetensors"), *(folder / "rows").glob("*.json")]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in done}


def test_a_task_that_is_called_back_cleans_up_and_ends_its_process(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    study = own_study(own, 1)
    name, recipe = next(iter(study.runs().items()))
    job = Job(name, None, None, threads=1, version=metadata.version("flatgauge"))
    task = complete_far_away(study, packed(clean_samples(recipe, None)), job)
    assert next(task).part == "models"
    assert list(tmp_path.glob("flatgauge-run-*"))
    # Ray interrupts anywhere: in the midst of an import it leaves half of a module behind.
    with pytest.raises(SystemExit) as ended:
        task.throw(KeyboardInterrupt())
    assert ended.value.code == 0
    assert not list(tmp_path.glob("flatgauge-run-*"))


@pytest.mark.slow
def test_what_goes_wrong_is_told(cluster: SimpleNamespace, own: Path, tmp_path: Path) -> None:
    file = own / "nets.py"
    broken = own_study(own, 1, recipe=TINY.but(network=f"{file}:unfitting"))
    with pytest.raises(RuntimeError, match=r"^run `batch-\d+_random_.*` failed") as caught:
        broken.run(tmp_path / "broken", engine="ray")
    assert "in another process:\nTraceback" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match=r"hold a task of 1 CPU, 1 GPU, for 0\.5 s now; its n"):
        broken.run(tmp_path / "large", engine=RayEngine(gpus=1, wait=0.5))
    # A worker that dies is tried again, and told at last; all others are finished.
    dying = own_study(own, 1, factors={"network": [f"{file}:dying", f"{file}:net"]})
    lost, kept = dying.runs()
    with pytest.raises(RuntimeError, match=f"run `{lost}` was lost with its worker .* 2 times"):
        dying.run(tmp_path / "dying", engine=RayEngine(retries=1))
    assert (cluster.folder / "deaths").read_text() == 2 * "x"
    assert list(rows_of(tmp_path / "dying")) == [kept]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_node_is_killed_and_nothing_is_lost_or_double(
    cluster: SimpleNamespace, own: Path, tmp_path: Path
) -> None:
    alone, shared, away = tmp_path / "alone", cluster.folder / "out" / "shared", tmp_path / "away"
    own_study(own, 3).run(alone)
    # Begun by processes of this machine, with a network that is trained and not measured.
    own_study(own, 1).run(shared)
    next((shared / "rows").glob("*.json")).unlink()
    kept = [stamps(shared)]

    def told(name: str, done: int, total: int) -> None:
        if own.exists():
            own.rename(away)  # Nodes do not have the user's files.
        if (cluster.folder / "out" / "stalled").exists() and len(kept) == 1:
            kept.append(stamps(shared))
            cluster.nodes.remove_node(cluster.doomed, allow_graceful=False)

    found = own_study(own, 2).run(shared, engine="ray", resume=True, progress=told)
    assert len(kept) == 2, "no node was killed"
    assert all(before.items() <= stamps(shared).items() for before in kept)
    assert len(found.rows) == 8
    assert {row["measured"]["facts"]["threads"] for row in found.rows.values()} == {1}
    # And finished by processes of this machine.
    away.rename(own)
    kept.append(stamps(shared))
    own_study(own, 3).run(shared, resume=True)
    assert kept[-1].items() <= stamps(shared).items()
    assert rows_of(shared) == rows_of(alone)


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
