"""Memory budgets: read, counted and kept."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import need_data

from flatgauge import LossSurface, measure
from flatgauge.curvature.sweep.accumulate import Accumulator
from flatgauge.curvature.sweep.ops import OpHandler
from flatgauge.runtime.resources import available_bytes, format_bytes, parse_bytes, saved_bytes
from flatgauge.surface.derivatives import GradientGraph


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
    with pytest.raises(ValueError, match="is not an amount of memory; write it as '2GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["1KiB", 0, -5])
def test_too_little_is_refused(text):
    with pytest.raises(ValueError, match="is too little to work in"):
        parse_bytes(text)


@pytest.mark.parametrize("given", [True, 2.5])
def test_what_is_neither_text_nor_a_whole_number_is_refused(given):
    with pytest.raises(TypeError, match=rf"`memory={given}` is a .*; give a text such as '2GiB'"):
        parse_bytes(given)


def test_amounts_are_written_for_people():
    assert [format_bytes(n) for n in (0, 1023, 2**20, 5 * 2**30)] == [
        "0.0 B",
        "1023.0 B",
        "1.0 MiB",
        "5.0 GiB",
    ]


def test_something_is_free():
    assert 2**20 < available_bytes(torch.device("cpu")) < 2**50


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
        leaf = weakref.ref(surface._functional_model.leaves[0])
        del surface
        gc.collect()
        assert leaf() is None


#: Runs in a process of its own: what is resident before, the peak above it, and the values.
PEAK = """
import gc, json, re, sys, torch
sys.path.insert(0, sys.argv[1])
import flatgauge as fg
from memory_cases import CASES, MEASURES

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

torch.manual_seed(0)
torch.set_num_threads(1)
names = sys.argv[4].split(",") if sys.argv[4] else MEASURES
few = fg.LossSurface(*CASES["few curved" if "curved" in sys.argv[2] else "few"]())
fg.measure(few, measures=names)  # libraries and kernels are loaded before the count begins
del few
case = CASES[sys.argv[2]]()
gc.collect()
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
surface = fg.LossSurface(*case, memory=sys.argv[3])
report = fg.measure(surface, measures=names)
values = {name: estimate.value for name, estimate in report.items()}
print(json.dumps([status("VmHWM") - before, values]))
"""

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
LONG = pytest.mark.skipif(
    not os.environ.get("FLATGAUGE_LONG"), reason="takes minutes; FLATGAUGE_LONG=1 runs it"
)


def measured(case, budget, measures=""):
    """The peak above what was resident before, in MiB, and the values."""
    folder = str(Path(__file__).parents[1])
    words = [sys.executable, "-c", PEAK, folder, case, f"{budget}MiB", measures]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@ON_LINUX
@pytest.mark.slow
def test_a_budget_is_kept_and_does_not_change_the_answer():
    quick = "hessian_trace,riemannian_trace,kappa_sum,rho_sum,normalized_sharpness,fisher_rao_norm"
    found = {}
    for budget, measures in ((60, quick), (200, quick), (60, "hessian_max_eigenvalue")):
        peak, values = measured("conv", budget, measures)
        assert peak <= 1.2 * budget, (budget, measures)
        found[budget, measures] = values
    for name, value in found[60, quick].items():
        assert value == pytest.approx(found[200, quick][name], rel=1e-3), name


@pytest.mark.slow
@LONG
@ON_LINUX
@pytest.mark.parametrize(("case", "budget"), [("cifar", 400), ("resnet", 2000)])
def test_large_data_and_large_models_stay_within_their_budget(case, budget):
    if case == "cifar":
        need_data("cifar-10-batches-bin")
    peak, _ = measured(case, budget)
    assert peak <= 1.2 * budget


#: What is estimated by products with vectors of the model's size where it cannot be swept.
ESTIMATED = "hessian_trace,rho_sum,kappa_trace_sum,normalized_sharpness"


@pytest.mark.slow
@ON_LINUX
@pytest.mark.slow
def test_estimates_by_many_vectors_stay_within_the_budget():
    # 1.1 million parameters: room for 26 vectors of their size, of which an estimate of the trace
    # alone could use 48 at once.
    peak, _ = measured("curved", 115, "hessian_trace")
    assert peak <= 1.2 * 115


@pytest.mark.slow
@LONG
@ON_LINUX
@pytest.mark.parametrize("measure", ESTIMATED.split(","))
def test_89_million_parameters_stay_within_eight_gibibytes(measure):
    peak, _ = measured("curved, 89 million", 8192, measure)
    assert peak <= 1.2 * 8192


@pytest.mark.slow
def test_a_sweep_leaves_no_graph_behind():
    image = (torch.randn(6, 1, 8, 8), torch.arange(6))
    before = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    behind = [nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 10)]  # Swept without a graph of autograd's.
    for layers in (behind, before + behind, [*before, nn.Linear(36, 10)]):
        inputs = image[0].flatten(1)[:, :36] if layers is behind else image[0]
        model = nn.Sequential(*layers).eval()
        surface = LossSurface(model, "cross_entropy", (inputs, image[1]))
        measure(surface, measures=["hessian_trace", "normalized_sharpness", "fisher_rao_norm"])
        gc.collect()
        # Python cannot collect cycles through the graph.
        assert not [
            held for held in gc.get_objects() if issubclass(type(held), (OpHandler, Accumulator))
        ]
