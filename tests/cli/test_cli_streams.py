"""What a command prints arrives, or the command says that it did not and how it ended stays."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from command_line import QUICK, call, fill

import flatgauge as fg
from flatgauge.analysis.formatting import one_line, printable
from flatgauge.analysis.request import progress_bar
from flatgauge.cli import main
from flatgauge.cli.session import names_of
from flatgauge.report.tables import Cell, Column, Table, print_tables
from flatgauge.surface.examples import bowl

RED = "\x1b[31m"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda *words: call(monkeypatch, capsys, *words)


def ended(monkeypatch, stdout, *words: str) -> int:
    """Run a command whose standard output is another stream, and see how it ends."""
    monkeypatch.setattr(sys, "argv", ["flatgauge", *words])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ending:
            main()
    return ending.value.code


# -- encodings and sizes ----------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("colours", [False, True])
def test_an_encoding_that_lacks_characters_loses_nothing(monkeypatch, encoding, colours):
    if colours:
        monkeypatch.setenv("FORCE_COLOR", "1")
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, write_through=True)
    assert ended(monkeypatch, stream, "catalogue") == 0
    assert "hessian_trace" in written.getvalue().decode(encoding)


def test_json_can_be_read_in_any_encoding(run, monkeypatch):
    words = ("measure", "nets.py:small", "--data", "data.npz", *QUICK, "--json")
    expected = json.loads(run(*words)[1])
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    assert ended(monkeypatch, stream, *words) == 0
    found = json.loads(written.getvalue().decode("ascii"))
    assert found["facts"]["notes"] == expected["facts"]["notes"]
    assert found["measures"].keys() == expected["measures"].keys()


@pytest.mark.parametrize("columns", ["0", "", "²", "-5", "99999999"])
def test_a_width_that_no_terminal_has_is_not_used(run, monkeypatch, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run("catalogue")
    assert code == 0
    assert "hessian_trace" in out
    assert len(out) < 100_000


# -- streams that are closed, full, or have no reader -----------------------------------------


@pytest.mark.parametrize("passed", [True, False])
def test_a_reader_that_has_ended_changes_nothing(run, monkeypatch, capsys, passed):
    certificate = SimpleNamespace(passed=passed, to_dict=lambda: {"text": "x" * 10**6})
    monkeypatch.setattr(fg, "certify", lambda *args, **options: certificate)
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        words = ("certify", "nets.py:small", "--data", "data.npz", "--json")
        assert ended(monkeypatch, stream, *words) == (0 if passed else 1)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
def test_a_full_disk_under_standard_output_is_an_error(run, monkeypatch, capsys):
    with open("/dev/full", "w") as stream:
        assert ended(monkeypatch, stream, "catalogue") == 2
    told = "error: `standard output` cannot be written: the disk is full; free space on it"
    assert told in capsys.readouterr().err


def test_without_standard_error_a_command_works(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flatgauge", "measure", "nets.py:small", "--data"])
    sys.argv += ["data.npz", *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        with pytest.raises(SystemExit, match="0"):
            main()
    assert "hessian_max_eigenvalue" in capsys.readouterr().out


def test_closed_standard_streams_in_a_process(tmp_path):
    """Told before torch is imported; what is opened later is not taken for standard error."""
    words = f"{sys.executable} -m flatgauge measure gone.py:x --data digits"
    done = subprocess.run(f"{words} >&-", shell=True, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: standard output is closed, and results are printed there" in done.stderr
    done = subprocess.run(f"{words} >&- 2>&-", shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (2, "")


# -- characters that steer a terminal ---------------------------------------------------------


def test_names_are_shown_and_not_acted_on(capsys):
    from rich.console import Console

    assert printable(f"a{RED}\nb\udcff\u202ec") == "a\\u001b[31m\nb\\udcff\\u202ec"
    assert one_line("a\tb\nc") == "a\\u0009b\\u000ac"
    assert json.loads('"' + printable("\x9b") + '"') == "\x9b"
    assert names_of([("n.py:f", f"{RED}.pt"), ("n.py:f", "a\nb.pt")]) == [
        "\\u001b[31m",
        "a\\u000ab",
    ]
    for width in (80, 8):
        console = Console(width=width, color_system=None)
        rows = ((Cell(f"{RED}[/]"), Cell(f"1{RED}[red]")),)
        table = Table(f"{RED}[red]", (Column("model"), Column("value")), rows)
        print_tables([table], console)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "[red]" in out
    assert "[/]" in out


def test_reports_and_errors_do_not_steer_a_terminal(run):
    surface = bowl([1.0])
    surface.model.__class__ = type(f"Net{RED}", (type(surface.model),), {})
    report = fg.measure(surface, measures=["expected_sharpness"])
    assert report.facts.model == f"Net{RED}"
    assert "\x1b" not in repr(report)
    code, _, err = run("measure", f"{RED}.py:x", "--data", "data.npz")
    assert code == 2
    assert "\x1b" not in err
    assert "\\u001b[31m.py" in err


def test_the_bar_takes_no_markup_from_names(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar() as tell:
        tell("x[/]", 0, 2)
    assert "x[/]" in capsys.readouterr().err
