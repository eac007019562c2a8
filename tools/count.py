"""Count what makes the source easy or hard to read: sizes, imports, call paths, names.

    python tools/count.py --markdown             the tree of this script, as a Markdown table
    python tools/count.py --source OTHER/src     another tree, whose own code runs
    python tools/count.py --lists                also the files and names behind the numbers

- *reach* of a module: all modules of ours that must be read to follow it, found through every
  import statement, lazy ones inside functions included, those for type checkers excluded. The
  ``__init__`` of a package counts where a name is imported from the package itself, not where
  Python runs it on the way to a module inside.
- *longest chain*: modules on the longest path of imports that run while modules are loaded.
- *crossed* by a call: files that have a function executed during it, in a fresh process, with all
  modules loaded and the surface constructed before. Top-level statements and class bodies do not
  count: no reader steps through them.
- *bare participles*: functions and methods named by a past participle alone (`joined`, `_swept`).
- *repeated class names*: without regard to leading underscores, as readers see them.

`tests/test_house.py` holds the bounds; it calls the same functions.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "src"
#: Lines of a file: with fewer, its topic may belong elsewhere; with more, it may hold two.
FEWEST, MOST = 150, 600

#: Past participles by themselves; those that are verbs or nouns as they stand (`read`) are not.
PARTICIPLE = re.compile(
    r"_*(?!(?:b|emb|exc|f|n|proc|r|s|sh|sp|succ)e?ed_*$)(?:[a-z0-9]+ed|begun|bent|bought|broken|"
    r"brought|built|caught|chosen|done|drawn|driven|forgotten|found|frozen|given|gone|grown|"
    r"heard|held|hidden|kept|known|laid|led|left|lent|lost|made|meant|met|overlaid|overwritten|"
    r"paid|rebuilt|redrawn|rewritten|said|seen|sent|shown|shrunk|sold|sought|spent|spoken|spun|"
    r"stood|swept|taken|taught|thought|thrown|told|torn|understood|undone|unread|unseen|withdrawn|"
    r"withheld|won|worn|wound|woven|written)_*"
)

#: Words with plainer ones in their place, in docstrings, comments, messages and names.
AVOID = re.compile(
    r"(?<![a-z])(?:told|tells?|telling|words|beside|alike|anew|hears?|heard|hearing|speaks?|"
    r"speaking|spoken|silent|lets? go|hangs? on|puts? by|feign|for ever|be it|so many|"
    r"come what may|(?<!there )is no(?= \w))(?![a-z])"
)

#: Run in a fresh process: print the files, relative to the package, that a call crosses.
TRACER = """
import contextlib, importlib, pkgutil, sys, threading
from pathlib import Path
import torch
import flatgauge as fg

root = str(Path(fg.__file__).parent) + "/"
for module in pkgutil.walk_packages(fg.__path__, "flatgauge.", onerror=lambda name: None):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # Optional dependencies.
            importlib.import_module(module.name)
torch.manual_seed(0)
Linear, ReLU = torch.nn.Linear, torch.nn.ReLU
model = torch.nn.Sequential(Linear(6, 5), ReLU(), Linear(5, 4), ReLU(), Linear(4, 3)).eval()
surface = fg.LossSurface(model, "cross_entropy", (torch.randn(16, 6), torch.randint(3, (16,))))
crossed = set()

def note(frame, event, argument):
    code = frame.f_code
    # Functions have fast locals (flag 1); modules and class bodies do not.
    if event == "call" and code.co_flags & 1 and code.co_filename.startswith(root):
        crossed.add(code.co_filename.removeprefix(root))

