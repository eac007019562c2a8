"""The command line, as a user calls it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from command_line import QUICK, call, fill, flatgauge
from safetensors.torch import save_file

import flatgauge as fg
from flatgauge.cli import main
from flatgauge.cli.catalogue import ROWS
from flatgauge.measures import registry
from flatgauge.report.catalogue import catalogue_rows
from flatgauge.surface.examples import bowl


@pytest.fixture
def folder(tmp_path, monkeypatch):
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capsys):
    return lambda *words: call(monkeypatch, capsys, *words)


def test_measure_prints_the_numbers_of_the_library(run):
    code, out, _ = run("measure", "nets.py:small", "--data", "data.npz", "--json", *QUICK)
    assert code == 0
    contents = json.loads(out)
    from flatgauge.loading.models import build_model

    model = build_model("nets.py:small")
    surface = fg.LossSurface(model, "cross_entropy", fg.load_dataset("data.npz"))
    report = fg.measure(surface, measures=[QUICK[1], QUICK[3]])
    for name, estimate in report.items():
        assert contents["measures"][name]["value"] == estimate.value
    assert contents["facts"]["samples"] == 30
    assert contents["facts"]["loss"] == surface.value()


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_weights_are_loaded(run, suffix):
    from flatgauge.loading.models import build_model

    state = {
        k: torch.full_like(v, 0.25) for k, v in build_model("nets.py:small").state_dict().items()
    }
    save_file(state, "w.safetensors") if suffix == "safetensors" else torch.save(state, "w.pt")
    words = ("measure", "nets.py:small", "--data", "data.npz", "--json", *QUICK)
    plain = json.loads(run(*words)[1])
    loaded = json.loads(run(*words, "--weights", f"w.{suffix}")[1])
    assert loaded["facts"]["loss"] == pytest.approx(np.log(3))  # equal logits
    assert plain["facts"]["loss"] != loaded["facts"]["loss"]


def test_options_reach_the_surface(run):
    words = ("measure", "nets.py:small", "--data", "nets.py:batches", *QUICK, "--json")
    _, out, _ = run(*words, "--loss", "nets.py:squared", "--dtype", "float64", "--seed", "3")
    facts = json.loads(out)["facts"]
    assert (facts["loss_name"], facts["dtype"], facts["seed"]) == ("squared", "float64", 3)
    assert facts["samples"] == 20
    _, out, _ = run(*words, "--weight-decay", "0.5", "--memory", "16GiB", "--threads", "1")
    assert json.loads(out)["facts"]["weight_decay"] == 0.5


def test_the_models_own_loss_is_measured_where_it_reads_labels_otherwise(run):
    words = ("measure", "nets.py:Shifted", "--data", "nets.py:sequences", *QUICK, "--json")
    facts = json.loads(run(*words)[1])["facts"]
    assert facts["loss_name"] == "output.loss"
    assert any("the model's own loss is measured" in note for note in facts["notes"])
    assert json.loads(run(*words, "--loss", "output")[1])["facts"]["loss"] == facts["loss"]
    code, _, err = run(*words, "--loss", "cross_entropy")
    assert code != 0
    assert "--loss output" in " ".join(err.split())


def test_measures_take_options(run):
    words = ("measure", "nets.py:small", "--data", "data.npz", "--json")
    _, out, _ = run(*words, "-m", "epsilon_sharpness:epsilon=0.25,steps=3")
    contents = json.loads(out)
    assert contents["measures"]["epsilon_sharpness"]["options"]["epsilon"] == 0.25
    assert contents["command"][0] == "measure"
    assert contents["notes"] == ["no checkpoint: taken as the factory makes the model"]
    code, _, err = run(*words, "-m", "epsilon_sharpness:radius=1")
    assert code == 2
    assert "is no option of `epsilon_sharpness`" in err


def test_version(run):
    assert run("--version")[1].strip() == fg.__version__


def test_what_user_code_prints_is_kept_out_of_the_results(run):
    words = ("measure", "nets.py:talking", "--data", "data.npz", *QUICK, "--json")
    _, out, err = run(*words)
    assert set(json.loads(out)["measures"]) == {QUICK[1], QUICK[3]}
    assert "building the model" in err


def test_the_table_is_plain_text_where_nobody_watches(run):
    code, out, err = run("measure", "nets.py:small", "--data", "data.npz", *QUICK)
    assert code == 0
    assert "hessian_max_eigenvalue" in out
    assert "loss (cross_entropy)" in out
    assert "\x1b" not in out + err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nets.py:small",), "Missing option '--data'"),
        (("nets.py:smal", "--data", "data.npz"), "small"),
        (("nets.py", "--data", "data.npz"), ":"),
        (("gone.py:small", "--data", "data.npz"), "gone.py"),
        (("nets.py:failing", "--data", "data.npz"), "no such checkpoint server"),
        (("nets.py:small", "--data", "gone.npz"), "gone.npz"),
        (("nets.py:small", "--data", "minst:data"), "mnist"),
        (("nets.py:small", "--data", "data.npz", "--weights", "gone.pt"), "gone.pt"),
        (("nets.py:small", "--data", "data.npz", "--loss", "crossentropy"), "cross_entropy"),
        (("nets.py:small", "--data", "data.npz", "-m", "hesian_trace"), "Did you mean `hessian_t"),
        (("nets.py:small", "--data", "data.npz", "--dtype", "half"), "'half' is not one of"),
        (("nets.py:small", "--data", "data.npz", "--memory", "lots"), "not an amount of memory"),
        (("nets.py:small", "--data", "data.npz", "--mean", "a,b"), "numbers separated by commas"),
        (("nets.py:small", "--data", "data.npz", "--device", "cuda"), "--device cuda"),
        (("nets.py:small", "--data", "data.npz", "--loss", "mse"), "would be broadcast silently"),
        (("nets.py:small", "--data", "data.npz", "--limit", "99"), "30"),
    ],
)
def test_errors_teach_in_one_line_and_exit_2(run, words, message):
    code, out, err = run("measure", *words)
    assert code == 2
    assert message in err
    assert out == ""
    assert "Traceback" not in err


def test_debug_shows_the_traceback(folder, monkeypatch):
    words = ["flatgauge", "measure", "gone.py:x", "--data", "data.npz", "--debug"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(FileNotFoundError, match=r"gone\.py"):
        main()


def test_the_overview_in_the_package_is_that_of_the_registry():
    kept = json.loads(ROWS.read_text())
    assert kept == catalogue_rows(), "run `python tools/write_catalogue.py`"


def test_catalogue(run):
    code, out, _ = run("catalogue")
    assert code == 0
    assert all(item.name in out for item in registry)
    rows = json.loads(run("catalogue", "--json")[1])
    assert [row["name"] for row in rows] == [item.name for item in registry]
    _, out, _ = run("catalogue", "hessian_trace")
    assert "tr H" in out
    assert "Invariance:" in out
    code, _, err = run("catalogue", "hesian_trace")
    assert code == 2
    assert "Did you mean `hessian_trace`" in err


# -- real processes ---------------------------------------------------------------------------


def test_as_a_module_in_a_process_of_its_own(folder):
    done = flatgauge("measure", "nets.py:small", "--data", "data.npz", "--json", *QUICK)
    assert done.returncode == 0
    note, forecast = done.stderr.splitlines()
    assert note == "note: no checkpoint: taken as the factory makes the model"
    assert forecast.startswith("memory: budget ")
    assert set(json.loads(done.stdout)["measures"]) == {QUICK[1], QUICK[3]}
    assert sorted(os.listdir(folder)) == ["data.npz", "nets.py"]


def test_help_and_catalogue_answer_without_torch():
    for words in (["--help"], ["catalogue"]):
        script = f"import sys; sys.argv[1:] = {words}\nfrom flatgauge.cli import main\n"
        script += "try: main()\nfinally: print(*sys.modules, file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 0
        loaded = set(done.stderr.split())
        assert not {"torch", "numpy", "pandas", "scipy", "matplotlib", "plotly"} & loaded
        assert "hessian_trace" in done.stdout or "catalogue" in done.stdout


def test_ctrl_c_ends_quietly(run):
    code, out, err = run("measure", "nets.py:Interrupted", "--data", "data.npz")
    assert (code, out) == (130, "")
    assert err.endswith("interrupted before the first measure was finished\n")
    assert "Traceback" not in err


@pytest.mark.slow
def test_demo_is_the_whole_job(run, tmp_path):
    code, out, err = run("demo", "--threads", "1", "--html", str(tmp_path / "demo.html"))
    assert (code, err) == (0, "")
    *_, accuracies, ours, classical, still, certificate, _, place = out.splitlines()
    assert re.fullmatch(
        r"Test accuracy: small batch 9\d\.\d%, large batch 9\d\.\d%, 10% random labels .*",
        accuracies,
    )
    assert re.search(
        r"ρ_Σ \(rho_sum\): small batch [\d.]+ < large batch [\d.]+ < 10% random labels", ours
    )
    assert "(largest change of any output: 0)" in classical
    assert float(re.search(r"([\d,]+) times as much", classical)[1].replace(",", "")) > 1000
    assert re.search(r"18 of 33 measures, among them rho_sum, normalized_sharpness", still)
    assert re.fullmatch(r"Certificate: passed, (\d+) of \1 claims .*", certificate)
    assert place == f"report: {tmp_path / 'demo.html'}"
    text = (tmp_path / "demo.html").read_text()
    embedded = r'<script type="application/json" id="flatgauge">(.*?)</script>'
    found = json.loads(re.search(embedded, text, re.DOTALL)[1])
    before, after = (
        found["reports"][name]["measures"] for name in ("small batch", "small batch, rescaled")
    )
    for item in registry:
        same = before[item.name]["value"] == after[item.name]["value"]
        assert same == ("nodewise" in item.invariant_to), item.name
    assert len(found["landscapes"]) == 5
    assert len(found["spectra"]) == 2


# -- certify ----------------------------------------------------------------------------------

CERTIFIABLE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
"""


