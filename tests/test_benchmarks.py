"""The benchmarks: what is run, counted, judged and written. Time is never asserted."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.__main__ import main, run
from benchmarks.comparison import TimedComparison, distance, flat_parts
from benchmarks.peers import COMPILED, PEERS, Tool, available
from benchmarks.quantities import QUANTITIES, measure_classes, measure_product, multiplications
from benchmarks.results import LIMIT, OWN, SERIES, SINGLE, Results, TimingRow, markdown
from benchmarks.targets import BEST, TARGETS, Target, judge_rows
from benchmarks.timing import Entry, time_entries
from benchmarks.workloads import (
    KINDS,
    Kind,
    Workload,
    batch_sizes,
    build_workload,
    lenet,
    mlp,
    resnet20,
)

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

    return build_workload(Kind("tiny", build, None, (1, 4, 4), 40, (10, 20), 1, outputs), name)


def row(tool: str, cost: float, **more) -> TimingRow:
    return TimingRow(**{"workload": "W1", "quantity": "product", "tool": tool, "cost": cost} | more)


@pytest.fixture(scope="module")
def comparison() -> TimedComparison:
    return TimedComparison(tiny())


@pytest.fixture
def tiny_workloads(monkeypatch):
    monkeypatch.setattr("benchmarks.workloads.load", lambda name, **_: tiny(name))
    monkeypatch.setitem(main.__globals__, "run", lambda *a, **k: run(*a, tools=[ABSENT], **k))


# -- counting and comparing -------------------------------------------------------------------


def test_multiplications_by_hand():
    # 3-4-2: weights 12 and 8. A gradient: 12 + 8 forward, 8 for the second layer's input, 12 + 8
    # for the weights. A product: 12 forward in the first layer, 2·8 in the second; back, 2·8 to the
    # second layer's input; 2·8 for the second weight, 12 for the first.
    counts = multiplications(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert counts == (12 + 8 + 8 + 12 + 8, 12 + 2 * 8 + 2 * 8 + 2 * 8 + 12)


def test_the_limit_of_the_large_perceptron_and_of_no_other_network():
    gradient, product = multiplications(mlp())
    assert round(product / gradient, 2) == 1.80
    assert multiplications(lenet()) is None
    assert multiplications(resnet20()) is None


def test_the_unit_is_the_gradient_of_the_summed_loss(comparison):
    workload = comparison.workload
    loss = F.cross_entropy(workload.model(workload.inputs), workload.targets, reduction="sum")
    expected = torch.autograd.grad(loss, workload.parameters())
    for found, right in zip(comparison.unit(), expected, strict=True):
        assert torch.allclose(found, right, rtol=1e-4, atol=1e-5)
    assert comparison.gradient_batch in workload.sizes


def test_batches_leave_no_smaller_one():
    assert batch_sizes(60, (50, 25, 1000)) == (20, 30, 60)


def test_expensive_entries_run_once_and_others_in_every_round():
    calls: list[str] = []

    def entry(name: str, once: bool) -> Entry:
        return Entry("x", name, lambda: lambda: calls.append(name), once=once)

    entries = [entry("cheap", False), entry("expensive", True)]
    (cheap, expensive), units = time_entries(lambda: None, entries, rounds=3)
    assert (calls.count("cheap"), calls.count("expensive")) == (4, 1)  # With a warm-up.
    assert (len(cheap.ratios), len(expensive.ratios), len(units)) == (3, 1, 4)
    assert cheap.median > 0
    with pytest.raises(ValueError, match="times nothing; use at least 1"):
        time_entries(lambda: None, entries, rounds=0)


def test_wrong_peers_cannot_be_the_best(comparison):
    def entry(tool: str, result: float, eligible: bool = True) -> Entry:
        return Entry("x", tool, lambda: lambda: result, 1, eligible)

    entries = [entry(OWN, 0.0, eligible=False), entry("right", 1e-4), entry("wrong", 0.1)]
    rows = comparison.compare(entries, lambda quantity, result: result, reliable=1e-3)
    assert [row.eligible for row in rows] == [False, True, False]
    assert rows[1].to_best_peer == 1
    rows = comparison.compare(entries[::2], lambda quantity, result: result, reliable=1e-3)
    assert [row.to_best_peer for row in rows] == [None, None]


def test_sweeps_start_without_numbers_and_sweep_no_more_than_asked_for(comparison):
    first = comparison.prepare_sweep(("trace",))()
    second = comparison.prepare_sweep(("trace", "incoming"))()
    assert (first.parts, second.parts) == ({"trace"}, {"trace", "incoming"})
    assert torch.equal(flat_parts(first)["trace"], flat_parts(second)["trace"])
    assert comparison.prepare_sweep(("trace",))() is not first


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
        row("PyHessian", 4.0, to_best_peer=1.0, eligible=True),
        row(LIMIT, 1.8),
        row(OWN, 9.0, setting="N = 20"),
    ]
    found = judge_rows(rows)
    assert found[0].verdict == "met: 0.50; missed by 1 %: 1.11"
    assert found[0].target == f"≤ 0.65 × {BEST}; ≤ 1.1 × {LIMIT}"
    assert not any(other.verdict for other in found[1:])


def test_a_verdict_says_if_it_is_held_against_a_wrong_answer():
    rows = [row(OWN, 3.0, quantity="trace"), row("PyHessian", 6.0, quantity="trace", error=0.1)]
    assert judge_rows(rows)[0].verdict == "missed by 10.0 ×: 2.00"
    rows[1] = row("PyHessian", 6.0, quantity="trace", error=2.0)
    assert judge_rows(rows)[0].verdict == "missed by 10.0 ×: 2.00 (of an answer off by 2e+00)"
    assert judge_rows(rows[:1])[0].verdict == "nothing to compare with"


def test_every_target_is_for_something_that_there_is():
    assert {target.workload for target in TARGETS} == set(KINDS)
    assert {target.kind for target in TARGETS} == {"share", "times cheaper", "cost", "error"}
    names = {tool.name for tool in PEERS} | {name for tool in PEERS for name in tool.traces}
    assert {target.against for target in TARGETS} - {"", BEST, LIMIT} <= names


# -- runs -------------------------------------------------------------------------------------


def test_a_run_without_peers(tiny_workloads):
    lines: list[str] = []
    saved: list[tuple[bool, int]] = []
    wanted = ["product", "trace", "sweep", "units", "eigenvalue", "layers", "classes"]
    results = run(
        *(["W1"], wanted),
        rounds=1,
        tools=[ABSENT],
        log=lines.append,
        save=lambda found: saved.append((found.complete, len(found.rows))),
        strict=True,
    )
    assert lines[0].startswith("skipping absent-tool: ModuleNotFoundError")
    assert [complete for complete, _ in saved] == [False] * 6 + [True]
    assert [count for _, count in saved] == sorted(count for _, count in saved)
    assert results.about("W1").startswith("W1: tiny, 161 parameters, N = 40")
    own = {found.quantity: found for found in results.rows if found.tool == OWN}
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
    rows = measure_classes(TimedComparison(tiny("W1K", outputs=100)))
    assert [(found.quantity, found.tool) for found in rows] == [
        *(("trace", OWN), ("trace", f"{OWN}, all columns")),
        *(("diagonal", OWN), ("diagonal", f"{OWN}, all columns")),
    ]
    errors = [found.error for found in rows]
    assert errors[1] == errors[3] == 0
    assert 0 < errors[0] < errors[2] < 1


def test_what_fails_is_noted_and_loses_nothing_else(tiny_workloads, monkeypatch):
    def broken(_: TimedComparison) -> list[TimingRow]:
        raise RuntimeError("no luck\nat all")

    monkeypatch.setitem(QUANTITIES, "trace", (broken, ("W1",)))
    results = run(["W1"], ["trace", "units"], rounds=1, tools=[])
    assert results.failures == ["W1, trace: RuntimeError: no luck"]
    assert {found.quantity for found in results.rows} == {"outgoing forms", "incoming forms"}
    with pytest.raises(RuntimeError, match="no luck"):
        run(["W1"], ["trace"], rounds=1, tools=[], strict=True)


def test_a_peer_that_fails_is_left_out(comparison):
    def product(model, batches):
        raise RuntimeError("not this model")

    lines: list[str] = []
    broken = Tool("Broken", "torch", "torch", product=product)
    here = TimedComparison(comparison.workload, [broken], log=lines.append)
    rows = measure_product(here)
    assert lines == ["skipping Broken on W1 (product): not this model"]
    assert "Broken" not in {found.tool for found in rows}
    assert available([ABSENT], lambda line: None) == []


def test_the_compiled_product_is_right(comparison, monkeypatch):
    # Not compiled here, which takes a minute; the product is the same.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    here = TimedComparison(comparison.workload, [COMPILED])
    (found,) = (here.prepare_product(tool, batches)() for tool, batches in here.peers("product"))
    assert distance(found, here.precise().hvp(here.vector)) < 1e-5


def test_the_command(tiny_workloads, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--quick", "--workloads", "W1", "--quantities", "product", "units"]
    assert main([*words, "--json", "b.json", "--markdown", "b.md", "--png", "b.png"]) == 0
    out, err = capsys.readouterr()
    assert "skipping absent-tool" in err
    assert f"| {' | '.join(SINGLE)} |" in out
    contents = json.loads((tmp_path / "b.json").read_text())
    assert contents["complete"] is True
    assert contents["facts"]["scale"] == 0.02
    assert contents["facts"]["rounds"] == 1
    assert contents["failures"] == []
    first = contents["rows"][0]
    assert (first["workload"], first["quantity"], first["tool"]) == ("W1", "product", OWN)
    assert first["cost"] > 0
    assert first["unit_seconds"] > 0
    assert first["verdict"].startswith("nothing to compare with; ")
    assert LIMIT in {line["tool"] for line in contents["rows"]}
    assert "outgoing forms" in (tmp_path / "b.md").read_text()
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_an_interruption_loses_nothing_that_is_finished(
    tiny_workloads, tmp_path, monkeypatch, capsys
):
    def interrupted(_: TimedComparison) -> list[TimingRow]:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(QUANTITIES, "layers", (interrupted, ("W1",)))
    words = ["--quick", "--workloads", "W1", "--quantities", "units", "layers"]
    assert main([*words, "--json", "b.json"]) == 130
    assert "outgoing forms" in capsys.readouterr().out
    contents = json.loads((tmp_path / "b.json").read_text())
    assert contents["complete"] is False
    assert {line["quantity"] for line in contents["rows"]} == {"outgoing forms", "incoming forms"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workloads", "W7"), "invalid choice: 'W7'"),
        (("--quantities", "speed"), "invalid choice: 'speed'"),
        (("--scale", "0"), "`scale=0` is no share of the samples"),
        (("--rounds", "0"), "`rounds=0` times nothing"),
        (("--json", "no/such/folder.json"), "there is no folder"),
    ],
)
def test_refusals(words, message, capsys):
    with pytest.raises(SystemExit) as ending:
        main(words)
    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_series_have_a_table_of_their_own():
    text = markdown([row(OWN, 2.0), row(OWN, 2.5, setting="width 64", sample_seconds=3e-6)])
    single, series = text.split("\n\n")
    assert single.startswith(f"| {' | '.join(SINGLE)} |")
    assert series.startswith(f"| {' | '.join(SERIES)} |")
    assert "| W1 | width 64 | product | flatgauge | 2.50 |  |  | 3.0 |" in series
    assert Results({}, rows=[row(OWN, 2.0)]).to_markdown().startswith("| workload")
