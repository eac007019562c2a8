"""The command line as people see it: help, completion, colours, bars, formulas."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import get_args

import pytest
from command_line import QUICK, call, fill

from flatgauge.analysis.landscapes import SPACES
from flatgauge.analysis.request import time_left
from flatgauge.cli import app
from flatgauge.cli.landscape import SpaceName
from flatgauge.cli.spectrum import GeometryName
from flatgauge.geometry import GEOMETRIES
from flatgauge.measures import registry
from flatgauge.report.formulas import readable, unicode_formula

COMMANDS = [command.callback.__name__ for command in app.registered_commands]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda *words: call(monkeypatch, capsys, *words)


# -- help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    text = " ".join(out.split())
    assert "Examples:" in text
    assert f"flatgauge {command}" in text.split("Examples:")[1]


def test_options_are_grouped(run):
    _, out, _ = run("measure", "--help")
    panels = [line.split("─ ")[1].split(" ─")[0] for line in out.splitlines() if "╭─ " in line]
    assert panels[-5:] == ["Model", "Data", "What to measure", "Output", "Running"]


def test_the_exit_codes_are_told(run):
    text = " ".join(run("--help")[1].split())
    assert "0 fine; 1 a certificate failed; 2 bad usage or input; 130 interrupted" in text


def test_unknown_commands_and_options(run):
    code, _, err = run("mesure")
    assert code == 2
    assert "Did you mean 'measure'" in err
    code, _, err = run("measure", "nets.py:small", "--data", "data.npz", "--jason")
    assert code == 2
    assert "No such option: --jason" in err
    assert "--json" in err


# -- completion -------------------------------------------------------------------------------


@pytest.fixture
def completed(monkeypatch, capsys):
    """What bash would be offered."""

    def complete(words: str, position: int) -> list[str]:
        monkeypatch.setenv("_FLATGAUGE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(position))
        return call(monkeypatch, capsys)[1].split()

    return complete


def test_the_shell_completes_commands_measures_and_choices(completed):
    assert completed("flatgauge comp", 1) == ["compare"]
    assert completed("flatgauge measure -m rho", 3) == ["rho_max", "rho_sum"]
    assert completed("flatgauge measure -m balanced:rho_m", 3) == ["balanced:rho_max"]
    assert completed("flatgauge measure --split te", 3) == ["test"]
    assert completed("flatgauge landscape --space fi", 3) == ["filters"]


def test_choices_are_what_there_is():
    assert sorted(get_args(SpaceName)) == sorted(SPACES)
    assert sorted(get_args(GeometryName)) == sorted(GEOMETRIES)


# -- colours and bars -------------------------------------------------------------------------

MEASURED = ("measure", "nets.py:small", "--data", "data.npz", *QUICK)


def test_colours_can_be_forced_and_forbidden(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run(*MEASURED)[1]
    assert "\x1b" not in run(*MEASURED, "--json")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    out = run("catalogue")[1]
    assert "\x1b[36m" not in out
    assert "hessian_trace" in out


def test_a_narrow_terminal_shows_every_value(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = run(*MEASURED)
    assert code == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert max(map(len, lines)) <= 40
    assert "hessian_max_eigenvalue" in out
    assert "expected_sharpness" in out


def test_a_dumb_terminal_gets_plain_text(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    code, out, err = run(*MEASURED)
    assert code == 0
    assert "\x1b" not in out + err


def test_the_bar_goes_to_a_terminal_on_stderr_and_json_stays_clean(run, monkeypatch):
    master, slave = pytest.importorskip("pty").openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        code, out, _ = run(*MEASURED, "--json")
    shown = os.read(master, 100_000).decode(errors="replace")
    os.close(master)
    assert code == 0
    assert set(json.loads(out)["measures"]) == {QUICK[1], QUICK[3]}
    assert "passes" in shown


def test_the_time_left_is_a_rough_guess():
    assert time_left(10.0, 0, 10) == time_left(10.0, 1, 10) == ""
    assert time_left(10.0, 2, 4) == "about 10 s left"
    assert time_left(0.1, 3, 4) == "about 5 s left"
    assert time_left(100.0, 2, 4) == "about 2 min left"
    assert time_left(7200.0, 2, 4) == "about 2.0 h left"


# -- formulas ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (
            r"\operatorname{tr} H = \sum_i \partial^2 L / \partial \theta_i^2",
            "tr H = ∑ᵢ ∂² L / ∂ θᵢ²",
        ),
        (r"\max_{\|\delta\|_2 \le \varepsilon}", "max_(‖δ‖₂ ≤ ε)"),
        (r"\frac{a + b}{c}", "(a + b)/c"),
        (r"\sqrt{18}, \sqrt{a b}", "√18, √(a b)"),
        (r"\tilde H^{l}_{ss'}", "H̃ˡ_ss′"),
        (r"\left( x \right)^{1/q} \quad \unknown{y}", "( x )^(1/q) unknowny"),
        (r"a \\ b", "a\nb"),
        (r"{{a}", "a"),
        ("", ""),
    ],
)
def test_formulas_are_written_in_unicode(latex, text):
    assert unicode_formula(latex) == text


@pytest.mark.parametrize("item", registry, ids=lambda item: item.name)
def test_no_measure_is_explained_in_latex(item):
    text = readable(item.function.__doc__)
    assert "\\" not in text.split("Example:")[0]
    assert ":math:" not in text
    assert ".. math::" not in text
