"""What `path/to/file.py:name` and `package.module:name` stand for."""

import pickle
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn

from flatgauge.loading.models import build_model, call_factory, resolve


@pytest.fixture(autouse=True)
def _leave_no_modules():
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def write(name: str, source: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
        return path

    return write


MODEL = """
    from torch import nn

    def make_model(width=3):
        return nn.Linear(2, width)

    class Net(nn.Linear):
        def __init__(self):
            super().__init__(4, 5)

    ready = nn.Linear(6, 7)
    number = 3

    class Maker:
        @staticmethod
        def build():
            return nn.Linear(8, 9)
"""


@pytest.mark.parametrize(
    ("name", "shape"),
    [("make_model", (3, 2)), ("Net", (5, 4)), ("ready", (7, 6)), ("Maker.build", (9, 8))],
)
def test_a_model_from_a_file(write, name, shape):
    model = build_model(f"{write('model.py', MODEL)}:{name}")
    assert model.weight.shape == shape


def test_the_same_file_is_run_once_and_again_after_an_edit(write):
    path = write("model.py", MODEL)
    first = resolve(f"{path}:Net")
    assert resolve(f"{path}:Net") is first
    assert resolve(f"{path.parent}/../{path.parent.name}/model.py:Net") is first
    path.write_text("Net = 'edited'")
    assert resolve(f"{path}:Net") == "edited"


def test_a_relative_path_and_a_home(write, monkeypatch):
    path = write("model.py", MODEL)
    monkeypatch.chdir(path.parent)
    assert resolve("model.py:number") == 3
    assert resolve("./model.py:number") == 3
    monkeypatch.setenv("HOME", str(path.parent))
    assert resolve("~/model.py:number") == 3


def test_neighbours_can_be_imported_and_sys_path_is_left_alone(write):
    write("layers.py", "WIDTH = 11")
    path = write(
        "model.py",
        """
        import layers
        from torch import nn

        def early():
            return nn.Linear(1, layers.WIDTH)

        def late():
            import later
            return nn.Linear(1, later.WIDTH)
        """,
    )
    write("later.py", "WIDTH = 12")
    before, bytecode = list(sys.path), sys.dont_write_bytecode
    assert build_model(f"{path}:early").out_features == 11
    assert build_model(f"{path}:late").out_features == 12
    assert sys.path == before
    assert not list(path.parent.rglob("*.pyc"))
    assert sys.dont_write_bytecode == bytecode


def test_each_folder_gets_its_own_neighbours(write):
    """Two versions of one project, side by side: no file may run the other's code."""
    source = "import layers\n\ndef late():\n    import layers\n    return layers.WIDTH\n"
    write("old/layers.py", "WIDTH = 1")
    write("new/layers.py", "WIDTH = 2")
    old, new = write("old/model.py", source), write("new/model.py", source)
    for path, width in ((old, 1), (new, 2), (old, 1)):
        factory = resolve(f"{path}:late")
        assert factory.__globals__["layers"].WIDTH == width  # noqa: SIM300
        assert call_factory(f"{path}:late", factory) == width


def test_dataclasses_and_pickle_work(write):
    path = write(
        "model.py",
        """
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class Config:
            width: int = 3
        """,
    )
    config = resolve(f"{path}:Config")(5)
    assert pickle.loads(pickle.dumps(config)) == config


def test_an_odd_file_name(write):
    assert resolve(f"{write('my-model v2.py', MODEL)}:number") == 3


def test_a_module_of_the_current_folder(write, monkeypatch):
    path = write("project/nets/small.py", MODEL)
    monkeypatch.chdir(path.parents[1])
    before = list(sys.path)
    assert build_model("nets.small:make_model").out_features == 3
    assert sys.path == before


def test_an_installed_module():
    assert isinstance(build_model("torch.nn:ReLU"), nn.ReLU)
    assert resolve("torch.nn.functional:relu") is torch.nn.functional.relu


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("model.py", r"`model.py` has no colon; .*write `model.py:NAME`"),
        ("model", r"has no colon; needed is `path/to/file.py:NAME` or `package.module:NAME`"),
        ("model.py:", r"has '' behind the colon; needed is the name"),
        ("model.py:make()", r"has 'make\(\)' behind the colon"),
        ("my-model:make", r"has 'my-model' before the colon; .* ends in `.py`"),
        (":make", r"has '' before the colon"),
    ],
)
def test_a_reference_of_another_form(reference, message):
    with pytest.raises(ValueError, match=message):
        resolve(reference)


def test_a_missing_file_names_those_that_are_there(write):
    path = write("model.py", MODEL)
    message = r"modle.py` is not a file, seen from .* holds `model.py` \(did you mean `model.py`"
    with pytest.raises(FileNotFoundError, match=message):
        resolve(f"{path.parent}/modle.py:make_model")
    with pytest.raises(FileNotFoundError, match=r"write `.*model.py:\.\.\.`, with its ending"):
        resolve(f"{path.parent}/model:make_model")
    with pytest.raises(FileNotFoundError, match="check the path"):
        resolve(f"{path.parent}/nowhere/model.py:make_model")


