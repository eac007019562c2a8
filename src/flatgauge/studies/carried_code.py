"""A user's own code, carried to machines that do not have its files.

What a reference such as `nets.py:factory` names is taken as source: the file, and of those beside
it whatever it imports, at any depth. Files that code reads in other ways (weights, tables) are not
seen.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flatgauge.loading.models import RELOCATED, forget_modules, home_of, is_file, split_reference


@dataclass(frozen=True)
class CarriedCode:
    """Source files that a reference needs.

    Attributes:
        reference: As the user wrote it.
        files: Their contents, by path below the folder they are imported from.
    """

    reference: str
    files: Mapping[str, bytes]


def carried_code(reference: str) -> CarriedCode | None:
    """Gather the source files that a reference needs; nothing is run.

    Args:
        reference: ``path/to/file.py:name`` or ``package.module:name``.

    Returns:
        The files; None if there are none to carry: a module that is installed, or a file that is
        not here (it may be there).
    """
    place, _ = split_reference(reference)
    folder = home_of(place)
    file = [folder / Path(place).name] if is_file(place) else []
    waiting = file or _files(folder, place.partition(".")[0])
    found: dict[str, bytes] = {}
    while waiting:
        path = waiting.pop()
        name = path.relative_to(folder).as_posix()
        if name not in found and path.is_file():
            found[name] = path.read_bytes()
            waiting += [file for top in _imported(found[name]) for file in _files(folder, top)]
    return CarriedCode(reference, found) if found else None


@contextmanager
def unpacked(code: CarriedCode | None) -> Iterator[None]:
    """Let a reference mean the code that was carried here.

    Args:
        code: What `carried_code` gave elsewhere.

    Yields:
        Nothing.
    """
    if code is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="flatgauge-code-") as folder:
        for name, contents in code.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
        place, _ = split_reference(code.reference)
        RELOCATED[place] = Path(folder)
        try:
            yield
        finally:
            del RELOCATED[place]
            forget_modules(Path(folder).resolve())


def _imported(source: bytes) -> set[str]:
    """The names before the first dot of all that some source imports, also within functions."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # Told where the code is run, with its place.
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    # Relative imports stay within a package, which is carried whole.
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names}


def _files(folder: Path, top: str) -> list[Path]:
    """The files of a module or package in a folder; none if it is not there."""
    return [*folder.glob(f"{top}.py"), *sorted((folder / top).rglob("*.py"))]