@pytest.fixture
def certifiable(folder):
    (folder / "certifiable.py").write_text(CERTIFIABLE)
    return "certifiable.py:net"


def test_certify_prints_the_table_and_passes(run, certifiable):
    code, out, _ = run("certify", certifiable, "--data", "digits", "--limit", "50", "--trials", "1")
    assert code == 0
    assert "8 independent scales, 50 samples, float32, 1 move of each kind" in out
    assert re.search(r"passed: all \d+ claims hold", out)


@pytest.mark.parametrize("as_json", [False, True])
def test_certify_exits_with_one_where_a_claim_fails(run, monkeypatch, as_json):
    certificate = fg.certify(bowl([1.0]), measures=["hessian_trace"])
    broken = dataclasses.replace(certificate.rows[0], claimed=True, verdict="FAILS")
    failed = dataclasses.replace(certificate, rows=(broken,))
    monkeypatch.setattr(fg, "certify", lambda *args, **options: failed)
    words = ("certify", "nets.py:small", "--data", "data.npz")
    code, out, _ = run(*words, *(["--json"] if as_json else []))
    assert code == 1
    if as_json:
        assert json.loads(out)["passed"] is False
    else:
        assert "FAILED: 1 of 1 claims do not hold" in out


def test_certify_refuses_bad_usage(run, certifiable):
    code, _, err = run("certify", certifiable, "--data", "digits", "--all", "-m", "rho_max")
    assert code == 2
    assert "`--all` and `-m` exclude each other" in err
    assert run("certify", certifiable, "--data", "digits", "--trials", "0")[0] == 2
