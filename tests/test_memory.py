"""Memory budgets: read, counted and kept."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from flatgauge import LossSurface
from flatgauge.memory import available, format_bytes, parse_bytes, saved_bytes
from flatgauge.products import GradientGraph


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5G", 1_500_000_000),
        ("1048576", 2**20),
        ("1024 KiB", 2**20),
        (3_000_000, 3_000_000),
    ],
)
def test_amounts_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "two", "5 XB", "-1GiB", "1iB", "1e9"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(ValueError, match="is no amount of memory; write it as '2GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1KiB", 0, -5, True, 2.5])
def test_too_little_is_refused(text):
    with pytest.raises(ValueError, match="is too little to work in"):
        parse_bytes(text)


def test_amounts_are_written_for_people():
    assert [format_bytes(n) for n in (0, 1023, 2**20, 5 * 2**30)] == [
        "0.0 B",
        "1023.0 B",
        "1.0 MiB",
        "5.0 GiB",
    ]


def test_something_is_free():
    assert 2**20 < available(torch.device("cpu")) < 2**50


def test_what_a_graph_keeps_is_counted_once_and_without_what_exists_anyway():
    x, w = torch.randn(100, 50), torch.randn(50, 20, requires_grad=True)

    def function(leaves):
        y = torch.relu(x @ leaves[0])  # keeps x (known) and its own output
        return (y * y).sum()  # keeps the same output

    graph = GradientGraph(function, [w])
    kept = saved_bytes(graph.nodes(), [x, w])
    # y, the gradient passed back to y (twice y) and to x @ w, and the mask of the relu at most
    assert 100 * 20 * 4 <= kept <= 5 * 100 * 20 * 4
    assert saved_bytes(graph.nodes(), []) == kept + (100 * 50) * 4


def test_surfaces_leave_no_memory_behind():
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3))
    data = (torch.randn(20, 30), torch.arange(20) % 3)
    for _ in range(3):
        surface = LossSurface(model, "cross_entropy", data)
        surface.hvp(torch.ones(surface.size))
        leaf = weakref.ref(surface._subject.leaves[0])
        del surface
        gc.collect()
        assert leaf() is None


PEAK = """
import re, sys, torch
from torch import nn
import flatgauge as fg

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(
    nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 10),
)
x, y = torch.randn(2000, 1, 28, 28), torch.randint(0, 10, (2000,))
few = fg.LossSurface(model, "cross_entropy", (x[:8], y[:8]))
few.hvp(torch.ones(few.size))  # libraries and kernels are loaded before the count begins
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
surface = fg.LossSurface(model, "cross_entropy", (x, y), memory=sys.argv[1])
vector = torch.ones(surface.size)
surface.hvp(vector), surface.hvp(vector), surface.gradient(surface.point)
print(status("VmHWM") - before, surface.hvp(vector).norm().item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_budget_is_kept_and_does_not_change_the_answer():
    peaks, norms = {}, {}
    for budget in (60, 2000):
        words = [sys.executable, "-c", PEAK, f"{budget}MiB"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        peaks[budget], norms[budget] = map(float, done.stdout.split())
    assert norms[60] == pytest.approx(norms[2000], rel=1e-4)
    assert peaks[60] < 1.3 * 60
    assert peaks[2000] > peaks[60]  # with room, graphs are kept
