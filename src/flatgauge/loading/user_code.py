"""Objects of the user's own code, named by ``path/to/file.py:name`` or ``package.module:name``.

`resolve` imports what a reference names, `build_model` also calls it; both return the user's
object, or raise an error that says what to write instead. A file runs as a module of its own, with
its folder importable while it runs.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from flatgauge.loading.files import expand
from flatgauge.runtime.user_errors import describe_error

# The folders of modules that user files imported from next to them, by module name: another folder
# may have modules of its own by these names.
_NEIGHBOURS: dict[str, Path] = {}

#: Folders that hold copies of code, by the file or module that references name: code from another
#: machine.
RELOCATED: dict[str, Path] = {}


def resolve(reference: str) -> Any:
    """Import the object a reference names; nothing is called.

    A file is run once, under a private module name; as long as it is not edited, every
    reference to it gives objects of the same module. It may import the files next to it: its
    folder is on ``sys.path`` during the import, and not after. A module is looked up in the
    current folder first, as ``python -m`` does. An error raised by the user's code comes out as
    an `ImportError` that says where in it. The name in a reference may have dots.

    Returns:
        The object itself.

    Raises:
        AttributeError: If the code does not define the name.

    Example:
        >>> resolve("math:sqrt")(9.0)
        3.0
    """
    place, name = split_reference(reference)
    with _importable(place):
        if is_file(place):
            found: Any = _import_file(_file_of(place), reference)
        else:
            found = _import_module(place, reference)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise AttributeError(_missing_name(reference, place, part, found)) from None
    return found


def build_model(reference: str) -> nn.Module:
    """Make the model a reference names: call a function or class, or take a module as it is.

    Returns:
        The model, as the user's code made it.

    Raises:
        TypeError: If what is named, or what it returns, is not a model.

    Example:
        >>> build_model("torch.nn:ReLU")
        ReLU()
    """
    found = resolve(reference)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise TypeError(
            f"`{reference}` is of type {_type_name(found)}; a model is needed: name a function or "
            f"class that returns a `torch.nn.Module`, or such a module itself."
        )
    model = call_factory(reference, found)
    if isinstance(model, nn.Module):
        return model
    advice = "return the `torch.nn.Module`, and nothing else"
    if isinstance(model, type):
        advice = f"return an instance: `{model.__name__}()`, not `{model.__name__}`"
    raise TypeError(f"`{reference}` returned {_type_name(model)}; a model is needed: {advice}.")


def call_factory(reference: str, factory: Callable[..., Any], **options: object) -> Any:
    """Call a factory of the user, with its folder importable and its errors located."""
    required = [name for name in _required_arguments(factory) if name not in options]
    if required:
        names = ", ".join(f"`{name}`" for name in required)
        called = getattr(factory, "__name__", "it")
        raise TypeError(
            f"`{reference}` needs the arguments {names}; a factory is called without: give "
            f"them defaults, or write `def make(): return {called}(...)` and name that."
        )
    with _importable(split_reference(reference)[0]):
        try:
            return factory(**options)
        except (Exception, SystemExit) as error:
            text = describe_error(error, anywhere=True)
            raise RuntimeError(f"`{reference}` failed: {text}") from error


def _required_arguments(factory: Callable[..., Any]) -> list[str]:
    """The arguments that a call needs; none if the signature is unknown."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def split_reference(reference: str) -> tuple[str, str]:
    """The file or module and the name in it, or an error that says how to write a reference."""
    place, colon, name = reference.rpartition(":")
    if not colon:
        advice = f"write `{reference}:NAME`" if is_file(reference) else "write both"
        raise ValueError(
            f"`{reference}` has no colon; needed is `path/to/file.py:NAME` or "
            f"`package.module:NAME`, NAME being a function in it; {advice}."
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"`{reference}` has {name!r} behind the colon; needed is the name of something the "
            f"code defines, as in `path/to/file.py:make_model`."
        )
    if not is_file(place) and not all(part.isidentifier() for part in place.split(".")):
        raise ValueError(
            f"`{reference}` has {place!r} before the colon; needed is a path that ends in "
            f"`.py` or a module such as `package.module`."
        )
    return place, name


def is_file(place: str) -> bool:
    """Whether the part before the colon means a file."""
    return place.endswith(".py") or "/" in place or "\\" in place


def home_of(place: str) -> Path:
    """The folder that is importable while code runs: the file's own, for a module the current."""
    folder = RELOCATED.get(place) or (expand(place).parent if is_file(place) else Path())
    return folder.resolve()


