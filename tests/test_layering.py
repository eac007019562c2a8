"""Imports point downwards only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import flatgauge

ROOT = Path(flatgauge.__file__).parent

#: From the ground up; a package may import only from those above its own line.
PACKAGES = (
    "runtime",
    "estimators",
    "graph",
    "loading",
    "surface",
    "curvature",
    "symmetry",
    "geometry",
    "measures",
    "analysis",
    "studies",
    "report",
    "cli",
)
HEIGHT = {name: height for height, name in enumerate(PACKAGES)}

#: Records show themselves (`plot`, `to_html`, `repr`): they import the presentation when asked.
LAZY_UPWARD = {
    "analysis.certificate -> report.tables",
    "analysis.certificate -> report.views.certificate",
    "analysis.comparison -> report.page",
    "analysis.comparison -> report.plots.bars",
    "analysis.comparison -> report.tables",
    "analysis.comparison -> report.views.comparison",
    "analysis.landscapes.result -> report.plots.style",
    "analysis.landscapes.result -> report.plots.landscape",
    "analysis.landscapes.result -> report.result_page",
    "analysis.landscapes.result -> report.tables",
    "analysis.landscapes.result -> report.views.landscape",
    "analysis.monitor.history -> report.plots.history",
    "analysis.monitor.history -> report.tables",
    "analysis.monitor.history -> report.views.history",
    "analysis.measurement -> report.layer_bars",
    "analysis.measurement -> report.page",
    "analysis.measurement -> report.tables",
    "analysis.measurement -> report.views.report",
    "analysis.result -> report.result_page",
    "analysis.result -> report.tables",
    "analysis.spectra -> report.plots.spectrum",
    "analysis.spectra -> report.tables",
    "analysis.spectra -> report.views.spectrum",
    "studies.result -> report.pool_page",
    "studies.result -> report.pool_pictures",
    "studies.result -> report.pool_tables",
    "studies.result -> report.tables",
}

#: Slow to import, so imported where they are used and not before.
HEAVY = {
    "jinja2",
    "matplotlib",
    "pandas",
    "plotly",
    "rich",
    "ray",
    "scipy",
    "sklearn",
    "transformers",
}


def name_of(path: Path) -> str:
    """The dotted name of a module below `flatgauge`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


def imports(name: str, *, lazy: bool = True) -> set[str]:
    """The modules of ours that a module imports; without `lazy`, those it needs to be loaded."""
    found = set()
    tree = ast.parse(MODULES[name].read_text())
    nodes = ast.walk(tree) if lazy else _at_load(tree)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flatgauge"):
            home = node.module.removeprefix("flatgauge").removeprefix(".")
            inner = {f"{home}.{alias.name}".removeprefix(".") for alias in node.names}
            found |= (inner & MODULES.keys()) | ({home} if inner - MODULES.keys() else set())
        elif isinstance(node, ast.Import):
            names = {alias.name.removeprefix("flatgauge.") for alias in node.names}
            found |= names & MODULES.keys()
    return found - {name}


def _at_load(tree: ast.Module):
    """The import statements that run when a module is loaded."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            waiting += node.body + node.orelse
        elif isinstance(node, (ast.Try, ast.With, ast.ClassDef)):
            waiting += node.body


def test_there_are_thirteen_packages_and_two_modules_at_the_root():
    assert {name.split(".")[0] for name in MODULES} == {*PACKAGES, "", "__main__"}


def test_imports_point_downwards():
    upward = {
        f"{name} -> {other}"
        for name in MODULES.keys() - {"", "__main__"}
        for other in imports(name)
        if not other or HEIGHT[other.split(".")[0]] > HEIGHT[name.split(".")[0]]
    }
    assert upward == LAZY_UPWARD


def test_what_points_upwards_is_imported_when_it_is_used():
    for edge in LAZY_UPWARD:
        name, other = edge.split(" -> ")
        assert other not in imports(name, lazy=False), edge


def test_no_modules_import_each_other_in_a_circle():
    edges = {name: imports(name, lazy=False) for name in MODULES}
    done: set[str] = set()
    while ready := {name for name in edges.keys() - done if edges[name] <= done}:
        done |= ready
    assert not edges.keys() - done


def test_no_module_shares_its_name_with_a_public_function():
    modules = {path.stem for path in ROOT.glob("*.py")} | {p.name for p in ROOT.iterdir()}
    assert not modules & set(flatgauge.__all__)


def test_private_names_stay_at_home():
    wrong = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flatgauge"):
                wrong += [
                    f"{path.relative_to(ROOT)} imports {alias.name} from {node.module}"
                    for alias in node.names
                    if alias.name.startswith("_")
                ]
    assert not wrong


def test_importing_the_library_loads_nothing_heavy():
    script = "import sys, torch; before = set(sys.modules); import flatgauge.analysis.measurement; "
    script += "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert not HEAVY & set(result.stdout.decode().split())


def test_the_command_line_answers_without_torch():
    script = "import sys, flatgauge.cli.commands; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert not {"torch", "numpy", *HEAVY} & set(result.stdout.decode().split())


def test_every_reference_is_in_the_bibliography(request):
    keys = set(
        re.findall(r"@\w+\{(\w+),", (request.config.rootpath / "docs/references.bib").read_text())
    )
    cited = {
        key
        for path in ROOT.rglob("*.py")
        for key in re.findall(r"\[([a-z]+\d{4}[a-z]*)\]", path.read_text())
    }
    assert cited
    assert cited <= keys
