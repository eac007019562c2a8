"""Landscapes that are interrupted, and continued."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from cases import build
from torch import nn

import flatgauge as fg
from flatgauge import LossSurface
from flatgauge.analysis.landscapes import checkpoint, evaluate
from flatgauge.analysis.landscapes.checkpoint import LandscapeCheckpoint
from flatgauge.analysis.landscapes.evaluate import Evaluator
from flatgauge.surface.examples import bowl


def surface(**options) -> LossSurface:
    case = build("mlp")
    return LossSurface(case.model, "cross_entropy", (case.inputs, case.targets), **options)


@pytest.fixture
def counted(monkeypatch):
    """Every point that is evaluated, in its order."""
    points: list[torch.Tensor] = []
    call = Evaluator.__call__

    def counting(self, some, **options):
        points.extend(some)
        return call(self, some, **options)

    monkeypatch.setattr(Evaluator, "__call__", counting)
    monkeypatch.setattr(evaluate, "_MOST_STACKED", 4)
    monkeypatch.setattr(evaluate, "_MOST", 4)
    return points


class Stop:
    """Ends a run after so many calls, as a user would."""

    def __init__(self, calls: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.calls, self.error = calls, error

    def __call__(self, name: str, done: int, total: int) -> None:
        self.calls -= 1
        if not self.calls:
            raise self.error


SETTINGS = {"space": "weights", "points": 5, "seed": 3}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_interrupted_goes_on(tmp_path, counted, error):
    path = tmp_path / "landscape.npz"
    whole = fg.landscape(surface(), **SETTINGS)
    assert len(counted) == 25
    counted.clear()
    with pytest.raises(error):
        fg.landscape(surface(), **SETTINGS, save=path, progress=Stop(4, error))
    first = len(counted)
    assert 0 < first < 25
    found = fg.landscape(surface(), **SETTINGS, save=path)
    assert len(counted) == 25  # none twice
    assert len({tuple(point.tolist()) for point in counted}) == 25
    assert found.loss.tobytes() == whole.loss.tobytes()
    assert found.accuracy.tobytes() == whole.accuracy.tobytes()
    assert [file.name for file in tmp_path.iterdir()] == ["landscape.npz"]  # no drafts left


def test_a_finished_file_is_read_and_nothing_computed(tmp_path, counted):
    path = tmp_path / "landscape.npz"
    one = fg.landscape(surface(), **SETTINGS, save=path)
    counted.clear()
    other = fg.landscape(surface(), **SETTINGS, save=path)
    assert not counted
    assert (one.loss == other.loss).all()


def test_several_models_in_one_file(tmp_path, counted):
    path = tmp_path / "landscape.npz"
    both = {"a": bowl([1.0, 2.0]), "b": bowl([3.0, 1.0])}
    told = []
    with pytest.raises(KeyboardInterrupt):
        fg.landscape(both, **SETTINGS, save=path, progress=Stop(12))
    first = len(counted)
    assert first > 25  # within the second model
    found = fg.landscape(both, **SETTINGS, save=path, progress=lambda *words: told.append(words))
    assert len(counted) == 50
    assert told[0] == ("a", first, 50)
    assert told[-1] == ("b", 50, 50)
    assert (found["b"].loss == fg.landscape(both["b"], **SETTINGS).loss).all()


def test_finished_points_are_on_disk_while_it_runs(tmp_path, counted, monkeypatch):
    monkeypatch.setattr("flatgauge.analysis.landscapes.checkpoint._PAUSE", 0.0)
    path = tmp_path / "landscape.npz"
    seen = []

    def look(name, done, total):
        with np.load(path) as held:
            seen.append((done, int(held["done 0"].sum())))

    fg.landscape(surface(), **SETTINGS, save=path, progress=look)
    assert seen
    assert all(done == kept for done, kept in seen)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 4}, "it differs in seed; give another name"),
        ({"points": 7}, "differs in points"),
        ({"extent": 2.0}, "differs in extent"),
        ({"space": "layers"}, "differs in sigma, space"),
        ({"sigma": 0.1}, "differs in sigma"),
    ],
)
def test_other_settings_are_not_mixed(tmp_path, changed, message):
    path = tmp_path / "landscape.npz"
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False).double()
    other = LossSurface(model, "mse", (torch.eye(2).double(), torch.zeros(2, 1).double()))
    fg.landscape(other, space="weights", points=3, save=path)
    with pytest.raises(ValueError, match=message):
        fg.landscape(other, **{"space": "weights", "points": 3, "save": path, **changed})


def test_other_models_and_data_are_not_mixed(tmp_path):
    path = tmp_path / "landscape.npz"
    case = build("mlp")
    settings = {"space": "weights", "points": 3, "save": path}
    fg.landscape(case.surface(), **settings)
    data = (case.inputs + 1e-9, case.targets)
    with pytest.raises(ValueError, match="differs in data of the model;"):
        fg.landscape(LossSurface(case.model, case.loss, data), **settings)
    with pytest.raises(
        ValueError, match="differs in value of the model, weight_decay of the model;"
    ):
        fg.landscape(case.surface(weight_decay=1.0), **settings)
    with pytest.raises(ValueError, match="differs in data of a, data of the model"):
        fg.landscape({"a": case.surface()}, **settings)
    next(case.model.parameters()).data[0] += 1e-9
    with pytest.raises(ValueError, match="differs in weights of the model;"):
        fg.landscape(case.surface(), **settings)


def test_other_ends_are_not_mixed(tmp_path):
    path = tmp_path / "landscape.npz"
    one, other = ({"weight": torch.full((1, 2), value)} for value in (1.0, 2.0))
    fg.landscape(bowl([1.0, 2.0]), to=one, points=3, save=path)
    with pytest.raises(ValueError, match="differs in to of the model;"):
        fg.landscape(bowl([1.0, 2.0]), to=other, points=3, save=path)


def test_chunks_are_not_part_of_the_data(tmp_path):
    path = tmp_path / "landscape.npz"
    fg.landscape(surface(chunk=3), **SETTINGS, save=path)
    fg.landscape(surface(), **SETTINGS, save=path)


def test_files_of_others_are_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(ValueError, match="exists, but is not the file of a landscape"):
        fg.landscape(bowl([1.0]), space="weights", points=3, save=path)
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    with pytest.raises(ValueError, match="exists, but is not the file of a landscape"):
        fg.landscape(bowl([1.0]), space="weights", points=3, save=tmp_path / "other.npz")
    assert path.read_text() == "dear diary"


def test_a_folder_that_is_not_there_is_told_before_anything_is_computed(tmp_path, counted):
    with pytest.raises(FileNotFoundError):
        fg.landscape(bowl([1.0]), space="weights", points=3, save=tmp_path / "no" / "a.npz")
    assert not counted


def test_a_bar_goes_to_stderr(capsys):
    fg.landscape(bowl([1.0]), space="weights", dims=1, points=3, progress=True)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("damage", ["array", "missing", "shape", "settings", "cut"])
def test_damaged_files_are_refused(tmp_path, damage):
    """One line that says what to do, whatever is wrong; the file is left as it is."""
    path = tmp_path / "a.npz"
    settings = {"space": "weights", "dims": 1, "points": 3}
    fg.landscape(bowl([1.0]), **settings, save=path)
    with np.load(path) as file:
        held = dict(file)
    if damage == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        held.pop("loss 0") if damage == "missing" else None
        held |= {"loss 0": np.zeros(4)} if damage == "shape" else {}
        held |= {"settings": np.array("[1]")} if damage == "settings" else {}
        np.savez(path, **held)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"or is damaged .* remove the file to start again"):
        fg.landscape(bowl([1.0]), **settings, save=path)
    assert path.read_bytes() == before


def test_a_home_folder_and_long_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "a" * 250 + ".npz"
    fg.landscape(bowl([1.0]), space="weights", dims=1, points=3, save=f"~/{name}")
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
def test_a_device_is_not_read():
    with pytest.raises(OSError, match="`/dev/full` cannot be written: the disk is full"):
        LandscapeCheckpoint("/dev/full", {}, (2,), 1)


def test_a_full_disk_half_way_ends_nothing(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_PAUSE", -1.0)
    with LandscapeCheckpoint(tmp_path / "x.npz", {}, (2,), 1) as kept:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse)
            kept.save()
        kept.parts[0].done[0] = True
    assert LandscapeCheckpoint(tmp_path / "x.npz", {}, (2,), 1).points_done == 1
