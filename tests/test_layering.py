"""Imports point downwards only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import flatgauge

ROOT = Path(flatgauge.__file__).parent

#: From the ground up; a module may import only from lines above its own, or from its own unit.
LAYERS = [
    ["blame", "code_names", "copying"],
    ["compiled"],
    ["silent_units", "snapshot"],
    ["parameter_caches"],
    [
        "arguments",
        "nested",
        "precision",
        "printable",
        "layout",
        "isolation",
        "likeness",
        "memory",
        "networks",
        "double_backward",
        "products",
        "randomness",
        "reading",
        "threads",
        "nodes",
        "processes",
        "words",
        "writing",
    ],
    ["group"],
    ["budget", "fingerprints", "signed_log", "statistics"],
    ["drawing"],
    ["truncated"],
    ["graph", "osborne"],
    ["exports"],
    ["output_curvature", "layers", "matrix_scaling", "meetings", "path_sums"],
    ["loss", "targets"],
    ["label_losses"],
    ["losses"],
    ["estimators", "user_code", "weights"],
    ["batch", "compiled_forward", "datasets"],
    ["batches"],
    ["sharding", "subject", "telling"],
    ["denominators", "sharded"],
    ["objective"],
    ["trials"],
    ["second_order"],
    ["surface"],
    ["curvature", "evaluation", "examples", "progress", "stationarity", "symmetry"],
    ["forecast"],
    ["path_space"],
    ["geometry"],
    ["functionals"],
    ["grid"],
    ["landscaping", "measures", "robustness"],
    ["guarantees"],
    ["report"],
    ["asking"],
    ["measuring"],
    ["comparing", "retrial", "spectra", "watching"],
    ["judging"],
    ["certifying"],
    ["demo", "command", "illustrating", "integrations", "studies"],
    ["bench"],
    ["cli", "__init__"],
    ["__main__"],
]
HEIGHT = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}

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


def unit_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def test_every_module_has_a_layer():
    units = {unit_of(path) for path in ROOT.rglob("*.py")}
    assert units == set(HEIGHT)


def test_imports_point_downwards():
    wrong = []
    for path in ROOT.rglob("*.py"):
        unit = unit_of(path)
        for name in imports(path):
            if name.startswith("flatgauge."):
                other = name.split(".")[1]
                if other != unit and HEIGHT[other] >= HEIGHT[unit]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


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
    script = "import sys, torch; before = set(sys.modules); import flatgauge.measuring; "
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
