"""What is asked before a study runs on Ray: words, address, code to carry. No cluster is needed."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import call
from small_studies import tiny_study

from flatgauge.loading.models import call_factory as call_code
from flatgauge.loading.models import resolve
from flatgauge.studies import RayEngine
from flatgauge.studies.carried_code import carried_code, unpacked
from flatgauge.studies.ray_address import check_address
from flatgauge.studies.ray_task import Failed, Job, complete_far_away


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cpus": 0}, "`cpus=0` must be a finite number above 0"),
        ({"cpus": 1.5}, r"`cpus=1.5` must be a whole number, or below 1"),
        ({"gpus": -1}, "`gpus=-1` must be a finite number of at least 0"),
        ({"wait": float("inf")}, "`wait=inf` must be a finite number above 0"),
        ({"retries": 1.0}, r"`retries=1.0` must be a whole number of at least 0"),
        ({"memory": "much"}, "`memory='much'` is not an amount of memory"),
    ],
)
def test_what_a_task_needs_is_checked(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RayEngine(**options)


def test_engines_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`engine='dask'` is unknown; use 'local' or 'ray', or a"):
        tiny_study().run(tmp_path, engine="dask")
    with pytest.raises(ValueError, match="`workers=2` are processes of this machine; on Ray as"):
        tiny_study().run(tmp_path, engine="ray", workers=2)


def test_ray_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r'run `pip install "flatgauge\[ray\]"` here'):
        tiny_study().run(tmp_path, engine="ray")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "dask"], "`--engine dask` is unknown; use local or ray."),
        (["--address", "auto"], "`--address` is for Ray; add `--engine ray`, or leave it out."),
        (["--task-cpus", "2"], "`--task-cpus` is for Ray; add `--engine ray`, or leave it out."),
        (["--engine", "ray", "--workers", "2"], "`--workers 2` are processes of this machine;"),
        (["--engine", "ray", "--task-cpus", "0"], "`cpus=0.0` must be a finite number above 0."),
        (["--engine", "ray", "--address", "here"], "`address='here'` is no address of a Ray"),
    ],
)
def test_words_that_do_not_go_together(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
) -> None:
    if "--address" in words and "--engine" in words:
        pytest.importorskip("ray", reason='needs Ray: pip install "flatgauge[ray]"')
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, "study", "rescaling", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {told}")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_nobody_answers(listener: socket.socket) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConnectionError, match=r"within 0.3 s \(no answer\); see that it runs"):
        check_address(address, 0.3)
    listener.close()
    with pytest.raises(ConnectionError, match=f"no Ray cluster answers at `{address}` .*refused"):
        check_address(address, 0.3)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"", False),
        (bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), True),
    ],
)
def test_something_answers(listener: socket.socket, answer: bytes, right: bool) -> None:
    def serve() -> None:
        line, _ = listener.accept()
        with line:
            line.recv(100)
            line.sendall(answer)

    server = threading.Thread(target=serve)
    server.start()
    address = f"ray://127.0.0.1:{listener.getsockname()[1]}"
    if right:
        check_address(address, 0.1)
    else:
        with pytest.raises(ConnectionError, match="what answers there is not Ray"):
            check_address(address, 0.1)
    server.join()


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_file_takes_along_what_it_imports(tmp_path: Path) -> None:
    home = write(
        tmp_path,
        nets="import math, layers\ndef number(): import kit.deep; return kit.deep.x + layers.y",
        layers="from torch import nn\nimport more\ny = more.y",
        more="y = 1",
        kit__deep="from . import deeper\nx = deeper.x",
        kit__deeper="x = 40",
        other="raise RuntimeError",
    )
    code = carried_code(f"{home / 'nets.py'}:number")
    assert code is not None
    assert set(code.files) == {"nets.py", "layers.py", "more.py", "kit/deep.py", "kit/deeper.py"}
    home.rename(home.with_name("gone"))
    with unpacked(code):
        assert call_code(code.reference, resolve(code.reference)) == 41
    with pytest.raises(FileNotFoundError, match="is not a file"):
        resolve(code.reference)


def test_a_module_of_the_current_folder_is_carried_and_its_newest_form_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(tmp_path / "home", my_kit__deep__nets="x = 1"))
    old = carried_code("my_kit.deep.nets:x")
    write(tmp_path / "home", my_kit__deep__nets="x = 22")
    new = carried_code("my_kit.deep.nets:x")
    assert old is not None
    assert new is not None
    monkeypatch.chdir(tmp_path)
    for code, value in ((old, 1), (new, 22), (old, 1)):
        with unpacked(code):
            assert resolve("my_kit.deep.nets:x") == value
        assert "my_kit" not in sys.modules
    assert carried_code("math:sqrt") is None
    assert carried_code("no/such/file.py:net") is None


def test_code_that_cannot_be_read_is_told_where_it_runs(tmp_path: Path) -> None:
    code = carried_code(f"{write(tmp_path, nets='def net(:') / 'nets.py'}:net")
    with unpacked(code), pytest.raises(ImportError, match=r"SyntaxError: .*nets\.py:1\)"):
        resolve(code.reference)


def test_another_version_is_refused() -> None:
    study = tiny_study()
    job = Job(run=next(iter(study.runs())), model=None, code=None, threads=1, version="0.0.1")
    (failed,) = complete_far_away(study, None, job)
    assert isinstance(failed, Failed)
    with pytest.raises(ImportError, match=r"and the study is run by 0\.0\.1; install the same"):
        raise failed.error
