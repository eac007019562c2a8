"""The folder of a pool: who declares it, and what is said of what does not belong there."""

from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from filelock import FileLock
from small_studies import tiny_study

from flatgauge.studies import PoolResult
from flatgauge.studies.store import PoolStore

SMALL = {"factors": {"batch": [8, 32]}, "seeds": 1, "measures": ["expected_sharpness"]}


def test_of_two_that_begin_at_once_one_declares_the_pool(tmp_path: Path) -> None:
    mine, other = tiny_study(), tiny_study(measured=30)
    (tmp_path / "locks").mkdir()
    with FileLock(tmp_path / "locks" / "pool.json") as held, ThreadPoolExecutor(1) as threads:
        store = PoolStore(tmp_path)
        beginning = threads.submit(store.open, other.declaration(), resume=True)
        while not (tmp_path / "models").exists():
            time.sleep(0.01)
        time.sleep(0.1)  # It waits now, or will: either way it finds the declaration below.
        (tmp_path / "pool.json").write_text(json.dumps(mine.declaration()))
        held.release()
        with pytest.raises(ValueError, match="holds another pool: it differs in measured"):
            beginning.result(timeout=60)
    assert PoolResult.read(tmp_path).pool.runs() == mine.runs()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    tiny_study(**SMALL).run(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of a finished study of two networks."""
    import shutil

    return shutil.copytree(whole, tmp_path / "study")


@pytest.mark.parametrize(
    "contents", [b"", b"123456789", safetensors.torch.save({"a": torch.ones(2)})]
)
def test_a_damaged_network_is_named_with_what_to_do(contents: bytes, folder: Path) -> None:
    study = tiny_study(**SMALL)
    file = next((folder / "models").glob("*.*"))
    (folder / "rows.jsonl").unlink()
    file.write_bytes(contents)
    with pytest.raises(ValueError, match=r"models/.*safetensors` is no network .* trained again"):
        study.run(folder, resume=True)
    file.unlink()
    assert len(study.run(folder, resume=True).rows) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b"[]",
            "line 2 of `.*rows.jsonl` is not the row of a network; delete that line and resume",
        ),
        (b'{"name": "a"}', "line 2 of .* is not the row of a network; .* is measured again"),
    ],
)
def test_a_line_that_is_no_row_is_named(line: bytes, message: str, folder: Path) -> None:
    rows = folder / "rows.jsonl"
    first, second = rows.read_bytes().splitlines()
    rows.write_bytes(b"\n".join([first, line, second, b""]))
    with pytest.raises(ValueError, match=message):
        tiny_study(**SMALL).run(folder, resume=True)


@pytest.mark.parametrize("left", [1, 40, -1])
def test_half_a_line_is_done_again_and_its_writer_ends_it(left: int, folder: Path) -> None:
    rows = folder / "rows.jsonl"
    before = rows.read_bytes().splitlines()
    rows.write_bytes(before[0] + b"\n" + before[1][:left])
    found = tiny_study(**SMALL).run(folder, resume=True)
    assert len(found.rows) == 2
    after = rows.read_bytes().splitlines()
    assert after[0] == before[0]
    assert after[1] == before[1][:left]
    assert json.loads(after[2])["name"] == json.loads(before[1])["name"]


def test_a_damaged_declaration_is_named(folder: Path) -> None:
    (folder / "pool.json").write_text("[]")
    with pytest.raises(ValueError, match=r"pool.json` is damaged .* name another folder, or delet"):
        tiny_study(**SMALL).run(folder, resume=True)


def test_the_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("{}")
    for work in (lambda: tiny_study().run(tmp_path), lambda: PoolResult.read(tmp_path)):
        with pytest.raises(ValueError, match=r"was written by flatgauge 0.1, .* in another folder"):
            work()


def test_a_pool_needs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file; name a folder for the pool"):
        tiny_study().run(tmp_path / "file")


@pytest.mark.parametrize(("owner", "name"), [(Path, "mkdir"), (os, "open")])
def test_a_folder_on_a_read_only_disk_is_named_with_what_to_do(
    owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **words: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(OSError, match=r"cannot be written: the disk is read-only; name a file"):
        PoolStore(tmp_path / "study").open(tiny_study().declaration(), resume=False)


def test_rows_and_networks_of_something_else_are_noticed(folder: Path, tmp_path: Path) -> None:
    study = tiny_study(**SMALL)
    tiny_study(**SMALL, measured=30).run(tmp_path / "other")  # The same, on fewer samples.
    rows, own = folder / "rows.jsonl", (folder / "rows.jsonl").read_bytes()
    other = (tmp_path / "other" / "rows.jsonl").read_bytes().splitlines(keepends=True)[0]
    rows.write_bytes(own + other)
    for read in (lambda: study.run(folder, resume=True), lambda: PoolResult.read(folder)):
        with pytest.raises(ValueError, match=r"line 3 .* is a row of another pool, measured in"):
            read()
    # Also where the study has no such network any more.
    with pytest.raises(ValueError, match="is a row of another pool"):
        tiny_study(**SMALL | {"factors": {"batch": [32]}}).run(folder, resume=True)
    rows.write_bytes(own)
    assert (
        len(tiny_study(**SMALL | {"factors": {"batch": [32]}}).run(folder, resume=True).rows) == 1
    )
    rows.unlink()
    first, second = (folder / "models" / f"{name}.safetensors" for name in study.runs())
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=r"is no network of this study .it was trained by another"):
        study.run(folder, resume=True)


@pytest.mark.parametrize("name", ["a/b", "", "x" * 201])
def test_names_that_cannot_be_names_of_files(name: str) -> None:
    from flatgauge.studies.store import check_names

    with pytest.raises(ValueError, match="cannot name a network: its lock is a file"):
        check_names([name])
