"""Objects named on the command line: `path/to/file.py:name` or `package.module:name`."""

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
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from flatgauge.reading import expand

# Modules that user files imported from beside them; another folder has its own by that name.
_neighbours: dict[str, Path] = {}

# Folders to look in for the code of references that were written on another machine.
_copies: dict[str, Path] = {}


def resolve(reference: str) -> Any:
    """Import the object a reference names.

    A file is run once, under a private module name; as long as it is not edited, every
    reference to it gives objects of the same module. It may import the files beside it: its
    folder is on ``sys.path`` during the import, and not after. A module is looked up in the
    current folder first, as ``python -m`` does. An error raised by the user's code comes out as
    an `ImportError` that says where in it.

    Args:
        reference: ``path/to/file.py:name`` or ``package.module:name``. The name may have dots.

    Returns:
        The object itself; nothing is called.

    Raises:
        AttributeError: If the code does not define the name.

    Example:
        >>> resolve("math:sqrt")(9.0)
        3.0
    """
    place, name = _split(reference)
    with _importing_from(reference):
        if _is_file(place):
            found: Any = _import_file(_file(place), reference)
        else:
            found = _import_module(place, reference)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise AttributeError(_missing_name(reference, place, part, found)) from None
    return found


def build_model(reference: str) -> nn.Module:
    """Make the model a reference names.

    Args:
        reference: Names a function or class to be called without arguments, or a module
            object that already exists.

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
            f"`{reference}` is of type {_kind(found)}; a model is needed: name a function or "
            f"class that returns a `torch.nn.Module`, or such a module itself."
        )
    model = call(reference, found)
    if isinstance(model, nn.Module):
        return model
    advice = "let it return the `torch.nn.Module`, and nothing else"
    if isinstance(model, type):
        advice = "let it return an instance, with brackets behind the class"
    raise TypeError(f"`{reference}` returned {_kind(model)}; a model is needed: {advice}.")


def call(reference: str, factory: Callable[..., Any], **options: object) -> Any:
    """Call a factory of the user, with its folder importable and its errors located.

    Args:
        reference: Where the factory came from.
        factory: What `resolve` gave.
        **options: Keyword arguments for it.

    Returns:
        What the factory returns.

    Raises:
        TypeError: If the factory needs arguments beyond ``options``.
        RuntimeError: If the factory itself fails; the original error is its cause.
    """
    required = [name for name in _required_arguments(factory) if name not in options]
    if required:
        names = ", ".join(f"`{name}`" for name in required)
        called = getattr(factory, "__name__", "it")
        raise TypeError(
            f"`{reference}` needs the arguments {names}; a factory is called without: give "
            f"them defaults, or write `def make(): return {called}(...)` and name that."
        )
    with _importing_from(reference):
        try:
            return factory(**options)
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"`{reference}` failed: {_located(error)}") from error


def home_of(reference: str) -> Path:
    """The folder that is importable while the code of a reference runs.

    Args:
        reference: As `resolve` takes it.

    Returns:
        The file's own folder; for a module the current one.
    """
    place, _ = _split(reference)
    return (_file(place).parent if _is_file(place) else _copies.get(place, Path())).resolve()


def file_of(reference: str) -> Path | None:
    """The file that a reference names.

    Args:
        reference: As `resolve` takes it.

    Returns:
        The file, None if it names a module.
    """
    place, _ = _split(reference)
    return home_of(reference) / _file(place).name if _is_file(place) else None


@contextlib.contextmanager
def copied(reference: str, folder: Path) -> Iterator[None]:
    """Let a reference mean what is in another folder than the one it names.

    Modules from there are forgotten at the end, as if they had never been imported.

    Args:
        reference: As `resolve` takes it, perhaps written on another machine.
        folder: Holds what is in its home there.

    Yields:
        Nothing.
    """
    place, _ = _split(reference)
    _copies[place] = folder
    try:
        yield
    finally:
        del _copies[place]
        _forget_all(folder.resolve())


def _file(place: str) -> Path:
    """Where the file is that a reference names."""
    path = expand(place)
    return _copies[place] / path.name if place in _copies else path


def _required_arguments(factory: Callable[..., Any]) -> list[str]:
    """Name the arguments a call cannot do without; none if the signature is unknown."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


@contextlib.contextmanager
def _importing_from(reference: str) -> Iterator[None]:
    """Make the file's own folder, or for a module the current one, importable for a while."""
    place, _ = _split(reference)
    folder = home_of(reference)
    _forget_neighbours(folder)
    path, bytecode, before = list(sys.path), sys.dont_write_bytecode, set(sys.modules)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # no litter, and no stale .pyc after a quick edit
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        sys.dont_write_bytecode = bytecode
        if _is_file(place):
            _remember_neighbours(folder, set(sys.modules) - before)


def _remember_neighbours(folder: Path, names: set[str]) -> None:
    """Note which modules came from the user's own folder."""
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and folder in Path(file).parents and _holds(folder, name):
            _neighbours[name] = folder


def _forget_neighbours(folder: Path) -> None:
    """Let go of modules of another folder that would stand in for this folder's own."""
    for name, home in list(_neighbours.items()):
        if home != folder and _holds(folder, name):
            sys.modules.pop(name, None)
            del _neighbours[name]


