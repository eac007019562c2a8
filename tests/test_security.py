"""What SECURITY.md says of the source: nothing that is read can run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = {path: ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")}

#: Where pickles are read: arrays of CIFAR-10, and what trusted processes send each other.
UNPICKLING = {"loading/files.py", "runtime/distributed.py"}
#: Modules that open connections, or run text as code.
NETWORK = {"urllib", "requests", "http", "ftplib", "httpx", "aiohttp", "webdriver"}


def calls(name: str):
    """All calls of a function or method of this name, with their places."""
    for path, tree in SOURCE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                yield path.relative_to(ROOT / "src/flatgauge").as_posix(), node


def test_files_are_read_as_data():
    for name, option in (("torch.load", "weights_only=True"), ("np.load", "allow_pickle=False")):
        found = list(calls(name))
        assert found
        for path, call in found:
            assert option in [ast.unparse(keyword) for keyword in call.keywords], path


def test_pickles_are_read_in_known_places_only():
    readers = ("pickle.load", "pickle.loads", "super().load", "joblib.load", "dill.load")
    places = {path for name in readers for path, _ in calls(name)}
    assert {place for place in places if not place.startswith("studies/")} <= UNPICKLING


def test_no_text_is_run_and_nothing_is_downloaded():
    assert not [path for name in ("eval", "exec", "os.system") for path, _ in calls(name)]
    for path, tree in SOURCE.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                assert not NETWORK & {name.split(".")[0] for name in names}, path


def test_the_tests_that_are_named_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text()))
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert named <= set(re.findall(r"^def (test_\w+)", code, re.MULTILINE))
