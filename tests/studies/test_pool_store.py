"""A study's folder: who declares it, and what is said of files that do not belong there."""

from __future__ import annotations

import builtins
import errno
import fcntl
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from small_studies import tiny_study

import flatgauge as fg
from flatgauge.studies.store import Store


def test_of_two_that_begin_at_once_one_declares_the_study(tmp_path: Path) -> None:
    mine, other = tiny_study(), tiny_study(measured=30)
    lock = tmp_path / "locks" / "study.json"
    lock.parent.mkdir()
    with open(lock, "w") as held, ThreadPoolExecutor(1) as threads:
        fcntl.flock(held, fcntl.LOCK_EX)
        beginning = threads.submit(Store(tmp_path).open, other.declaration(), resume=True)
        while not (tmp_path / "rows").exists():
            time.sleep(0.01)
        time.sleep(0.1)  # It waits now, or will: either way it finds the study below.
        (tmp_path / "study.json").write_text(json.dumps(mine.declaration()))
        fcntl.flock(held, fcntl.LOCK_UN)
        with pytest.raises(ValueError, match="holds another study: it differs in measured"):
            beginning.result(timeout=60)
    assert fg.Findings.read(tmp_path).study.runs() == mine.runs()


FOREIGN = safetensors.torch.save({"a": torch.ones(2)})


@pytest.mark.parametrize(
    ("part", "contents", "told"),
    [
        ("models", b"", r"models/.*safetensors` is no network .* delete it and resume"),
        ("models", b"123456789", r"is no network .* the network is trained again"),
        ("models", FOREIGN, r"is no network .* the network is trained again"),
        ("rows", b"", r"rows/.*json` is damaged .* the network is measured again"),
        ("rows", b'{"run": "a"', "is damaged .* delete it and resume"),
        ("rows", b"{}", "is damaged .*something is missing"),
        ("", b"[]", r"study.json` is damaged .* name another folder, or delete it and resume"),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(
    part: str, contents: bytes, told: str, tmp_path: Path
) -> None:
    study = tiny_study(factors={"batch": [16]}, seeds=1, measures=["expected_sharpness"])
    study.run(tmp_path)
    file = next((tmp_path / part).glob("*.*"))
    if part == "models":
        next((tmp_path / "rows").glob("*.json")).unlink()
    file.write_bytes(contents)
    with pytest.raises(ValueError, match=told):
        study.run(tmp_path, resume=True)
    file.unlink()
    assert len(study.run(tmp_path, resume=True).rows) == 1


def test_a_study_needs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file; name a folder for the study"):
        tiny_study().run(tmp_path / "file")


@pytest.mark.parametrize(("owner", "name"), [(Path, "mkdir"), (builtins, "open")])
def test_a_folder_on_a_read_only_disk_is_named_with_what_to_do(
    owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **words: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(OSError, match=r"cannot be written: the disk is read-only; name a file"):
        Store(tmp_path / "study").open(tiny_study().declaration(), resume=False)


def test_a_row_or_network_of_another_run_is_noticed(tmp_path: Path) -> None:
    study = tiny_study(factors={"batch": [8, 32]}, seeds=1, measures=["expected_sharpness"])
    study.run(tmp_path / "a")
    one, other = (tmp_path / "a" / "rows" / f"{run}.json" for run in study.runs())
    own = one.read_bytes()
    one.write_bytes(other.read_bytes())
    for read in (
        lambda: study.run(tmp_path / "a", resume=True),
        lambda: fg.Findings.read(tmp_path / "a"),
    ):
        with pytest.raises(ValueError, match=r"is the row of another run, `batch-32.*delete it"):
            read()
    one.write_bytes(own)
    # The same run, but measured on fewer samples.
    similar = tiny_study(
        factors={"batch": [8, 32]}, seeds=1, measures=["expected_sharpness"], measured=30
    )
    similar.run(tmp_path / "b")
    one.write_bytes((tmp_path / "b" / "rows" / one.name).read_bytes())
    with pytest.raises(ValueError, match="is a row of another study, measured in another way"):
        study.run(tmp_path / "a", resume=True)
    one.unlink()
    networks = tmp_path / "a" / "models"
    mine, others = (networks / f"{run}.safetensors" for run in study.runs())
    mine.write_bytes(others.read_bytes())
    with pytest.raises(ValueError, match=r"is no network of this study .it was trained by another"):
        study.run(tmp_path / "a", resume=True)
    mine.unlink()
    assert study.run(tmp_path / "a", resume=True).to_frame().shape[0] == 2
    assert "study" in json.loads(one.read_text())


def test_a_row_that_no_run_has_is_noticed_if_it_is_of_another_study(tmp_path: Path) -> None:
    wide = tiny_study(factors={"batch": [8, 32]}, seeds=1, measures=["expected_sharpness"])
    wide.run(tmp_path / "a")
    narrow = tiny_study(factors={"batch": [8]}, seeds=1, measures=["expected_sharpness"])
    assert len(narrow.run(tmp_path / "a", resume=True).rows) == 1  # It had more runs before.
    place = next((tmp_path / "a" / "rows").glob("batch-32*.json"))
    place.write_text(json.dumps(json.loads(place.read_text()) | {"study": "0123456789abcdef"}))
    with pytest.raises(ValueError, match=r"batch-32.* is a row of another study; move it out"):
        narrow.run(tmp_path / "a", resume=True)
