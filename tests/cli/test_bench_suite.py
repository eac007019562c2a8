"""The benchmark as a whole: what is run, told and written. Time is never asserted."""

from __future__ import annotations

import json

import pytest
from bench_workloads import ABSENT, row, tiny
from command_line import call

from flatgauge.cli.benchmarks.comparison import TimedComparison
from flatgauge.cli.benchmarks.peers import PEERS
from flatgauge.cli.benchmarks.plan import BenchPlan
from flatgauge.cli.benchmarks.quantities import QUANTITIES, Quantity, classes
from flatgauge.cli.benchmarks.results import Results
from flatgauge.cli.benchmarks.row import LIMIT, OWN, TimingRow
from flatgauge.cli.benchmarks.suite import run
from flatgauge.cli.benchmarks.table import COLUMNS, SERIES_COLUMNS, markdown
from flatgauge.cli.benchmarks.targets import BEST, TARGETS
from flatgauge.cli.benchmarks.tool import Tool, usable


@pytest.fixture(scope="module")
def comparison() -> TimedComparison:
    return TimedComparison(tiny())


@pytest.fixture
def tiny_workloads(monkeypatch):
    monkeypatch.setattr("flatgauge.cli.benchmarks.workloads.load", lambda name, **_: tiny(name))
    monkeypatch.setattr("flatgauge.cli.benchmarks.suite.PEERS", (ABSENT,))


def test_a_run_without_peers(tiny_workloads):
    told: list[str] = []
    kept: list[tuple[bool, int]] = []
    sections: list[tuple[str, list[TimingRow]]] = []
    results = run(
        BenchPlan(["W1"], ["product", "trace", "sweep", "units", "eigenvalue", "layers"], rounds=1),
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
    rows = classes.measured(TimedComparison(tiny("W1K", outputs=100)))
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

    monkeypatch.setitem(QUANTITIES, "trace", Quantity(broken))
    results = run(BenchPlan(["W1"], ["trace", "units"], rounds=1), tools=[])
    assert results.failures == ["W1, trace: RuntimeError: no luck"]
    assert {found.quantity for found in results.rows} == {"outgoing forms", "incoming forms"}
    with pytest.raises(RuntimeError, match="no luck"):
        run(BenchPlan(["W1"], ["trace"], rounds=1), tools=[], strict=True)


def test_a_peer_that_fails_is_left_out(comparison):
    def product(model, batches):
        raise RuntimeError("not this model")

    told: list[str] = []
    broken = Tool("Broken", "torch", "torch", product=product)
    here = TimedComparison(comparison.workload, [broken], tell=told.append)
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


def test_an_interruption_loses_nothing_that_is_finished(
    tiny_workloads, tmp_path, monkeypatch, capsys
):
    def interrupted(_: TimedComparison) -> list[TimingRow]:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(QUANTITIES, "layers", Quantity(interrupted))
    words = ("--quick", "--workloads", "W1", "--quantities", "units,layers", "--json", "b.json")
    code, out, err = call(monkeypatch, capsys, "bench", *words)
    assert code == 130
    assert "interrupted: what is finished is in b.json" in err
    assert "outgoing forms" in out
    contents = json.loads((tmp_path / "b.json").read_text())
    assert contents["complete"] is False
    assert {line["quantity"] for line in contents["rows"]} == {"outgoing forms", "incoming forms"}


def test_refusals(monkeypatch, capsys):
    for words, message in {
        ("--workloads", "W7"): "`workloads` has 'W7'; there are W1, W2, W3, W1K",
        ("--quantities", "speed"): "`quantities` has 'speed'; there are product, trace",
        ("--workloads", "W1K", "--quantities", "trace"): "none of trace is measured on W1K",
        ("--scale", "0"): "`scale=0` leaves no samples",
        ("--scale", "inf"): "`scale=inf` is no share of the samples",
        ("--json", "no/such/folder.json"): "there is no folder",
        ("--png", "costs.xyz"): "does not end in a form of picture",
        ("--png", "costs.png", "--quantities", "growth"): "there are none in growth",
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
