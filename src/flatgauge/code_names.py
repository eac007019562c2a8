"""What code reads from the modules around it, and whose code it is."""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any

#: Instructions that read a global.
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")


@functools.cache
def installed(module: str | None) -> bool:
    """Whether code is Python's, this library's, or of an installed package: it does not change.

    Args:
        module: The name of the module that it stands in.

    Returns:
        Whether it is.
    """
    top = (module or "").partition(".")[0]
    if top in ("torch", "flatgauge", *sys.stdlib_module_names) and top != "__main__":
        return True
    path = getattr(sys.modules.get(top), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """What a function and the functions inside it read by name.

    Args:
        code: Of the function.

    Returns:
        The globals, and all names, attributes included.
    """
    loads = {i.argval for i in dis.get_instructions(code) if i.opname in _LOADS}
    every = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, names = names_in(constant)
            loads, every = loads | inner, every | names
    return frozenset(loads), frozenset(every)


def imported_in(function: types.FunctionType) -> list[types.ModuleType]:
    """The modules that a function imports when it runs, but for installed ones.

    Args:
        function: The function.

    Returns:
        The modules as far as they are loaded.
    """
    package = str(function.__globals__.get("__package__") or "")
    parents = [package.rsplit(".", cut)[0] for cut in range(package.count(".") + 1)]
    names: dict[str, None] = {}
    for name in sorted(_imports(function.__code__)):  # How many dots stand before it is not said.
        names |= dict.fromkeys([name, *(f"{parent}.{name}".strip(".") for parent in parents)])
    found = (sys.modules.get(name) for name in names if name and not installed(name))
    return [module for module in found if module is not None]


@functools.lru_cache(maxsize=4096)
def _imports(code: types.CodeType) -> frozenset[str]:
    """The names of modules that a function and the functions inside it import."""
    inner = [_imports(value) for value in code.co_consts if isinstance(value, types.CodeType)]
    own = {i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"}
    tops = {name.partition(".")[0] for name in own}  # `import a.b` gives `a`.
    return frozenset(own | tops).union(*inner)


def closed_over(function: types.FunctionType) -> tuple[Any, ...]:
    """What a function closes over.

    Args:
        function: The function.

    Returns:
        The values; the cell itself where it is not filled yet.
    """

    def content(cell: types.CellType) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return cell

    return tuple(content(cell) for cell in function.__closure__ or ())
