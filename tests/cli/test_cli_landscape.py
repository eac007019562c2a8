"""`flatgauge landscape`, as a user calls it."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

import flatgauge as fg
from flatgauge.cli import main

NETS = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "nets.py").write_text(NETS)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(30, 6)).astype("float32"), generator.integers(0, 3, size=30)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    monkeypatch.chdir(tmp_path)
    from flatgauge.loading.models import build_model

    for seed, name in enumerate("ab"):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            torch.save(build_model("nets.py:small").state_dict(), f"{name}.pt")

    def call(*words: str) -> tuple[int, str, str]:
        start = ["flatgauge", "landscape", "nets.py:small", "--data", "data.npz", "--points", "3"]
        monkeypatch.setattr(sys, "argv", [*start, *words])
        with pytest.raises(SystemExit) as ending:
            main()
        captured = capsys.readouterr()
        return int(ending.value.code or 0), captured.out, captured.err

    return call


def surface(weights: str) -> fg.LossSurface:
    from flatgauge.loading.models import build_model

    model = build_model("nets.py:small")
    model.load_state_dict(torch.load(weights))
    return fg.LossSurface(model, "cross_entropy", fg.load_dataset("data.npz"))


def test_json_has_the_numbers_of_the_library(run):
    code, out, _ = run("--weights", "a.pt", "--space", "filters", "--json", "--seed", "2")
    assert code == 0
    found = fg.landscape(surface("a.pt"), space="filters", points=3, seed=2)
    contents = json.loads(out)
    assert np.allclose(contents["loss"], found.loss, rtol=1e-6)
    assert contents["caption"] == found.caption


def test_several_weights_are_drawn_together(run, tmp_path):
    words = ("--weights", "a.pt", "--weights", "b.pt", "--space", "layers", "--dims", "1")
    code, out, err = run(*words, "--png", "x.png", "--html", "x.html", "--log")
    assert (code, out) == (0, "")
    assert "wrote x.png" in err
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "layer-normalised directions: a, b" in (tmp_path / "x.html").read_text()
    _, out, _ = run(*words, "--json")
    assert list(json.loads(out)["landscapes"]) == ["a", "b"]


def test_a_summary_without_a_file(run):
    _, out, _ = run("--weights", "a.pt", "--space", "weights")
    assert "loss at the model" in out
    assert f" {surface('a.pt').value():.4g} " in out
    assert out.startswith("Mean cross_entropy of 30 samples at 3 × 3 points")


def test_the_line_to_a_checkpoint(run):
    _, out, _ = run("--weights", "a.pt", "--to", "b.pt", "--points", "7", "--json")
    contents = json.loads(out)
    assert contents["loss"][1] == pytest.approx(surface("a.pt").value())
    assert contents["loss"][5] == pytest.approx(surface("b.pt").value())


def test_a_file_is_continued_and_not_mixed(run):
    words = ("--weights", "a.pt", "--space", "weights", "--save", "x.npz")
    assert run(*words)[0] == 0
    assert run(*words)[0] == 0
    code, _, err = run(*words, "--seed", "1")
    assert code == 2
    assert "it differs in seed" in err


def test_errors_are_one_line(run):
    code, _, err = run("--weights", "a.pt", "--dims", "3")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: `dims=3` must be 1 or 2")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--png", "no/x.png"), "there is no folder"),
        (("--html", "."), "is a folder"),
        (("--png", "x.foo"), "does not end in a form of picture"),
        (("--what", "height"), "'height' is not one of"),
        (("--kind", "curve"), "cannot show a plane"),
        (("--kind", "surface", "--to", "b.pt"), "cannot show a line"),
    ],
)
def test_what_cannot_be_drawn_is_told_before_anything_is_computed(run, tmp_path, words, told):
    code, out, err = run("--weights", "a.pt", "--save", "kept.npz", *words)
    assert (code, out) == (2, "")
    assert told in err
    assert not (tmp_path / "kept.npz").exists()
