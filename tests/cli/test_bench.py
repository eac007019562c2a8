"""The benchmark: what it counts and judges. Time is never asserted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from bench_workloads import row, tiny
from torch import nn

from flatgauge.cli import completion
from flatgauge.cli.benchmarks import rounds
from flatgauge.cli.benchmarks.comparison import Entry, TimedComparison
from flatgauge.cli.benchmarks.errors import joined
from flatgauge.cli.benchmarks.fresh import FreshSweep, forget
from flatgauge.cli.benchmarks.multiplications import (
    gradient_count,
    kept_graph_limit,
    linear_sizes,
    product_count,
)
from flatgauge.cli.benchmarks.networks import lenet, mlp, resnet20
from flatgauge.cli.benchmarks.quantities import OTHERS, QUANTITIES
from flatgauge.cli.benchmarks.row import LIMIT, OWN
from flatgauge.cli.benchmarks.targets import BEST, TARGETS, Target, judged
from flatgauge.cli.benchmarks.workloads import KINDS, batch_sizes


@pytest.fixture(scope="module")
def comparison() -> TimedComparison:
    return TimedComparison(tiny())


# -- counting ---------------------------------------------------------------------------------


def test_multiplications_by_hand():
    # 3-4-2: weights 12 and 8. A gradient: 12 + 8 forward, 8 for the second layer's input, 12 + 8
    # for the weights. A product: 12 forward in the first layer, 2·8 in the second; back, 2·8 to the
    # second layer's input; 2·8 for the second weight, 12 for the first.
    sizes = linear_sizes(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert sizes == [12, 8]
    assert gradient_count(sizes) == 12 + 8 + 8 + 12 + 8
    assert product_count(sizes) == 12 + 2 * 8 + 2 * 8 + 2 * 8 + 12


def test_the_limit_of_the_large_perceptron_and_of_no_other_network():
    limit = kept_graph_limit(mlp())
    assert limit is not None
    assert round(limit, 2) == 1.80
    assert kept_graph_limit(lenet()) is None
    assert kept_graph_limit(resnet20()) is None


def test_the_unit_is_the_gradient_of_the_summed_loss(comparison):
    workload = comparison.workload
    loss = F.cross_entropy(workload.model(workload.inputs), workload.targets, reduction="sum")
    expected = torch.autograd.grad(loss, workload.parameters())
    for found, right in zip(comparison.unit(), expected, strict=True):
        assert torch.allclose(found, right, rtol=1e-4, atol=1e-5)
    assert comparison.gradient_batch in workload.sizes


def test_batches_leave_no_smaller_one():
    assert batch_sizes(60, (50, 25, 1000)) == (20, 30, 60)


# -- rounds -----------------------------------------------------------------------------------


def test_dear_methods_run_once_and_others_in_every_round():
    calls: list[str] = []

    def method(name: str, dear: bool) -> rounds.Method:
        return rounds.Method(name, lambda: lambda: calls.append(name), dear)

    methods = [method("cheap", False), method("dear", True)]
    (cheap, dear), units = rounds.timed(lambda: None, methods, rounds=3)
    assert (calls.count("cheap"), calls.count("dear")) == (4, 1)  # With a warm-up.
    assert (len(cheap.ratios), len(dear.ratios), len(units)) == (3, 1, 4)
    assert cheap.median > 0
    with pytest.raises(ValueError, match="times nothing; use at least 1"):
        rounds.timed(lambda: None, methods, rounds=0)


def test_wrong_peers_are_no_yardsticks(comparison):
    def entry(tool: str, result: float, yardstick: bool = True) -> Entry:
        return Entry("x", tool, lambda: lambda: result, 1, yardstick)

    entries = [entry(OWN, 0.0, yardstick=False), entry("right", 1e-4), entry("wrong", 0.1)]
    rows = comparison.compare(entries, lambda quantity, result: result, reliable=1e-3)
    assert [row.yardstick for row in rows] == [False, True, False]
    assert rows[1].to_best_peer == 1
    rows = comparison.compare(entries[::2], lambda quantity, result: result, reliable=1e-3)
    assert [row.to_best_peer for row in rows] == [None, None]


# -- fresh sweeps -----------------------------------------------------------------------------


def test_a_fresh_sweep_keeps_the_graph_and_nothing_else(comparison):
    surface = comparison.surface().copy()
    graph = surface.cache.get(("graph of a test",), object, static=True)
    found = surface.cache.get(("found by a test",), object)
    before = surface.point
    forget(surface)
    assert torch.equal(surface.point, before)
    assert surface.cache.get(("graph of a test",), object, static=True) is graph
    assert surface.cache.get(("found by a test",), object) is not found


def test_fresh_sweeps_are_of_the_same_and_of_no_more_than_asked_for(comparison):
    sweep = FreshSweep(comparison.surface().copy())
    first, second = sweep.prepared(("trace",))(), sweep.prepared(("trace", "incoming"))()
    assert first is not second
    assert second.parts == {"trace", "incoming"}
    assert torch.equal(joined(first)["trace"], joined(second)["trace"])
    again = sweep.prepared(("trace",))
    again()
    with pytest.raises(AssertionError, match="found before"):
        again()


# -- targets ----------------------------------------------------------------------------------


def test_verdicts_by_hand():
    share = Target("W1", "product", "share", 0.65, BEST)
    assert share.verdict(0.65) == "met: 0.65"
    assert share.verdict(0.78) == "missed by 20 %: 0.78"
    assert share.verdict(1.95) == "missed by 3.0 ×: 1.95"
    assert share.verdict(None) == "nothing to compare with"
    times = Target("W1", "trace", "times cheaper", 20, "PyHessian")
    assert times.verdict(25) == "met: 25.00"
    assert times.verdict(16) == "missed by 25 %: 16.00"
    assert Target("W1K", "trace", "error", 1e-3).verdict(2e-4) == "met: 2.0e-04"
    assert str(times) == "≥ 20 × cheaper than PyHessian"


def test_targets_find_what_they_are_held_against():
    rows = [
        row(OWN, 2.0, to_best_peer=0.5, error=1e-7),
        row(f"{OWN}, first product", 3.0, to_best_peer=0.75),
        row("PyHessian", 4.0, to_best_peer=1.0, yardstick=True),
        row(LIMIT, 1.8),
        row(OWN, 9.0, setting="N = 20"),
    ]
    found = judged(rows)
    assert found[0].verdict == "met: 0.50; missed by 1 %: 1.11"
    assert found[0].target == f"≤ 0.65 × {BEST}; ≤ 1.1 × {LIMIT}"
    assert not any(other.verdict for other in found[1:])


def test_a_verdict_says_if_it_is_held_against_a_wrong_answer():
    rows = [row(OWN, 3.0, quantity="trace"), row("PyHessian", 6.0, quantity="trace", error=0.1)]
    assert judged(rows)[0].verdict == "missed by 10.0 ×: 2.00"
    rows[1] = row("PyHessian", 6.0, quantity="trace", error=2.0)
    assert judged(rows)[0].verdict == "missed by 10.0 ×: 2.00 (of an answer off by 2e+00)"
    assert judged(rows[:1])[0].verdict == "nothing to compare with"


def test_every_target_is_for_something_that_there_is():
    assert {target.workload for target in TARGETS} == set(KINDS)
    assert {target.kind for target in TARGETS} == {"share", "times cheaper", "cost", "error"}
    assert tuple(QUANTITIES) + OTHERS == completion.QUANTITIES
    assert tuple(KINDS) == completion.WORKLOADS
    assert completion.complete_quantities("trace,lay") == ["trace,layers"]
