"""`flatgauge study` as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "flatgauge", "study"]


def run(*words: str, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(
        [*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert found.returncode == code, found.stderr
    return found


def test_without_a_name_it_lists_what_there_is(tmp_path: Path) -> None:
    text = run(folder=tmp_path).stdout
    for name in ("random-labels", "batch-size", "init-batch", "mnist-layers", "rescaling"):
        assert re.search(rf"^{name}  \(", text, re.MULTILINE)
    assert "--preset paper" in text
    assert "mnist-fc: 10 networks" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["batchsize"], "did you mean `batch-size`"),
        (["rescaling", "--only", "f2"], "it has f1, c1"),
        (["mnist-layers", "--preset", "medium"], "name the folder that holds them: `--data DIR`"),
        (["mnist-layers", "--preset", "medium", "--data", "none"], "none"),
    ],
)
def test_bad_words_are_told_in_a_line(words: list[str], told: str, tmp_path: Path) -> None:
    found = run(*words, "--workers", "1", folder=tmp_path, code=2)
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert told in last
    assert "Traceback" not in found.stderr


def test_choices_are_refused(tmp_path: Path) -> None:
    for option in ("--preset", "--engine"):
        found = run("rescaling", option, "huge", folder=tmp_path, code=2)
        assert "'huge' is not one of" in found.stderr


@pytest.mark.slow
def test_what_goes_wrong_in_other_processes_is_told_in_a_line_too(tmp_path: Path) -> None:
    words = ["mnist-layers", "--preset", "medium", "--workers", "2"]
    found = run(*words, folder=tmp_path, code=2)
    first, last = found.stderr.strip().splitlines()
    assert first == "mnist-mlp: 16 networks, 2 processes, in study-mnist-layers-medium/mnist-mlp"
    assert last.startswith("error: `mnist` is read from files; name the folder")
    assert last.endswith("`data=` in Python.")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_says_what_is_kept_and_nothing_else(workers: int, tmp_path: Path) -> None:
    words = ["rescaling", "--only", "f1", "--out", "in here", "--workers", str(workers)]
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # A terminal interrupts all processes of a command.
        # A shell that starts tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    locks = tmp_path / "in here" / "f1" / "locks"
    while process.poll() is None and not (locks.exists() and list(locks.iterdir())):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert len(told.splitlines()) == 2
    assert "measured, in in here/f1; --resume goes on" in told


@pytest.mark.slow
def test_interrupted_and_resumed(tmp_path: Path) -> None:
    words = ["rescaling", "--only", "f1", "--out", "here", "--workers", "1"]
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    rows = tmp_path / "here" / "f1" / "rows.jsonl"
    while process.poll() is None and not rows.exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert re.search(r"of 12 networks \d+ are trained and \d+ measured, in here/f1; --resume", told)
    refused = run(*words, folder=tmp_path, code=2)
    assert "already holds finished networks" in refused.stderr
    before = rows.read_bytes()
    found = run(*words, "--resume", folder=tmp_path)
    assert rows.read_bytes().startswith(before)
    assert "12 networks f1" in found.stdout
    # The published relative difference is 1.7e-7 in single precision.
    single = re.search(r"λ = \(5, 4, 1/20\), float32\s+1.7e-7\s+(\S+)", found.stdout)
    double = re.search(r"λ = \(5, 4, 1/20\), float64\s+1.7e-7\s+(\S+)", found.stdout)
    assert float(single[1]) < 1e-6
    assert float(double[1]) < 1e-12
    page = tmp_path / "here" / "f1" / "report.html"
    assert f"report: {page}" in found.stdout
    assert page.exists()
    told = json.loads(run(*words, "--resume", "--json", folder=tmp_path).stdout)
    assert told["f1"]["networks"] == 12
    assert told["f1"]["before_after"]["riemannian_max_eigenvalue"]["largest_change"] < 1e-5
