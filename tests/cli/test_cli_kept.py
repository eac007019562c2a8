"""Nothing that is finished is lost: on Ctrl-C, on errors, and on request."""

from __future__ import annotations

import json
import os

import pytest
import torch
import typer
from command_line import QUICK, call, fill, interrupt, start

import flatgauge as fg
from flatgauge.cli.saving import saving_results
from flatgauge.surface.examples import bowl


@pytest.fixture
def folder(tmp_path, monkeypatch):
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_save_holds_what_json_prints(folder, monkeypatch, capsys):
    words = ("measure", "nets.py:small", "--data", "data.npz", *QUICK, "--save", "kept.json")
    code, out, err = call(monkeypatch, capsys, *words, "--json")
    assert code == 0
    assert json.loads(out) == json.loads((folder / "kept.json").read_text())
    assert json.loads(out)["complete"] is True
    assert json.loads(out)["command"] == [*words, "--json"]
    assert "wrote kept.json" in err
    assert list(fg.Report.from_json("kept.json")) == [QUICK[1], QUICK[3]]


@pytest.mark.slow
def test_ctrl_c_leaves_finished_measures_on_disk(folder):
    """A real process, stopped in its second measure."""
    words = ("--data", "data.npz", *QUICK, "--save", "kept.json")
    process = start("measure", "nets.py:Stalling", *words)
    code, out, err = interrupt(process, folder / "started")
    assert (code, out) == (130, "")
    assert "interrupted: 1 of 2 measures are finished, in kept.json" in err
    assert "Traceback" not in err
    report = fg.Report.from_json(folder / "kept.json")
    assert (len(report), report.complete) == (1, False)
    assert not [name for name in os.listdir(folder) if name.startswith(".flatgauge")]


def test_ctrl_c_in_a_comparison(folder, monkeypatch, capsys):
    """Stopped in its first model."""
    words = ("compare", "nets.py:InterruptedLater", "nets.py:small", "--data", "data.npz", *QUICK)
    code, _, err = call(monkeypatch, capsys, *words, "--save", "kept.json")
    assert code == 130
    assert "interrupted: 1 of 4 measures are finished, in kept.json" in err
    comparison = fg.Comparison.from_json(folder / "kept.json")
    assert (list(comparison), comparison.complete) == (["InterruptedLater"], False)


def stopped(error: BaseException, save=None, html=None, *, as_json=False, total=5) -> None:
    """A run that ends with an error after its first measure."""
    with saving_results(save, html, json=as_json) as writer:
        writer.total = total
        report = fg.measure(bowl([1.0]), measures=["hessian_trace"])
        writer(fg.Report(report.estimates, report.facts, complete=False))
        raise error


@pytest.mark.parametrize("as_json", [False, True])
def test_without_a_file_finished_measures_are_printed(capsys, as_json):
    with pytest.raises(typer.Exit, match="130"):
        stopped(KeyboardInterrupt(), as_json=as_json)
    out, err = capsys.readouterr()
    assert "hessian_trace" in out
    assert (json.loads(out)["complete"] is False) if as_json else ("interrupted: not every" in out)
    assert err.endswith("1 of 5 measures are finished, printed above; --save FILE keeps them\n")


def test_an_error_says_where_finished_measures_are(tmp_path, capsys):
    path = str(tmp_path / "kept.json")
    with pytest.raises(ValueError, match="the model broke"):
        stopped(ValueError("the model broke"), path)
    assert "finished before the error: 1 of 5 measures are finished, in" in capsys.readouterr().err
    assert len(fg.Report.from_json(path)) == 1


def test_the_page_of_an_interrupted_run_says_so(tmp_path, capsys):
    pytest.importorskip("flatgauge.report.page")
    path = tmp_path / "page.html"
    with pytest.raises(typer.Exit, match="130"):
        stopped(KeyboardInterrupt(), html=str(path))
    assert "interrupted: not everything that was asked for is here" in path.read_text()
    assert f"in {path}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save", "--html"])
def test_a_place_that_cannot_be_written_is_told_before_anything_runs(
    folder, monkeypatch, capsys, option
):
    words = ("measure", "nets.py:failing", "--data", "data.npz", option, "gone/file")
    code, out, err = call(monkeypatch, capsys, *words)
    assert (code, out) == (2, "")
    assert "there is no folder" in err


def test_results_and_page_need_two_files(folder, monkeypatch, capsys):
    words = ("measure", "nets.py:small", "--data", "data.npz", *QUICK, "--html", "./kept.json")
    code, _, err = call(monkeypatch, capsys, *words, "--save", "kept.json")
    assert code == 2
    assert "are the same file" in err
    assert not (folder / "kept.json").exists()


class Fixed(torch.nn.Linear):
    """Ends with an error when its weights are moved without asking for derivatives."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(2, 1, bias=False)
        torch.nn.init.ones_(self.weight)
        self.error = error

    def forward(self, x):
        if not torch.is_grad_enabled() and not bool((self.weight == 1).all()):
            raise self.error("moved")
        return super().forward(x)


def illustrated(error: type[BaseException], html: str) -> None:
    surface = fg.LossSurface(Fixed(error), "mse", (torch.eye(2), torch.ones(2, 1)))
    with saving_results(None, html, json=False) as writer:
        writer(fg.measure(surface, measures=["hessian_max_eigenvalue"]))
        writer.add_extras({"Fixed": surface}, ["certificate"], 0)


def test_ctrl_c_while_pictures_are_computed_keeps_those_that_are_finished(tmp_path):
    path = tmp_path / "page.html"
    with pytest.raises(typer.Exit, match="130"):
        illustrated(KeyboardInterrupt, str(path))
    assert 'id="spectra"' in path.read_text()
    assert 'id="landscapes"' not in path.read_text()


def test_a_picture_that_cannot_be_had_is_a_remark(tmp_path):
    """Whatever kind of error the user's model raises."""
    path = tmp_path / "page.html"
    illustrated(LookupError, str(path))
    assert "no landscape (layers): moved" in path.read_text()


def test_ctrl_c_in_a_landscape_says_what_is_kept(folder, monkeypatch, capsys):
    words = ("landscape", "nets.py:Interrupted", "--data", "data.npz", "--space", "weights")
    code, out, err = call(monkeypatch, capsys, *words)
    assert (code, out) == (130, "")
    assert "interrupted: nothing is kept without --save FILE" in err