def test_a_file_that_is_not_python(write):
    path = write("model.txt", MODEL)
    with pytest.raises(ValueError, match=r"does not end in `.py`"):
        resolve(f"{path}:make_model")


def test_a_missing_name_lists_what_the_file_defines(write):
    path = write("model.py", MODEL)
    message = r"asks for `make_modell`, .* defines `make_model`, `Net`, `ready`, `number`"
    with pytest.raises(AttributeError, match=message):
        resolve(f"{path}:make_modell")
    with pytest.raises(AttributeError, match=r"\(did you mean `make_model`\?\)"):
        resolve(f"{path}:make_modell")
    with pytest.raises(AttributeError, match=r"asks for `bild`, .* defines `build`"):
        resolve(f"{path}:Maker.bild")
    with pytest.raises(AttributeError, match="defines nothing public"):
        resolve(f"{write('empty.py', 'import torch')}:make_model")
    many = write("many.py", "\n".join(f"name_{n} = {n}" for n in range(20)))
    with pytest.raises(AttributeError, match=r"`name_7` and 12 more"):
        resolve(f"{many}:other")


def test_a_missing_module(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"no module `not_there` in .*name a file"):
        resolve("not_there.deep:make")
    with pytest.raises(ModuleNotFoundError, match=r"no module `torch.not_there`"):
        resolve("torch.not_there:make")


@pytest.mark.parametrize(
    ("source", "message", "cause"),
    [
        ("x = 1\ny = 1 / 0", r"ZeroDivisionError: division by zero \(.*model.py:2\)", None),
        (
            "import not_there_at_all",
            r"No module named 'not_there_at_all' \(.*model.py:1\)",
            None,
        ),
        ("def f(:\n  pass", r"SyntaxError: .* \(.*model.py:1\)", SyntaxError),
        ("import sys\n\nsys.exit(3)", r"SystemExit: 3 \(.*model.py:3\)", SystemExit),
        (
            "import torch\ntorch.zeros(2) @ torch.zeros(3)",
            r"RuntimeError: .*model.py:2\)",
            None,
        ),
        ("import json\njson.loads('{')", r"JSONDecodeError: .*model.py:2\)", None),
    ],
)
@pytest.mark.parametrize("form", ["file", "module"])
def test_an_error_in_the_users_code_says_where(write, monkeypatch, form, source, message, cause):
    path = write("pack/model.py", source)
    monkeypatch.chdir(path.parents[1])
    before = set(sys.modules)
    with pytest.raises(ImportError, match=message) as caught:
        resolve(f"{path}:make" if form == "file" else "pack.model:make")
    assert isinstance(caught.value.__cause__, cause or Exception)
    assert not any("flatgauge_user" in name for name in set(sys.modules) - before)


def test_an_error_in_a_neighbour_names_the_neighbour(write):
    write("layers.py", "\n\nwidth = undefined")
    path = write("model.py", "import layers")
    with pytest.raises(ImportError, match=r"name 'undefined' is not defined \(.*layers.py:3\)"):
        resolve(f"{path}:make")


def test_interrupting_an_import_is_not_an_error_of_the_code(write):
    path, before = write("model.py", "raise KeyboardInterrupt"), set(sys.modules)
    with pytest.raises(KeyboardInterrupt):
        resolve(f"{path}:make")
    assert set(sys.modules) == before


FACTORIES = """
    from torch import nn

    def needs(width, depth, *, bias, more=1):
        return nn.Linear(width, depth)

    def forgets():
        nn.Linear(1, 1)

    def gives_class():
        return nn.ReLU

    def gives_pair():
        return nn.ReLU(), 3

    def fails():
        return nn.Linear(1, -1)

    number = 3
"""


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "needs",
            TypeError,
            r"needs the arguments `width`, `depth`, `bias`; .*needs\(\.\.\.\)`",
        ),
        ("forgets", TypeError, r"returned `NoneType`; a model is needed: return the"),
        ("gives_class", TypeError, r"returned class `ReLU`; .* return an instance: `ReLU\(\)`"),
        ("gives_pair", TypeError, r"returned `tuple`; .* and nothing else"),
        ("number", TypeError, r"is of type `int`; a model is needed: name a function or class"),
        ("fails", RuntimeError, r":fails` failed: .* \(.*model.py:17\)"),
    ],
)
def test_a_factory_that_makes_no_model(write, name, error, message):
    with pytest.raises(error, match=message):
        build_model(f"{write('model.py', FACTORIES)}:{name}")


def test_a_class_that_needs_arguments():
    with pytest.raises(TypeError, match=r"`in_features`, `out_features`; .*Linear\(\.\.\.\)`"):
        build_model("torch.nn:Linear")
