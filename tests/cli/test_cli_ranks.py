"""`torchrun -m flatgauge`: all ranks compute, the first one speaks and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rank_programs

import flatgauge as fg
from flatgauge.cli.options import SurfaceOptions
from flatgauge.cli.session import open_surface

NETS = """
import os
from torch import nn

def net():
    return nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 3))

def absent():
    if os.environ.get("RANK") == "1":
        raise FileNotFoundError("no such checkpoint here")
    return net()
"""

SOURCE = Path(fg.__file__).parents[1]


@pytest.fixture
def torchrun(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    x, y = rank_programs.samples(31)
    np.savez(tmp_path / "data.npz", x=x.float().numpy(), y=y.numpy())
    running = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Without a place for it, torchrun repeats the errors of all ranks on a page of its own.
    environment = os.environ | {
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*running, "--nproc-per-node", "2", "-m", "flatgauge", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.mark.slow
def test_ranks_measure_together(torchrun, tmp_path, monkeypatch):
    names = ["kappa_max", "normalized_sharpness"]
    asked = [word for name in names for word in ("-m", name)]
    options = ["--data", "data.npz", "--limit", "30", "--dtype", "float64", "--save", "run.json"]
    done = torchrun("measure", "nets.py:net", *options, *asked, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)  # Said once.
    assert json.loads((tmp_path / "run.json").read_text())["measures"] == printed["measures"]
    assert "the data are the same on all 2 ranks" in printed["facts"]["notes"][0]
    assert done.stderr.count("wrote run.json") == 1
    monkeypatch.chdir(tmp_path)
    options = SurfaceOptions(data="data.npz", loss="cross_entropy", limit=30, dtype="float64")
    surface, _ = open_surface("nets.py:net", None, options)
    report = fg.measure(surface, measures=names)
    for name in names:
        assert printed["measures"][name]["value"] == pytest.approx(report[name].value, rel=1e-12)
        assert printed["measures"][name]["layers"] == pytest.approx(
            dict(report[name].layers), rel=1e-12
        )


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_command_on_all(torchrun):
    failed = torchrun("measure", "nets.py:absent", "--data", "data.npz", "-m", "rho_max")
    assert failed.returncode != 0
    assert failed.stdout == ""
    (told,) = [line for line in failed.stderr.splitlines() if line.startswith("error:")]
    assert told.startswith("error: rank 1 of 2 has left 'flatgauge measure' with")
    assert "no such checkpoint here" in told


def test_a_command_for_one_process_says_so(monkeypatch):
    from flatgauge.cli.torchrun import run_together

    monkeypatch.setattr(sys, "argv", ["flatgauge", "study", "batch-size"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="`flatgauge study` runs in one process, and torchrun has"):
        run_together(lambda: None)