threading.setprofile(note)
sys.setprofile(note)
CALL
sys.setprofile(None)
print(*sorted(crossed), sep="\\n")
"""
CALLS = {"measure": "fg.measure(surface, measures=['rho_sum'])", "certify": "fg.certify(surface)"}
#: A name and its place, as `module:line`.
Named = tuple[str, str]


@dataclass
class Module:
    """One file: its dotted name below `flatgauge`, its package, its content."""

    name: str
    package: str
    text: str
    lines: int
    tree: ast.Module


class Tree:
    """The package `flatgauge` as it lies in a source folder; `packages` limits what is counted."""

    def __init__(self, source: Path = HERE) -> None:
        self.source = source
        self.modules = {}
        root = source / "flatgauge"
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            package = parts[0] if len(parts) > 1 else "(root)"
            text = path.read_text()
            self.modules[name] = Module(name, package, text, text.count("\n"), ast.parse(text))

    def files(self, packages: Collection[str] = ()) -> list[Module]:
        """The modules of these packages, or of all."""
        return [m for m in self.modules.values() if not packages or m.package in packages]

    def imports(self, name: str, *, lazy: bool) -> set[str]:
        """The modules of ours that a module imports; without `lazy`, those it needs to load."""
        found: set[str] = set()
        for node in _import_statements(self.modules[name].tree, lazy=lazy):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flatgauge"):
                home = (node.module or "").removeprefix("flatgauge").removeprefix(".")
                inner = {f"{home}.{alias.name}".removeprefix(".") for alias in node.names}
                found |= inner if inner <= self.modules.keys() else inner | {home}
            elif isinstance(node, ast.Import):
                found |= {alias.name.removeprefix("flatgauge.") for alias in node.names}
        return found & self.modules.keys() - {name}

    def reach(self, name: str) -> set[str]:
        """All modules that a module imports, directly or through others, and itself."""
        found, waiting = {name}, [name]
        while waiting:
            new = self.imports(waiting.pop(), lazy=True) - found
            found |= new
            waiting += new
        return found

    def chain(self) -> list[str]:
        """The modules of the longest chain of imports at load, each importing the next."""
        longest: dict[str, list[str]] = {}

        def below(name: str) -> list[str]:
            if name not in longest:
                longest[name] = []  # Ends circles.
                rest = max(map(below, sorted(self.imports(name, lazy=False))), key=len, default=[])
                longest[name] = [name, *rest]
            return longest[name]

        return max(map(below, self.modules), key=len)

    def functions(self, packages: Collection[str] = ()) -> list[Named]:
        """Every function and method."""
        return self._definitions((ast.FunctionDef, ast.AsyncFunctionDef), packages)

    def participles(self, packages: Collection[str] = ()) -> list[Named]:
        """Functions and methods named by a bare past participle, with their places."""
        return [item for item in self.functions(packages) if PARTICIPLE.fullmatch(item[0])]

    def repeated_classes(self, packages: Collection[str] = ()) -> dict[str, list[str]]:
        """Names of classes in these packages that another class has, too, wherever it stands."""
        places = defaultdict(list)
        for name, place in self._definitions((ast.ClassDef,), ()):
            places[name.lstrip("_")].append(place)
        inside = {name.lstrip("_") for name, _ in self._definitions((ast.ClassDef,), packages)}
        return {name: places[name] for name in sorted(inside) if len(places[name]) > 1}

    def words_to_avoid(self, packages: Collection[str] = ()) -> list[Named]:
        """Words that have a plainer one, each with its place and line."""
        return [
            (match[0], f"{module.name}:{number} {line.strip()}")
            for module in self.files(packages)
            for number, line in enumerate(module.text.splitlines(), 1)
            for match in AVOID.finditer(line.lower())
        ]

    def odd_sizes(self, packages: Collection[str] = ()) -> list[tuple[str, int]]:
        """Files outside the usual sizes, with their lines; an `__init__` may be small."""
        packs = {name.rpartition(".")[0] for name in self.modules}
        files = [m for m in self.files(packages) if m.lines >= FEWEST or m.name not in packs]
        return [(m.name, m.lines) for m in files if not FEWEST <= m.lines <= MOST]

    def _definitions(self, kind: tuple[Any, ...], packages: Collection[str]) -> list[Named]:
        """Name and place of every function or class."""
        return [
            (node.name, f"{module.name}:{node.lineno}")
            for module in self.files(packages)
            for node in ast.walk(module.tree)
            if isinstance(node, kind)
        ]

    def run(self, script: str) -> list[str]:
        """The lines that a script prints, run on this tree in a fresh process."""
        environment = {**os.environ, "PYTHONPATH": str(self.source), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", script]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        return done.stdout.decode().splitlines()

    def crossed(self, call: str) -> list[str]:
        """The files that one of `CALLS` crosses."""
        return self.run(TRACER.replace("CALL", CALLS[call]))


def _import_statements(tree: ast.Module, *, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a module except for type checkers; without `lazy`, those at load."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif lazy or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def main() -> None:
    """Print the table, and the lists behind it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--source", type=Path, default=HERE, help="folder that holds flatgauge/")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--static", action="store_true", help="run nothing of the library")
    parser.add_argument("--lists", action="store_true", help="also the names behind the numbers")
    given = parser.parse_args()
    tree = Tree(given.source.resolve())
    counted: dict[str, Collection[object]] = {
        "longest import chain": tree.chain(),
        "reach of measures/rho.py": sorted(tree.reach("measures.rho")),
        "functions named by a bare participle": tree.participles(),
        "class names used more than once": tree.repeated_classes().items(),
        "words to avoid": tree.words_to_avoid(),
        f"files outside {FEWEST}-{MOST} lines": tree.odd_sizes(),
    }
    if not given.static:
        counted |= {f"files crossed by {CALLS[call]}": tree.crossed(call) for call in CALLS}
        counted["public names"] = tree.run("import flatgauge; print(*flatgauge.__all__, sep='\\n')")
    form = "| {} | {} |" if given.markdown else "{:60} {:>14}"
    lines = ["| | |\n|---|--:|"] if given.markdown else []
    for name in [*sorted({m.package for m in tree.files()}), "all packages"]:
        sizes = [m.lines for m in tree.files() if name in (m.package, "all packages")]
        lines.append(form.format(f"{name}: files, lines", f"{len(sizes)}, {sum(sizes):,}"))
    lines += [form.format(name, f"{len(items):,}") for name, items in counted.items()]
    for name, items in counted.items() if given.lists else ():
        lines += ["", f"{name}:", *(f"  {item}" for item in items)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
