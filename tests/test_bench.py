"""The benchmark: what it counts, judges and writes. Time is never asserted."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from command_line import call
from torch import nn

from flatgauge.bench import rounds
from flatgauge.bench.comparison import Comparison, Entry, joined
from flatgauge.bench.fresh import FreshSweep, forget
from flatgauge.bench.multiplications import (
    gradient_count,
    kept_graph_limit,
    linear_sizes,
    product_count,
)
from flatgauge.bench.networks import lenet, mlp, resnet20
from flatgauge.bench.peers import PEERS
from flatgauge.bench.quantities import OTHERS, QUANTITIES, Quantity, classes
from flatgauge.bench.results import Results
from flatgauge.bench.row import LIMIT, OWN, Row
from flatgauge.bench.suite import Plan, run
from flatgauge.bench.table import COLUMNS, SERIES_COLUMNS, markdown
from flatgauge.bench.targets import BEST, TARGETS, Target, judged
from flatgauge.bench.tool import Tool, usable
from flatgauge.bench.workloads import KINDS, Kind, Workload, batch_sizes, built
from flatgauge.cli import completion

ABSENT = Tool(
    "Absent", "absent-tool", "there_is_no_such_module", product=lambda model, batches: abs
)


def tiny(name: str = "W1", *, outputs: int = 4) -> Workload:
    """A workload of a moment."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(),
            nn.Linear(5, outputs),
        )  # fmt: skip

    return built(Kind("tiny", build, None, (1, 4, 4), 40, (10, 20), 1, outputs), name)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison(tiny())


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
    surface = comparison.surface().twin()
    graph = surface.recall("graph of a test", object, lasting=True)
    found = surface.recall("found by a test", object)
    before = surface.point
    forget(surface)
    assert torch.equal(surface.point, before)
    assert surface.recall("graph of a test", object, lasting=True) is graph
    assert surface.recall("found by a test", object) is not found


def test_fresh_sweeps_are_of_the_same_and_of_no_more_than_asked_for(comparison):
    sweep = FreshSweep(comparison.surface().twin())
    first, second = sweep.prepared(("trace",))(), sweep.prepared(("trace", "incoming"))()
    assert first is not second
    assert second.parts == {"trace", "incoming"}
    assert torch.equal(joined(first)["trace"], joined(second)["trace"])
    again = sweep.prepared(("trace",))
    again()
    with pytest.raises(AssertionError, match="found before"):
        again()


# -- targets ----------------------------------------------------------------------------------


def row(tool: str, cost: float, **more) -> Row:
    return Row(**{"workload": "W1", "quantity": "product", "tool": tool, "cost": cost} | more)


def test_verdicts_by_hand():
    share = Target("W1", "product", "share", 0.65, BEST)
    assert share.verdict(0.65) == "met: 0.65"
    assert share.verdict(0.78) == "missed by 20 %: 0.78"
    assert share.verdict(1.95) == "missed by 3.0 ×: 1.95"
    assert share.verdict(None) == "nothing to compare with"
    times = Target("W1", "trace", "times cheaper", 20, "PyHessian")
    assert times.verdict(25) == "met: 25.00"
    assert times.verdict(16) == "missed by 25 %: 16.00"
    assert Target("W1K", "trace", "error", 1e-3).verdict(2e-4) == "met: 2e-04"
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


# -- the whole --------------------------------------------------------------------------------


@pytest.fixture
def tiny_workloads(monkeypatch):
    monkeypatch.setattr("flatgauge.bench.workloads.load", lambda name, **_: tiny(name))
    monkeypatch.setattr("flatgauge.bench.suite.PEERS", (ABSENT,))


def test_a_run_without_peers(tiny_workloads):
    told: list[str] = []
    kept: list[tuple[bool, int]] = []
    sections: list[tuple[str, list[Row]]] = []
    results = run(
        Plan(["W1"], ["product", "trace", "sweep", "units", "eigenvalue", "layers"], rounds=1),
        tools=[ABSENT],
        tell=told.append,
        kept=lambda found: kept.append((found.complete, len(found.found))),
        shown=lambda about, rows: sections.append((about, rows)),
        strict=True,
    )
    assert told[0].startswith("skipping absent-tool: ModuleNotFoundError")
    assert [complete for complete, _ in kept] == [False] * 6 + [True]
    assert [count for _, count in kept] == sorted(count for _, count in kept)
    assert results.complete
    ((about, rows),) = sections
    assert about.startswith("W1: tiny, 161 parameters, N = 40")
    assert rows == results.rows
    own = {found.quantity: found for found in rows if found.tool == OWN}
    assert set(own) == {
        *("product", "trace", "all parts", "outgoing forms", "incoming forms"),
        *("top eigenvalue", "layers' top eigenvalues"),
    }
    for found in own.values():
        assert found.error is not None
        assert found.error < 1e-3
        assert found.to_best_peer is None
    assert own["trace"].verdict == "nothing to compare with"


