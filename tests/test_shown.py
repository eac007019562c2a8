"""What README and pages show is true: examples run, commands exist, tables are of today."""

from __future__ import annotations

import re
import runpy
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer

from flatgauge.cli import app
from flatgauge.measures import registry

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

#: Blocks that need more than a page has, by their titles, and the test that runs the same calls.
ELSEWHERE = {
    "PyHessian": "test_coming_from.py",
    "curvlinops": "test_coming_from.py",
    "Lightning": "analysis/test_integrations.py",
    "Hugging Face": "analysis/test_integrations.py",
    "Several processes": "runtime/test_processes.py",
    "Ray": "studies/test_ray.py",
}

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fences(path):
    return [(kind.strip(), body) for kind, body in _FENCE.findall(path.read_text())]


def command_lines(path):
    """Every command in a fence, continued lines joined, and every one in a line of text."""
    text = path.read_text()
    for kind, body in fences(path):
        if kind in ("", "sh", "shell"):
            for line in body.replace("\\\n", " ").splitlines():
                yield line.removeprefix("$ ").partition("   #")[0].partition(" # ")[0].strip()
    yield from re.findall(r"`((?:flatgauge|make) [^`]+)`", _FENCE.sub("", text).replace("\n", " "))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_block_of_python_is_run(path):
    for kind, body in fences(path):
        title = re.search(r'title="(.*?)"', kind)
        if title:
            runner = (ROOT / "tests" / ELSEWHERE[title[1]]).read_text()
            for name in re.findall(r"^from flatgauge\S* import (\w+)", body, re.MULTILINE):
                assert name in runner, f"`{name}` is not run by {ELSEWHERE[title[1]]}:\n{body}"
        elif kind.startswith("python"):
            assert body.startswith(">>> "), f"not run by doctest:\n{body}"
        else:
            assert ">>>" not in body, f"an example without a language:\n{body}"


@cache
def commands():
    found = typer.main.get_command(app)
    return found, found.make_context("flatgauge", ["catalogue"])


def check(line):
    """Parse a command as the command line would; raises what it would raise."""
    # Places to be filled in; what is left out ("...") may be required.
    words = shlex.split(re.sub(r"\[(\w+)\]", r"\1", line))[1:]
    group, context = commands()
    if words[0] in ("COMMAND", "--version", "--help", "--install-completion"):
        return
    command = group.get_command(context, words[0])
    assert command is not None, f"there is no command `{words[0]}`"
    try:
        command.make_context(
            words[0], [word for word in words[1:] if word != "..."], parent=context
        )
    except Exception as error:  # Which click it is that typer raises from depends on its version.
        if type(error).__name__ not in ("MissingParameter", "Exit"):
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        assert "..." in words or len(words) == 1 or "--help" in words, f"incomplete: {line}"
    for k, word in enumerate(words):
        if word == "-m":
            assert words[k + 1].partition(":")[0].removeprefix("balanced:") in {
                item.name for item in registry
            }


def test_commands_on_pages_can_be_typed():
    seen = 0
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in PAGES:
        for line in command_lines(path):
            if line.startswith("flatgauge "):
                try:
                    check(line)
                except (ValueError, AssertionError) as error:
                    raise AssertionError(f"{path.name}: `{line}`: {error}") from error
                seen += 1
            elif line.startswith("make "):
                assert line.split()[1] in targets, f"{path.name}: `{line}`"
                seen += 1
    assert seen > 40


def test_a_wrong_command_would_be_seen():
    with pytest.raises(AssertionError, match="NoSuchOption"):
        check("flatgauge measure nets.py:lenet --data digits --no-such-option")
    with pytest.raises(AssertionError, match="no command"):
        check("flatgauge mesure nets.py:lenet")
    with pytest.raises(AssertionError, match="incomplete"):
        check("flatgauge measure nets.py:lenet --limit 5")


def test_extras_on_pages_exist():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    assert {"docs", "dev"} <= extras
    for path in PAGES:
        for names in re.findall(r"(?:flatgauge|\.)\[([\w,]+)\]", path.read_text()):
            assert set(names.split(",")) <= extras, path.name


def readme_rows(heading):
    """The cells of the table that follows a heading, row by row, without its head."""
    section = (ROOT / "README.md").read_text().partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_readme_has_every_claim_of_every_measure():
    columns = ("layerwise", "nodewise", "permutation", "output_scale", "branches")
    claims = {}
    for names, geometry, *ticks in readme_rows("What is measured"):
        invariant = {group for group, tick in zip(columns, ticks, strict=True) if tick}
        claims |= dict.fromkeys(re.findall(r"`(\w+)`", names), (geometry, invariant))
    assert claims == {m.name: (m.geometry, m.invariant_to & set(columns)) for m in registry}


def test_readme_has_the_costs_of_the_performance_page():
    measured = (ROOT / "docs/performance.md").read_text().splitlines()
    quantities = ("product", "trace", "top eigenvalue", "layers' top eigenvalues")
    for quantity, row in zip(quantities, readme_rows("What it costs"), strict=True):
        lines = [line for line in measured if f"| {quantity} |" in line]
        for workload, ours, other in (("W1", row[1], row[2]), ("W2", row[3], row[4])):
            number, tool = other[:-1].split(" (")
            here = [line for line in lines if line.startswith(f"| {workload} ")]
            assert any("flatgauge" in line and f" {ours.strip('*')} " in line for line in here), row
            assert any(tool in line and f" {number} " in line for line in here), row


def test_readme_takes_a_minute():
    prose = re.sub(
        r"^\|.*$", "", _FENCE.sub("", (ROOT / "README.md").read_text()), flags=re.MULTILINE
    )
    assert len(prose.split()) < 330
    assert "make demo" in (ROOT / "README.md").read_text()


def test_the_picture_shows_what_the_run_gives():
    script = runpy.run_path(str(ROOT / "docs/figures/rescaled.py"))
    drawn = script["numbers_in"](ROOT / "docs/figures/rescaled.png")
    assert drawn["change of outputs"] == 0
    for name in script["STILL"]:
        assert len(set(drawn["values"][name])) == 1, name
    ends = script["RANGES"][0], script["RANGES"][-1]
    found = script["numbers"](ends)
    for name, values in found["values"].items():
        expected = [drawn["values"][name][0], drawn["values"][name][-1]]
        assert values == pytest.approx(expected, rel=0.25), name
    first, *_, last = drawn["values"]["hessian_trace"]
    assert round(first) == 80  # As README says: from 80 to ten million.
    assert 0.5e7 < last < 2e7


def test_the_drawing_is_of_the_paths_there_are(tmp_path):
    script = runpy.run_path(str(ROOT / "docs/figures/basis_paths.py"))
    paths = script["draw"](tmp_path / "paths.svg")
    assert (paths.m, paths.hidden, len(paths)) == (21, 6, 15)
    now, kept = (
        set(re.findall(r"<!-- (.*?) -->", (folder / name).read_text()))
        for folder, name in ((tmp_path, "paths.svg"), (ROOT / "docs/figures", "basis_paths.svg"))
    )
    assert now == kept, "run `python docs/figures/basis_paths.py`"
    assert any("v = " in text for text in now)