def _forget_all(folder: Path) -> None:
    """Let go of all modules that came from a folder."""
    for name, module in list(sys.modules.items()):
        # Looked up without the module's own ways to find attributes, which may load others.
        file = getattr(module, "__dict__", {}).get("__file__")
        # Packages without `__init__.py` have no file.
        if file.startswith(f"{folder}{os.sep}") if file else _holds(folder, name):
            del sys.modules[name]
            _neighbours.pop(name, None)


def _holds(folder: Path, name: str) -> bool:
    """Whether a folder has a module or package of this name."""
    top = name.partition(".")[0]
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def _split(reference: str) -> tuple[str, str]:
    """Take a reference apart, or say how one is written."""
    place, colon, name = reference.rpartition(":")
    if not colon:
        advice = f"write `{reference}:NAME`" if _is_file(reference) else "write both"
        raise ValueError(
            f"`{reference}` has no colon; needed is `path/to/file.py:NAME` or "
            f"`package.module:NAME`, NAME being a function in it; {advice}."
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(
            f"`{reference}` has {name!r} behind the colon; needed is the name of something the "
            f"code defines, as in `path/to/file.py:make_model`."
        )
    if not _is_file(place) and not all(part.isidentifier() for part in place.split(".")):
        raise ValueError(
            f"`{reference}` has {place!r} before the colon; needed is a path that ends in "
            f"`.py` or a module such as `package.module`."
        )
    return place, name


def _is_file(place: str) -> bool:
    """Whether the part before the colon means a file."""
    return place.endswith(".py") or "/" in place or "\\" in place


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
        raise ImportError(f"importing `{path}` failed: {_located(error)}") from error
    return module


def _import_module(place: str, reference: str) -> ModuleType:
    """Import a module by its dotted name."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ModuleNotFoundError(
                f"`{reference}`: there is no module `{error.name}` in `{Path.cwd()}` or among "
                f"installed packages; install it, or name a file: `path/to/file.py:NAME`.",
                name=error.name,
            ) from None
        raise ImportError(f"importing `{place}` failed: {_located(error)}") from error
    except (Exception, SystemExit) as error:
        raise ImportError(f"importing `{place}` failed: {_located(error)}") from error


def _missing_file(path: Path, reference: str) -> str:
    """Say that a file is not there, and which ones are."""
    if not path.suffix and path.with_suffix(".py").is_file():
        return f"`{reference}` names no file; write `{path}.py:...`, with its ending."
    there = sorted(file.name for file in path.parent.glob("*.py") if file.is_file())
    found = f"`{path.parent}` holds {_listed(path.name, there)}" if there else "check the path"
    return f"`{path}` is not a file, seen from `{Path.cwd()}`; {found}."


def _missing_name(reference: str, place: str, name: str, owner: Any) -> str:
    """Say that a name is not defined, and which ones are."""
    inside = getattr(owner, "__dict__", {})
    home = inside.get("__module__", inside.get("__name__"))
    names = [key for key in inside if key[0] != "_" and not _imported(inside[key], home)]
    defined = f"it defines {_listed(name, names)}" if names else "it defines nothing public"
    return f"`{reference}` asks for `{name}`, which `{place}` does not define; {defined}."


def _imported(value: object, home: str | None) -> bool:
    """Whether a value was made elsewhere, and only imported where it was found."""
    if inspect.isroutine(value) or inspect.isclass(value):
        return getattr(value, "__module__", home) != home
    return isinstance(value, ModuleType)


def _listed(wanted: str, names: list[str]) -> str:
    """List a few names, the likely one first."""
    close = difflib.get_close_matches(wanted, names, n=1)
    shown = close + [name for name in names if name not in close]
    rest = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    hint = f" (did you mean `{close[0]}`?)" if close else ""
    return ", ".join(f"`{name}`" for name in shown[:8]) + rest + hint


def _kind(value: object) -> str:
    """Name what a value is, for a message."""
    return f"class `{value.__name__}`" if isinstance(value, type) else f"`{type(value).__name__}`"


def _located(error: BaseException) -> str:
    """Write an error with the line of the user's code it comes from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text + _line([frame for frame in _frames(error) if frame.filename != __file__])


def locate(error: BaseException) -> str:
    """The line of the user's code that an error came from, in brackets for the end of a message.

    Args:
        error: What was raised while flatgauge ran.

    Returns:
        `` (file.py:12)``, or nothing if no line of the user's was running.
    """
    home = str(Path(__file__).parent)
    frames = _frames(error)
    own = [number for number, frame in enumerate(frames) if frame.filename.startswith(home)]
    if not own:
        return ""
    inside = [frame for frame in frames[own[0] :] if not frame.filename.startswith(home)]
    return _line(_not_of_packages(inside))


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where an error passed through, the place it was raised at last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith("<")]


def _line(frames: list[traceback.FrameSummary]) -> str:
    """The last line outside of packages, or the last of all."""
    own = _not_of_packages(frames) or frames
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _not_of_packages(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    foreign = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
    return [frame for frame in frames if not frame.filename.startswith(foreign)]
