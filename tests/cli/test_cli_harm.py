"""Nothing of the user's is overwritten, and no code of the user's decides how a command ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import typer
from command_line import QUICK, call, fill

import flatgauge as fg
from flatgauge.cli.saving import saving_results
from flatgauge.loading.models import build_model
from flatgauge.surface.examples import bowl

DATA = ("--data", "data.npz")
PIXELS = "folder/raw/train-images-idx3-ubyte"
MODEL = ("nets.py:small", *DATA)

ENDINGS = """
import sys
import torch
from torch import nn
from nets import small

class Ending(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = small(), how

    def forward(self, x):
        self.how()
        return self.inner(x)

class Odd(BaseException):
    pass

def in_forward():
    return Ending(lambda: sys.exit(0))

def at_end_of_file():
    def fail():
        raise EOFError("nothing to read")
    return Ending(fail)

def odd():
    def fail():
        raise Odd("odd")
    return Ending(fail)

def in_factory():
    sys.exit(0)

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        sys.exit(0)

def in_data():
    return torch.utils.data.DataLoader(Samples(), batch_size=2)

def failing():
    return Ending(lambda: [][1])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "endings.py").write_text(ENDINGS)
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    torch.save(build_model("nets.py:small").state_dict(), "a.pt")
    torch.save(build_model("nets.py:small").state_dict(), "b.pt")
    (tmp_path / "link.pt").symlink_to("a.pt")
    (tmp_path / "folder").mkdir()
    os.link("a.pt", "folder/hard.pt")
    (tmp_path / "folder" / "raw").mkdir()
    (tmp_path / "folder" / "raw" / "train-images-idx3-ubyte").write_bytes(b"data")
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capsys):
    return lambda *words: call(monkeypatch, capsys, *words)


# -- files that are read ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (("measure", *MODEL, "--weights", "a.pt", "--save", "a.pt"), "a.pt"),
        (("measure", *MODEL, "--weights", "link.pt", "--html", "./folder/../a.pt"), "a.pt"),
        (("measure", *MODEL, "--weights", "a.pt", "--save", "link.pt"), "a.pt"),
        (("measure", *MODEL, "--weights", "a.pt", "--save", "folder/hard.pt"), "a.pt"),
        (("measure", *MODEL, "--save", "nets.py"), "nets.py"),
        (("measure", "nets:small", *DATA, "--save", "nets.py"), "nets.py"),
        (("measure", *MODEL, "--html", "data.npz"), "data.npz"),
        (("measure", *MODEL, "--loss", "endings.py:f", "--html", "endings.py"), "endings.py"),
        (("compare", "nets.py:small", "a.pt", "b.pt", *DATA, "--html", "b.pt"), "b.pt"),
        (("landscape", "nets.py:small", "a.pt", *DATA, "--to", "b.pt", "--save", "b.pt"), "b.pt"),
        (("landscape", "nets.py:small", *DATA, "--png", "data.npz"), "data.npz"),
        (("spectrum", "nets.py:small", "--weights", "a.pt", *DATA, "--html", "a.pt"), "a.pt"),
        (
            ("measure", "nets.py:small", "--data", "mnist:folder", "--save", PIXELS),
            PIXELS,
        ),
    ],
)
def test_what_is_read_is_not_overwritten(run, words, read):
    before = Path(read).read_bytes()
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "would overwrite what this command reads" in err
    assert Path(read).read_bytes() == before


def test_two_outputs_are_two_files(run):
    code, _, err = run("spectrum", *MODEL, "--html", "x.png", "--png", "./x.png")
    assert code == 2
    assert "are the same file" in err


# -- words that are empty, or too large -------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("measure", *MODEL, "--save", ""), "--save was given '', which is empty"),
        (("measure", *MODEL, "--weights", ""), "--weights was given ''"),
        (("measure", *MODEL, "--html="), "--html was given ''"),
        (("measure", "nets.py:small", "--data", " "), "--data was given ' '"),
        (("compare", "nets.py:small", "", *DATA), "an argument was given ''"),
        (("compare", "nets.py:small", "a.pt", *DATA), "has 1 model, and a comparison needs two"),
        (("measure", *MODEL, "--memory", "lots"), "`--memory lots` is not an amount of memory"),
        (("measure", *MODEL, "--memory", "9" * 400), "is not an amount of memory"),
        (
            ("measure", *MODEL, "--memory", "1k"),
            "`--memory 1k` is not an amount of memory of 1 MiB",
        ),
        (("measure", *MODEL, "--seed", "99999999999999999999"), "given: '99999999999999999999'"),
        (("measure", *MODEL, "--threads=two"), "given: 'two'"),
        (("measure", *MODEL, "--threads", "two"), "'--threads': Input should be a valid integer"),
    ],
)
def test_odd_words_are_refused_before_anything_is_computed(run, words, told):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert told in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_what_follows_two_dashes_is_no_option(run):
    code, _, err = run("compare", "nets.py:small", "--", "a.pt", "--data", "data.npz")
    assert code == 2
    assert "Missing option '--data'" in err
    assert "given" not in err


def test_the_help_of_certify_says_what_is_certified(run):
    text = " ".join(run("certify", "--help")[1].replace("│", " ").split())
    assert "Without -m: those of the shared sweep." in text
    assert "Without -m: all" not in text
    assert "Without -m: all." in " ".join(run("measure", "--help")[1].replace("│", " ").split())


# -- code that ends the program ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "data", "told"),
    [
        ("endings.py:in_forward", "data.npz", "sys.exit(0)"),
        ("endings.py:at_end_of_file", "data.npz", "nothing to read"),
        ("endings.py:odd", "data.npz", "odd"),
        ("endings.py:failing", "data.npz", "endings.py:"),
        ("endings.py:in_factory", "data.npz", "SystemExit: 0"),
        ("leaving.py:net", "data.npz", "SystemExit: 0"),
        ("nets.py:small", "endings.py:in_data", "sys.exit(0)"),
    ],
)
def test_a_certificate_is_never_passed_by_code_that_ends(run, model, data, told):
    code, out, err = run("certify", model, "--data", data)
    assert (code, out) == (2, "")
    assert told in err
    assert (".py:") in err.splitlines()[-1]
    assert "Traceback" not in err


# -- results that cannot be saved -------------------------------------------------------------

full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")


@full
def test_results_that_cannot_be_saved_are_printed_and_the_command_fails(run):
    code, out, err = run("measure", *MODEL, *QUICK, "--save", "/dev/full")
    assert code == 2
    assert "hessian_max_eigenvalue" in out
    assert "expected_sharpness" in out
    assert "\nerror: `/dev/full` cannot be written: the disk is full; free space" in err
    assert "wrote" not in err


@full
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_results_that_cannot_be_saved_are_printed_when_a_run_is_cut_short(capsys, error):
    expected = typer.Exit if error is KeyboardInterrupt else error

    def cut_short() -> None:
        with saving_results("/dev/full", None, json=False) as writer:
            writer(fg.measure(bowl([1.0]), measures=["hessian_trace"]))
            raise error("stop")

    with pytest.raises(expected, match=r"130|stop"):
        cut_short()
    out, err = capsys.readouterr()
    assert "hessian_trace" in out
    assert "1 measures are finished, printed above" in err
    assert "in /dev/full" not in err
