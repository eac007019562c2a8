"""Pools of checkpoints: manifests, scores given and computed, resuming, and real networks."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from command_line import call

import flatgauge as fg
from flatgauge.studies import Network, PoolResult
from flatgauge.studies.data import load_data
from flatgauge.studies.recipe import Recipe
from flatgauge.studies.training import mean_loss, train

NETS = """
from torch import nn

def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
"""

#: Measured without reading the network's graph, which takes most of the time.
CHEAP = ["hessian_max_eigenvalue", "expected_sharpness"]
READ = {"data": "digits", "samples": 60, "test_samples": 40}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Four checkpoints of one network, and a manifest of them."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "nets.py").write_text(NETS)
    lines = []
    for rate in (0.05, 0.2):
        for seed in (0, 1):
            recipe = Recipe(
                **READ, network=f"{folder / 'nets.py'}:small", epochs=3, rate=rate, seed=seed
            ).but(standardise=False)
            model = train(recipe, load_data(recipe, None)).model
            name = f"net_{rate}_{seed}.pt"
            torch.save(model.state_dict(), folder / name)
            lines.append({"checkpoint": name, "factory": "nets.py:small", "lr": rate, "seed": seed})
    with open(folder / "manifest.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return folder


@pytest.fixture(scope="module")
def found(runs: Path, tmp_path_factory) -> PoolResult:
    pool = fg.Pool.from_manifest(
        runs / "manifest.csv",
        measures=[*CHEAP, "rho_sum"],
        factors=["lr"],
        **READ,
        rescaling="units 1/10..10",
    )
    return pool.run(tmp_path_factory.mktemp("pool"))


def test_a_manifest_is_read(runs: Path) -> None:
    pool = fg.Pool.from_manifest(runs / "manifest.csv", measures=CHEAP, **READ)
    assert list(pool.members) == ["net_0.05_0", "net_0.05_1", "net_0.2_0", "net_0.2_1"]
    first = pool.members["net_0.05_0"]
    assert first.columns == {"lr": 0.05, "seed": 0}
    assert first.factory == f"{runs / 'nets.py'}:small"
    assert Path(first.checkpoint) == runs / "net_0.05_0.pt"
    again = fg.Pool.from_dict(json.loads(json.dumps(pool.declaration())))
    assert again.declaration() == pool.declaration()


def test_rows_are_what_the_parts_give(found: PoolResult, runs: Path) -> None:
    frame = found.to_frame()
    assert list(frame["state"]) == ["given"] * 4
    data = load_data(Recipe(**READ, standardise=False), None)
    for name in frame.index:
        surface = found.surface(name)
        model = surface.model
        loss, accuracy = mean_loss(model, data.inputs, data.targets)
        test_loss, _ = mean_loss(model, data.test_inputs, data.test_targets)
        assert (frame.loc[name, "train_loss"], frame.loc[name, "train_accuracy"]) == (
            loss,
            accuracy,
        )
        assert frame.loc[name, "loss_gap"] == test_loss - loss
        report = fg.measure(surface, measures=CHEAP)
        assert [frame.loc[name, key] for key in CHEAP] == [report[key].value for key in CHEAP]
    rescaled = found.rescaled_frame()
    assert rescaled["rho_sum"].tolist() == pytest.approx(frame["rho_sum"].tolist(), rel=1e-4)
    assert (rescaled["hessian_max_eigenvalue"] / frame["hessian_max_eigenvalue"] > 1.1).any()
    assert {"granulated[lr]", "spearman", "partial[norm]"} <= set(found.correlations)
    assert "4 checkpoints, measured on all samples; factors: lr." in repr(found)
    assert "Spearman, rescaled" in repr(found)


def test_the_page_and_the_folder(found: PoolResult) -> None:
    page = found.write(command="flatgauge pool")
    assert "net_" not in page.read_text().split("<title>")[1].split("</title>")[0]
    again = PoolResult.read(found.store.folder)
    assert again.to_frame().equals(found.to_frame())
    assert again.surface("net_0.2_1").value() == found.surface("net_0.2_1").value()


def test_it_resumes_grows_and_notices_another_checkpoint(runs: Path, tmp_path: Path) -> None:
    def pool(count: int) -> fg.Pool:
        files = sorted(runs.glob("*.pt"))[:count]
        factory = f"{runs / 'nets.py'}:small"
        return fg.Pool.from_checkpoints(factory, files, measures=["expected_sharpness"], **READ)

    pool(2).run(tmp_path / "pool")
    before = (tmp_path / "pool" / "rows.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match="already holds finished networks"):
        pool(3).run(tmp_path / "pool")
    grown = pool(4).run(tmp_path / "pool", resume=True)
    assert len(grown.rows) == 4
    # No factors: correlations over all, and nothing within settings.
    assert not [column for column in grown.correlations if column.startswith("granulated")]
    assert (tmp_path / "pool" / "rows.jsonl").read_bytes().startswith(before)
    with pytest.raises(ValueError, match="holds another pool: it differs in seed"):
        fg.Pool(
            **{f: getattr(pool(4), f) for f in ("name", "networks", "measures")}, **READ, seed=1
        ).run(tmp_path / "pool", resume=True)


def test_a_checkpoint_that_changed_is_noticed(runs: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.pt"
    own.write_bytes((runs / "net_0.2_0.pt").read_bytes())
    pool = fg.Pool.from_checkpoints(
        f"{runs / 'nets.py'}:small", [own], measures=["expected_sharpness"], **READ
    )
    pool.run(tmp_path / "pool")
    own.write_bytes((runs / "net_0.2_1.pt").read_bytes())
    with pytest.raises(ValueError, match=r"`.*own.pt` has changed since `own` was measured"):
        pool.run(tmp_path / "pool", resume=True)
    own.unlink()
    with pytest.raises(FileNotFoundError, match=r"the checkpoint `.*` of `own` does not exist"):
        pool.run(tmp_path / "pool", resume=True)


def test_scores_of_the_user_are_taken_as_they_are(runs: Path, tmp_path: Path) -> None:
    lines = [
        {"checkpoint": path.name, "test_loss": 3.0 + k, "normalisation": [0.5, 0.5], "quality": k}
        for k, path in enumerate(sorted(runs.glob("*.pt")))
    ]
    manifest = runs / "given.json"
    manifest.write_text(json.dumps(lines))
    pool = fg.Pool.from_manifest(
        manifest,
        factory=f"{runs / 'nets.py'}:small",
        measures=["expected_sharpness"],
        data="digits",
        samples=60,
        target="quality",
    )
    found = pool.run(tmp_path)
    frame = found.to_frame()
    assert frame["test_loss"].tolist() == [3.0, 4.0, 5.0, 6.0]
    assert "test_accuracy" not in frame
    data = load_data(Recipe(**READ, standardise=False), None)
    loss, _ = mean_loss(
        found.surface(frame.index[0]).model, (data.inputs - 0.5) / 0.5, data.targets
    )
    assert frame["train_loss"].iloc[0] == pytest.approx(loss)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"networks": []}, ValueError, "`networks` is empty"),
        ({"target": "luck"}, ValueError, "`target` names 'luck'; use some of accuracy_gap"),
        ({"factors": ["lr"]}, ValueError, "`factors` names 'lr'"),
        ({"factors": "lr"}, TypeError, r"must be a list; give \['lr'\]"),
        ({"confounders": ["name"]}, ValueError, "`confounders` names 'name'"),
        ({"rescaling": "twice"}, ValueError, "cannot be read"),
        ({"measures": ["flatness"]}, KeyError, "flatness"),
    ],
)
def test_what_means_nothing_is_refused(changes, error, message: str) -> None:
    one = Network(name="a", factory="nets.py:small", checkpoint="a.pt")
    settings = {"name": "p", "networks": [one], "measures": CHEAP, **READ} | changes
    with pytest.raises((error, ValueError), match=message):
        fg.Pool(**settings)


def test_two_networks_of_one_name() -> None:
    one = Network(name="a", factory="nets.py:small", checkpoint="a.pt")
    with pytest.raises(ValueError, match="two networks are called `a`"):
        fg.Pool(name="p", networks=[one, one], measures=CHEAP, **READ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("factory\nnets.py:a\n", "network 1 of .* has no `checkpoint`"),
        ("checkpoint\na.pt\n", "network 1 of .* has no `factory`, and no factory for all"),
        ("checkpoint,factory,normalisation\na.pt,n.py:a,half\n", "normalisation 'half' cannot be"),
    ],
)
def test_manifests_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        fg.Pool.from_manifest(tmp_path / "m.csv", **READ)


def test_the_command(runs: Path, monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(path) for path in sorted(runs.glob("*.pt"))]
    words = ["pool", f"{runs / 'nets.py'}:small", *files, "--data", "digits", "--samples", "60"]
    words += ["--test-samples", "40", "-m", "expected_sharpness", "--workers", "1"]
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 0, err
    assert "4 checkpoints, measured on all samples." in out
    assert f"report: {tmp_path / 'pool' / 'report.html'}" in out
    code, out, _ = call(monkeypatch, capsys, *words, "--resume", "--json")
    assert code == 0
    contents = json.loads(out)
    assert (contents["networks"], contents["counted"]) == (4, 4)
    code, _, err = call(monkeypatch, capsys, "pool", "--data", "digits")
    assert code == 2
    assert "name what makes the model and its checkpoints" in err


#: Networks of other people (the folder is not part of the project).
POOLS = Path(__file__).parents[2].parent / "shared" / "data" / "pools"

BLITZ = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5),
                         nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(),
                         nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
"""


