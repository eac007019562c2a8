"""`flatgauge spectrum`, as a user calls it."""

from __future__ import annotations

import json

import torch
from test_cli import folder, run  # noqa: F401  (fixtures)

import flatgauge as fg
from flatgauge.loading.models import build_model

QUICK = ("--probes", "2", "--steps", "6", "--top", "2")
WORDS = ("spectrum", "nets.py:small", "--data", "data.npz", *QUICK)


def test_json_has_the_numbers_of_the_library(run):  # noqa: F811
    code, out, _ = run(*WORDS, "--json", "--geometry", "per tensor", "--seed", "2")
    assert code == 0
    contents = json.loads(out)
    model = build_model("nets.py:small")
    surface = fg.LossSurface(model, "cross_entropy", fg.load_dataset("data.npz"))
    found = fg.spectrum(surface, geometry="per tensor", probes=2, steps=6, top=2, seed=2)
    assert [item["value"] for item in contents["top"]] == [item.value for item in found.top]
    assert contents["nodes"] == found.to_dict()["nodes"]
    assert contents["command"][0] == "spectrum"


def test_a_rescaled_copy_is_drawn_over_it(run, folder):  # noqa: F811
    words = ("--geometry", "per weight", "--rescaled", "--png", "s.png", "--html", "s.html")
    code, out, err = run(*WORDS, *words, "--json")
    assert code == 0
    one, other = json.loads(out)["spectra"].values()
    assert one["nodes"] == other["nodes"]  # every bit
    assert "wrote s.png" in err
    assert "wrote s.html" in err
    assert (folder / "s.png").read_bytes().startswith(b"\x89PNG")
    assert "small, rescaled" in (folder / "s.html").read_text()


def test_several_checkpoints(run, folder):  # noqa: F811
    model = build_model("nets.py:small")
    for name, factor in (("small", 1.0), ("large", 2.0)):
        torch.save({k: v * factor for k, v in model.state_dict().items()}, f"{name}.pt")
    code, out, _ = run(*WORDS, "--weights", "small.pt", "--weights", "large.pt")
    assert code == 0
    assert "Spectrum of H" in out
    header = next(line for line in out.splitlines() if line.split() == ["small", "large"])
    assert header
    assert "eigenvalues" in out


def test_words_that_are_not_understood(run, folder):  # noqa: F811
    code, _, err = run(*WORDS, "--geometry", "round")
    assert code == 2
    assert "'round' is not one of" in err
    (folder / "bent.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), "
        "nn.Linear(6, 3), nn.Tanh())\n"
    )
    code, _, err = run("spectrum", "bent.py:net", "--data", "data.npz", *QUICK, "--rescaled")
    assert code == 2
    assert "nothing of this model can be rescaled" in err
