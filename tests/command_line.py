"""What the tests of the command line share."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flatgauge.cli import main

NETS = '''
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

def squared(output, target):
    return (output - torch.nn.functional.one_hot(target, 3)).square().mean()

def batches(split="train", limit=None):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(5, 6, generator=generator), torch.arange(5) % 3) for _ in range(4)]

def talking():
    print("building the model")
    return small()

def failing():
    raise RuntimeError("no such checkpoint server")

class Shifted(nn.Module):
    """A model of sequences whose own loss compares every output with the next label."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 5)

    def forward(self, tokens, labels=None):
        logits = self.table(tokens)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}

def sequences(split="train"):
    tokens = torch.arange(24).reshape(6, 4) % 5
    return {"tokens": tokens, "labels": tokens}

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        import pathlib, time
        pathlib.Path("started").touch()
        time.sleep(60)
        return self.linear(x)

class Interrupted(nn.Linear):
    """Ctrl-C comes while it runs."""

    def __init__(self):
        super().__init__(6, 3)

    def forward(self, x):
        raise KeyboardInterrupt

class InterruptedLater(Interrupted):
    """The same from the moment on that something is saved."""

    def forward(self, x):
        import pathlib
        saved = pathlib.Path("kept.json").exists()
        return super().forward(x) if saved else nn.functional.linear(x, self.weight, self.bias)

class Stalling(Slow):
    """Slow from the moment on that something is saved."""

    def forward(self, x):
        import pathlib
        return super().forward(x) if pathlib.Path("kept.json").exists() else self.linear(x)
'''

#: Two measures that take no time.
QUICK = ("-m", "hessian_max_eigenvalue", "-m", "expected_sharpness")


def fill(folder: Path) -> None:
    """Put networks and data into a folder."""
    (folder / "nets.py").write_text(NETS)
    generator = np.random.default_rng(0)
    np.savez(
        folder / "data.npz",
        x=generator.normal(size=(30, 6)).astype("float32"),
        y=generator.integers(0, 3, size=30),
    )


def call(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Run the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["flatgauge", *words])
    with pytest.raises(SystemExit) as ending:
        main()
    captured = capsys.readouterr()
    return int(ending.value.code or 0), captured.out, captured.err


def flatgauge(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flatgauge", *words], capture_output=True, text=True, **options
    )


def start(*words: str, **options) -> subprocess.Popen[str]:
    """Start a process that can be interrupted."""
    return subprocess.Popen(
        [sys.executable, "-m", "flatgauge", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Under a shell's background job interrupts are ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def interrupt(process: subprocess.Popen[str], once: Path) -> tuple[int, str, str]:
    """Press Ctrl-C once a file exists, and see how the process ends."""
    while not once.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err
