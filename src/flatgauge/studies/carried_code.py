"""A user's own code, carried to machines that do not have its files.

What a reference such as `nets.py:factory` names is taken as source: the file, and of those beside
it whatever it imports, at any depth. Files that code reads in other ways (weights, tables) are not
seen.
"""

from __future__ import annotations

import ast
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flatgauge.user_code import copied, file_of, home_of

#: Folders of this process that hold code of others, by digest; removed when the process ends.
_unpacked: dict[str, tempfile.TemporaryDirectory[str]] = {}


@dataclass(frozen=True)
class CarriedCode:
    """Source files that a reference needs.

    Attributes:
        reference: As the user wrote it.
        files: Their contents, by path below the folder they are imported from.
    """

    reference: str
    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """Letters that belong to these files alone."""
        parts = [part for name in sorted(self.files) for part in (name.encode(), self.files[name])]
        whole = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hashlib.sha256(whole).hexdigest()


def carried_code(reference: str) -> CarriedCode | None:
    """Gather the source files that a reference needs; nothing is run.

    Args:
        reference: ``path/to/file.py:name`` or ``package.module:name``.

    Returns:
        The files; None if there are none to carry: a module that is installed, or a file that is
        not here (it may be there).
    """
    folder, file = home_of(reference), file_of(reference)
    top = reference.partition(":")[0].partition(".")[0]
    waiting = _files(folder, top) if file is None else [file]
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
    if code.digest not in _unpacked:
        place = tempfile.TemporaryDirectory(prefix="flatgauge-code-", ignore_cleanup_errors=True)
        for name, contents in code.files.items():
            path = Path(place.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
        _unpacked[code.digest] = place
    with copied(code.reference, Path(_unpacked[code.digest].name)):
        yield


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
    module, package = folder / f"{top}.py", folder / top
    if (package / "__init__.py").is_file() or any(package.glob("*.py")):
        return sorted(package.rglob("*.py"))
    return [module] if module.is_file() else []
