"""Measures and op rules of other packages, through entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import flatgauge
from flatgauge.graph.export import _add_records
from flatgauge.measures import registry
from flatgauge.runtime.isolation import NameClashError, Plugins

ROOT = Path(__file__).resolve().parents[2]
INSTALL = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")
#: What a user of the example does.
USE = """
import torch, flatgauge as fg
from flatgauge_plugin.ops import rectify

class Rectify(torch.nn.Module):
    def forward(self, x):
        return rectify(x)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 5), Rectify(), torch.nn.Linear(5, 3))
surface = fg.LossSurface(model, "cross_entropy", (torch.randn(9, 4), torch.randint(3, (9,))))
print(fg.find_gauge(model, torch.randn(9, 4)).dim)
report = fg.measure(surface, measures=["norm_product", "rho_sum"])
norms = [model[i].weight.detach().norm().item() for i in (0, 2)]
print(abs(report["norm_product"].value - norms[0] * norms[1]) < 1e-6, report["rho_sum"].exact)
print(fg.certify(surface, measures=["norm_product"], trials=1).passed)
print(fg.catalogue().set_index("name").loc["norm_product", "package"])
from flatgauge.report.catalogue import overview; print(overview())
"""


def run(script: str, *folders: Path) -> list[str]:
    """The lines that a script prints in a fresh process that finds packages in some folders."""
    path = os.pathsep.join([*map(str, folders), str(Path(flatgauge.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.decode().splitlines()


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder in which the example package is installed."""
    folder = tmp_path_factory.mktemp("installed")
    copy = tmp_path_factory.mktemp("source")
    files = (
        "pyproject.toml",
        "README.md",
        *(f"src/flatgauge_plugin/{name}.py" for name in MODULES),
    )
    for name in files:
        place = copy / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((ROOT / "examples/flatgauge-plugin" / name).read_bytes())
    subprocess.run([*INSTALL, "--target", str(folder), str(copy)], check=True)
    return folder


MODULES = ("__init__", "measures", "ops")


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """Declare a package with one module and one entry point, as an installer leaves it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_declared", dict(registry._declared))
    names = []

    def write(name: str, group: str, value: str, code: str) -> Plugins:
        about = tmp_path / f"{name}-2.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
        (about / "entry_points.txt").write_text(f"[flatgauge.{group}]\n{value}\n")
        (tmp_path / f"{name}.py").write_text(code)
        names.append(name)
        add = {"measures": registry._check_plugin, "rules": _add_records}[group]
        return Plugins(f"flatgauge.{group}", add)

    yield write
    for name in names:
        sys.modules.pop(name, None)


MEASURE = """
from flatgauge import Estimate
from flatgauge.measures import measure

@measure(symbol="x", paper="", geometry="", functional="", invariant_to=(), cost="")
def {}(surface):
    "Zero."
    return Estimate(0.0)
"""
OPERATION = "from flatgauge.graph.ops import Op\nOPS = {}\n"


def test_the_example_brings_a_measure_and_an_op_rule(installed):
    lines = run(USE, installed)
    assert lines[:4] == ["5", "True True", "True", "flatgauge-plugin 0.1.0"]
    brought = "measure `norm_product`, op `flatgauge_plugin::rectify`"
    assert f"from flatgauge-plugin 0.1.0: {brought}" in lines
    assert "norm_product  [∏ ‖W‖]" in lines


@pytest.mark.parametrize(
    ("group", "value", "code", "message"),
    [
        ("measures", "mine = bad:mine", "1 / 0", r"division by zero \(.*bad.py:1\)"),
        ("measures", "mine = bad:mine", "import sys; sys.exit(3)", "SystemExit: 3"),
        ("measures", "mine = bad:mine", "mine = 1", "loading 1 has declared no measure named"),
        ("measures", "mine = missing:mine", "", "No module named 'missing'"),
        (
            "rules",
            "mine = bad:OPS",
            "OPS = {'a::b': 'relu'}",
            "`mine` is not a dict of `Op` records",
        ),
    ],
)
def test_what_cannot_be_loaded_is_left_out_with_a_warning(declare, group, value, code, message):
    plugins = declare("bad", group, value, code)
    start = (
        rf"`mine` of the package `bad 2.0` \(entry points `flatgauge.{group}`\) cannot be loaded"
    )
    with pytest.warns(UserWarning, match=f"{start} and is left out: .*{message}"):
        assert plugins.packages() == {}
    assert plugins.packages() == {}  # Without a second warning.


@pytest.mark.parametrize(
    ("group", "value", "code", "message"),
    [
        ("measures", "m = taken:rho_sum", MEASURE.format("rho_sum"), "a measure named `rho_sum`"),
        ("rules", "m = taken:OPS", OPERATION.format("{'relu': Op('leaky')}"), "the op `relu` has"),
        (
            "rules",
            "m = taken:OPS",
            "from flatgauge.symmetry.inference import Rule\n"
            "class Mine(Rule, family='power'): pass\n",
            "the family of ops `power` has a rule already",
        ),
    ],
)
def test_a_name_that_is_taken_is_an_error_each_time(declare, group, value, code, message):
    plugins = declare("taken", group, value, code)
    for _ in range(2):
        with pytest.raises(
            NameClashError, match=rf"package `taken 2.0` .* cannot be used: {message}"
        ):
            plugins.packages()


def test_two_packages_cannot_bring_one_name(declare):
    declare("one", "measures", "mine = one:mine", MEASURE.format("mine"))
    plugins = declare("two", "measures", "mine = two:mine", MEASURE.format("mine"))
    with pytest.raises(NameClashError, match=r"package `(one|two) 2.0`.*`mine` exists already"):
        plugins.packages()


def test_nothing_is_loaded_before_it_is_needed(declare, tmp_path):
    code = "print('loaded')\n" + MEASURE.format("mine")
    declare("lazy", "measures", "mine = lazy:mine", code)
    script = "import flatgauge.measures as m; print('imported'); print('mine' in m.registry)"
    assert run(script, tmp_path) == ["imported", "loaded", "True"]