def _file_of(place: str) -> Path:
    """Where the file is that a reference names."""
    path = expand(place)
    return RELOCATED[place] / path.name if place in RELOCATED else path


@contextlib.contextmanager
def _importable(place: str) -> Iterator[None]:
    """Make the home of a file or module importable for a while."""
    folder = home_of(place)
    for name, home in list(_NEIGHBOURS.items()):  # Another folder's, by a name used here too.
        if home != folder and holds(folder, name):
            del _NEIGHBOURS[name]
            sys.modules.pop(name, None)
    path, bytecode, before = list(sys.path), sys.dont_write_bytecode, set(sys.modules)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # no litter, and no stale .pyc after a quick edit
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        sys.dont_write_bytecode = bytecode
        for name in (set(sys.modules) - before) if is_file(place) else ():
            file = getattr(sys.modules.get(name), "__file__", None)
            if file and folder in Path(file).parents and holds(folder, name):
                _NEIGHBOURS[name] = folder


def holds(folder: Path, name: str) -> bool:
    """Whether a folder has a module or package of this name."""
    top = name.partition(".")[0]
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def forget_modules(folder: Path) -> None:
    """Forget all modules that were imported from a folder, as if they had never been."""
    for name, module in list(sys.modules.items()):
        # Looked up without the module's own ways to find attributes, which may load others.
        file = getattr(module, "__dict__", {}).get("__file__")
        # Packages without `__init__.py` have no file.
        if file.startswith(f"{folder}{os.sep}") if file else holds(folder, name):
            del sys.modules[name]
            _NEIGHBOURS.pop(name, None)


def _import_file(path: Path, reference: str) -> ModuleType:
    """Run a Python file as a module of its own."""
    if not os.path.isfile(path):
        raise FileNotFoundError(_missing_file(path, reference))
    path = path.resolve()
    stat = path.stat()
    version = f"{path}|{stat.st_mtime_ns}|{stat.st_size}"
    key = hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    name = f"_flatgauge_user_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"`{path}` does not end in `.py`; needed is a Python file; rename it.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        text = describe_error(error, anywhere=True)
        raise ImportError(f"importing `{path}` failed: {text}") from error
    return module


def _import_module(place: str, reference: str) -> ModuleType:
    """Import a module by its dotted name."""
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (place == missing or place.startswith(f"{missing}.")):
            raise ModuleNotFoundError(
                f"`{reference}`: there is no module `{missing}` in `{Path.cwd()}` or among "
                f"installed packages; install it, or name a file: `path/to/file.py:NAME`.",
                name=missing,
            ) from None
        text = describe_error(error, anywhere=True)
        raise ImportError(f"importing `{place}` failed: {text}") from error


def _missing_file(path: Path, reference: str) -> str:
    """The message for a file that does not exist, with those that do."""
    if not path.suffix and path.with_suffix(".py").is_file():
        return f"`{reference}` names no file; write `{path}.py:...`, with its ending."
    there = sorted(file.name for file in path.parent.glob("*.py") if file.is_file())
    found = f"`{path.parent}` holds {_list_names(path.name, there)}" if there else "check the path"
    return f"`{path}` is not a file, seen from `{Path.cwd()}`; {found}."


def _missing_name(reference: str, place: str, name: str, owner: Any) -> str:
    """The message for a name that is not defined, with those that are."""
    inside = getattr(owner, "__dict__", {})
    home = inside.get("__module__", inside.get("__name__"))
    names = [key for key in inside if key[0] != "_" and not _is_imported(inside[key], home)]
    defined = f"it defines {_list_names(name, names)}" if names else "it defines nothing public"
    return f"`{reference}` asks for `{name}`, which `{place}` does not define; {defined}."


def _is_imported(value: object, home: str | None) -> bool:
    """Whether a value was made elsewhere, and only imported where it was found."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return getattr(value, "__module__", home) != home
    return isinstance(value, ModuleType)


def _list_names(wanted: str, names: list[str]) -> str:
    """A few names, the most similar one first."""
    close = difflib.get_close_matches(wanted, names, n=1)
    shown = close + [name for name in names if name not in close]
    rest = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    hint = f" (did you mean `{close[0]}`?)" if close else ""
    return ", ".join(f"`{name}`" for name in shown[:8]) + rest + hint


def _type_name(value: object) -> str:
    """The type of a value, for a message."""
    return f"class `{value.__name__}`" if isinstance(value, type) else f"`{type(value).__name__}`"
