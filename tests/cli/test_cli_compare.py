"""`flatgauge compare`: models and checkpoints in the words of a command line."""

from __future__ import annotations

import json

import pytest
import torch
from command_line import QUICK, call, fill

import flatgauge as fg
from flatgauge.cli.session import is_model, names_of, read_models
from flatgauge.loading.models import build_model

WORDS = ("--data", "data.npz", *QUICK)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    state = build_model("nets.py:small").state_dict()
    torch.save(state, "a.pt")
    torch.save({name: 2 * value for name, value in state.items()}, "b.pt")
    return lambda *words: call(monkeypatch, capsys, "compare", *words)


def test_checkpoints_are_ranked_with_the_numbers_of_the_library(run):
    code, out, _ = run("nets.py:small", "a.pt", "b.pt", *WORDS, "--json")
    assert code == 0
    contents = json.loads(out)
    assert list(contents["models"]) == ["a", "b"]
    data, surfaces = fg.load_dataset("data.npz"), {}
    for name, factor in (("a", 1), ("b", 2)):
        model = build_model("nets.py:small")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        surfaces[name] = fg.LossSurface(model, "cross_entropy", data)
    comparison = fg.compare(surfaces, measures=[QUICK[1], QUICK[3]])
    for name, report in comparison.items():
        for measure, estimate in report.items():
            assert contents["models"][name]["measures"][measure]["value"] == estimate.value
    assert contents["ranks"] == comparison.to_dict()["ranks"]


def test_the_table_names_models_and_ends_in_the_verdict(run):
    code, out, err = run("nets.py:small", "a.pt", "nets.py:talking", *WORDS, "--names", "x,y")
    assert code == 0
    assert out.splitlines()[0].startswith("2 models: 30 samples")
    assert "no verdict" in out.splitlines()[-1]
    assert "y: no checkpoint: taken as the factory makes the model" in err
    assert "building the model" in err
    assert "\x1b" not in out


def test_one_model_object_holds_two_checkpoints(run):
    with open("nets.py", "a") as file:
        file.write("\nready = small()\n")
    _, out, _ = run("nets.py:ready", "a.pt", "b.pt", *WORDS, "--json")
    losses = [report["facts"]["loss"] for report in json.loads(out)["models"].values()]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a.pt", "b.pt"), "`a.pt` is a checkpoint without a model before it"),
        (("nets.py:small", "a.pt"), "has 1 model, and a comparison needs two"),
        (("nets.py:small", "a.pt", "gone.pt"), "gone.pt"),
        (("nets.py:small", "a.pt", "b.pt", "--names", "x"), "1 different names, and there are 2"),
        (("nets.py:small", "a.pt", "b.pt", "-m", "rho_mex"), "Did you mean `rho_max`"),
        ((), "Missing argument"),
    ],
)
def test_bad_usage_is_told(run, words, message):
    code, out, err = run(*words, "--data", "data.npz")
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_checkpoints_belong_to_the_model_before_them():
    words = ["a.py:f", "1.pt", "2.pt", "b.py:g", "b.py:h", "epoch=3-step=9.ckpt"]
    assert read_models(words) == [
        ("a.py:f", "1.pt"),
        ("a.py:f", "2.pt"),
        ("b.py:g", None),
        ("b.py:h", "epoch=3-step=9.ckpt"),
    ]


@pytest.mark.parametrize("word", ["nets.py:f", "package.module:Net", "nets.py:Net.small"])
def test_words_that_name_models(word):
    assert is_model(word)


@pytest.mark.parametrize("word", ["a.pt", "C:\\runs\\a", "runs:1/best.pth", "x:y.safetensors"])
def test_words_that_name_files(word):
    assert not is_model(word)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["a.pt", "x/b.pt"], ["a", "b"]),
        (["x/1/m.pt", "x/2/m.pt"], ["1/m", "2/m"]),
        (["x/1/m.pt", "y/1/m.pt"], ["x/1/m", "y/1/m"]),
        (["m.pt", "m.safetensors"], ["m.pt", "m.safetensors"]),
        (["m.pt", "m.pt"], ["n:f m.pt", "n:f m.pt (2)"]),
        ([None, "m.pt"], ["f", "m"]),
    ],
)
def test_names_are_short_and_different(files, names):
    assert names_of([("n:f", file) for file in files]) == names
