"""What is shipped: one version, every file of the package, extras that exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import pytest

import flatgauge

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tracked(*places: str) -> list[str]:
    """Files under version control."""
    command = ["git", "ls-files", "--", *places]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("this is no checkout")
    return found.stdout.splitlines()


def test_the_version_is_stated_once():
    version = PROJECT["project"]["version"]
    assert flatgauge.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [version]
    code = [name for name in tracked("src") if name.endswith(".py")]
    assert [name for name in code if version in (ROOT / name).read_text()] == []


def test_every_file_of_the_package_is_shipped_and_no_other_kind():
    patterns = [*chain(*PROJECT["tool"]["setuptools"]["package-data"].values())]
    files = [name.removeprefix("src/flatgauge/") for name in tracked("src")]
    others = [name for name in files if not name.endswith(".py")]
    assert "py.typed" in others
    assert [name for name in others if not any(fnmatch(name, p) for p in patterns)] == []
    forms = {".css", ".html", ".js", ".json", ".npz", ".pyi", ".typed"}
    assert {Path(name).suffix for name in others} == forms
    folders = {str(Path(name).parent) for name in files if name.endswith(".py")}
    assert [f for f in folders if not (ROOT / "src/flatgauge" / f / "__init__.py").exists()] == []


def test_extras_that_are_named_exist():
    extras = set(PROJECT["project"]["optional-dependencies"])
    named = set()
    for name in tracked("src", "docs", "README.md"):
        if name.endswith((".py", ".md")):
            text = (ROOT / name).read_text(encoding="utf-8")
            for found in re.findall(r"flatgauge\[([a-z, ]+)\]", text):
                named |= set(found.replace(" ", "").split(","))
    assert {"hf", "lightning"} <= named <= extras