def test_many_classes_against_all_columns():
    rows = classes.measured(Comparison(tiny("W1K", outputs=100)))
    assert [(found.quantity, found.tool) for found in rows] == [
        *(("trace", OWN), ("trace", f"{OWN}, all columns")),
        *(("diagonal", OWN), ("diagonal", f"{OWN}, all columns")),
    ]
    errors = [found.error for found in rows]
    assert errors[1] == errors[3] == 0
    assert 0 < errors[0] < errors[2] < 1


def test_what_fails_is_noted_and_loses_nothing_else(tiny_workloads, monkeypatch):
    def broken(_: Comparison) -> list[Row]:
        raise RuntimeError("no luck\nat all")

    monkeypatch.setitem(QUANTITIES, "trace", Quantity(broken))
    results = run(Plan(["W1"], ["trace", "units"], rounds=1), tools=[])
    assert results.failures == ["W1, trace: RuntimeError: no luck"]
    assert {found.quantity for found in results.rows} == {"outgoing forms", "incoming forms"}
    with pytest.raises(RuntimeError, match="no luck"):
        run(Plan(["W1"], ["trace"], rounds=1), tools=[], strict=True)


def test_a_peer_that_fails_is_left_out(comparison):
    def product(model, batches):
        raise RuntimeError("not this model")

    told: list[str] = []
    broken = Tool("Broken", "torch", "torch", product=product)
    here = Comparison(comparison.workload, [broken], tell=told.append)
    rows = QUANTITIES["product"].measured(here)
    assert told == ["skipping Broken on W1 (product): not this model"]
    assert "Broken" not in {found.tool for found in rows}


def test_the_command(tiny_workloads, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("bench", "--quick", "--workloads", "W1", "--quantities", "product,units")
    files = ("--json", "b.json", "--markdown", "b.md", "--png", "b.png")
    code, out, err = call(monkeypatch, capsys, *words, *files)
    assert code == 0, err
    assert "skipping absent-tool" in err
    assert "skipping" not in out
    assert f"| {' | '.join(COLUMNS)} |" in out
    contents = json.loads((tmp_path / "b.json").read_text())
    assert contents["complete"] is True
    assert contents["facts"]["scale"] == 0.02
    assert contents["facts"]["rounds"] == 1
    assert contents["workloads"]["W1"]["samples"] == 40
    assert contents["failures"] == []
    first = contents["rows"][0]
    assert (first["workload"], first["quantity"], first["tool"]) == ("W1", "product", OWN)
    assert first["cost"] > 0
    assert first["unit_seconds"] > 0
    assert first["verdict"].startswith("nothing to compare with; ")
    assert LIMIT in {line["tool"] for line in contents["rows"]}
    assert "outgoing forms" in (tmp_path / "b.md").read_text()
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_refusals(monkeypatch, capsys):
    for words, message in {
        ("--workloads", "W7"): "`workloads` has 'W7'; there are W1, W2, W3, W1K",
        ("--quantities", "speed"): "`quantities` has 'speed'; there are product, trace",
        ("--workloads", "W1K", "--quantities", "trace"): "none of trace is measured on W1K",
        ("--scale", "0"): "`scale=0` leaves no samples",
        ("--json", "no/such/folder.json"): "there is no folder",
        ("--png", "costs.xyz"): "does not end in a form of picture",
    }.items():
        code, _, err = call(monkeypatch, capsys, "bench", *words)
        assert code == 2
        assert message in err


def test_series_have_a_table_of_their_own():
    text = markdown([row(OWN, 2.0), row(OWN, 2.5, setting="width 64", sample_seconds=3e-6)])
    single, series = text.split("\n\n")
    assert single.startswith(f"| {' | '.join(COLUMNS)} |")
    assert series.startswith(f"| {' | '.join(SERIES_COLUMNS)} |")
    assert "| width 64 | product | flatgauge | 2.50 |  |  | 3.0 |" in series
    assert Results({}, found=[row(OWN, 2.0)]).to_markdown().startswith("| workload")


def test_the_peers_have_names_that_targets_know():
    names = {tool.name for tool in PEERS} | {name for tool in PEERS for name in tool.traces}
    against = {target.against for target in TARGETS} - {"", BEST, LIMIT}
    assert {name.partition(",")[0] for name in against} <= {n.partition(",")[0] for n in names}
    assert usable([ABSENT], lambda line: None) == []