@pytest.mark.slow
@pytest.mark.skipif(not POOLS.is_dir(), reason=f"needs the networks in {POOLS}")
def test_networks_of_other_people(tmp_path: Path) -> None:
    """Losses on CIFAR-10 agree with those of the index; measures and statistics are there."""
    folder = POOLS / "blitz_cifar10"
    entries = json.loads((folder / "index.json").read_text())[:6]
    (tmp_path / "blitz.py").write_text(BLITZ)
    layers = ("conv1", "conv2", "fc1", "fc2", "fc3")
    lines = []
    for entry in entries:
        weights = torch.load(folder / entry["file"], weights_only=True)
        # The same layers in a chain.
        names = dict(zip(layers, ("0", "3", "7", "9", "11"), strict=True))
        chain = {f"{names[key.split('.')[0]]}.{key.split('.')[1]}": weights[key] for key in weights}
        torch.save(chain, tmp_path / entry["file"])
        lines.append(
            {
                "checkpoint": entry["file"],
                "factory": "blitz.py:net",
                "normalisation": [entry["mean"], entry["std"]],
                "gap": entry["gap_loss"],
            }
        )
    (tmp_path / "index.json").write_text(json.dumps(lines))
    pool = fg.Pool.from_manifest(
        tmp_path / "index.json",
        data=f"cifar10:{POOLS.parent}",
        samples=1000,
        test_samples=2000,
        measured=200,
        measures=["rho_sum", "hessian_trace"],
        rescaling="units 1/10..10",
        target="gap",
    )
    found = pool.run(tmp_path / "pool")
    frame = found.to_frame()
    assert len(frame) == 6
    for (_, row), entry in zip(frame.iterrows(), entries, strict=True):
        # 2,000 of the 10,000 samples that the index is about.
        assert row["test_loss"] == pytest.approx(entry["test_loss"], rel=0.1)
    table = found.before_after
    assert table.loc["rho_sum", "largest_change"] < 1e-2
    assert table.loc["hessian_trace", "largest_change"] > 0.1
    assert found.correlations["count"].tolist() == [6, 6]
