"""Models of the user's: built by code that a reference names, with weights from a file.

A reference is ``path/to/file.py:name`` or ``package.module:name``. `resolve` imports what it names,
`build_model` also calls it; both return the user's object, or raise an error that says what to
write instead. A file runs as a module of its own, with its folder importable while it runs.

`load_weights` reads a checkpoint without running code in it, finds the tensors among whatever else
was saved, matches their names to the model's, and loads all of them or none.
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
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatgauge.loading.files import check_readable, expand
from flatgauge.runtime.isolation import describe_error

# The folders of modules that user files imported from next to them, by module name: another folder
# may have modules of its own by these names.
_NEIGHBOURS: dict[str, Path] = {}


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
            found: Any = _import_file(expand(place), reference)
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
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        item.name
        for item in factory_parameters(factory)
        if item.default is item.empty and item.kind not in optional and item.name not in options
    ]
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


def factory_parameters(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a factory; none if its signature is unknown."""
    try:
        return list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        return []


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
    return (expand(place).parent if is_file(place) else Path()).resolve()


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
    inside = getattr(owner, "__dict__", {})  # Without what was made elsewhere and imported.
    home = inside.get("__module__", inside.get("__name__"))
    names = [
        key
        for key, value in inside.items()
        if key[0] != "_"
        and not isinstance(value, ModuleType)
        and (
            getattr(value, "__module__", home) == home
            or not (inspect.isroutine(value) or inspect.isclass(value))
        )
    ]
    defined = f"it defines {_list_names(name, names)}" if names else "it defines nothing public"
    return f"`{reference}` asks for `{name}`, which `{place}` does not define; {defined}."


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


#: Where training scripts keep the weights among other things, most specific name first.
_KEYS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model_weights",
    "model",
    "network",
    "net",
    "module",
    "weights",
    "params",
)

#: Names listed in a message.
_SHOWN = 5

#: Messages of torch that mean nothing to the user.
_RAW = re.compile(r"Weights only|enforce fail|\.cc:\d")


def load_weights(model: nn.Module, path: str | PathLike[str]) -> list[str]:
    """Put the weights of a file into a model in place, all of them or none.

    Reads `.safetensors`, and everything `torch.save` writes that is data only: code in a
    pickle is never run. Weights may lie deeper in the file (`state_dict`, `model`, ...), and
    names may carry what `DataParallel` or `torch.compile` put before them. Numbers are
    converted to the model's own dtype and device.

    Returns:
        What was done to make the file fit, one sentence each.

    Raises:
        ValueError: If the file is not a checkpoint, or does not fit the model.

    Example:
        >>> import tempfile
        >>> model, saved = nn.Linear(2, 1), nn.Linear(2, 1).half()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"state_dict": saved.state_dict()}, f"{folder}/a.pt")
        ...     for note in load_weights(model, f"{folder}/a.pt"):
        ...         print(note)
        took the weights under `state_dict`
        2 tensors stored as float16 were read as float32
    """
    path = expand(path)
    own = model.state_dict()
    for name, value in own.items():
        if is_lazy(value):
            raise ValueError(
                f"`{name}` of the model has no shape yet; needed is a model that knows its "
                f"shapes; call it once on an input before loading weights."
            )
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"`{name}` of the model is on the device `meta` and cannot hold weights; give the "
                "model memory with `model.to_empty(device='cpu')`, or build it on a real device."
            )
    weights, notes = _unwrap(_read(path), path)
    weights, renamed = _rename(weights, set(own))
    problems = _transfer(model, weights)
    if problems:
        raise ValueError(
            f"`{path}` does not fit the model, which was left as it was: "
            f"{'; '.join(problems)}. Build the model the weights were trained in, or give the "
            f"file that belongs to it."
        )
    return notes + renamed + _conversions(own, weights)


def _read(path: Path) -> Any:
    """Read what a file holds, running nothing."""
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"checkpoint `{path}` does not exist (working directory `{Path.cwd()}`)"
        )
    check_readable(path)
    if path.is_dir():
        inside = ", ".join(f"`{file.name}`" for file in sorted(path.iterdir())[:_SHOWN])
        raise ValueError(
            f"`{path}` is a folder; needed is a file, of which it has {inside or 'none'}."
        )
    if not path.stat().st_size:
        raise ValueError(f"`{path}` is empty; needed are weights; save or download it again.")
    _check_sums(path)
    try:
        if path.suffix == ".safetensors":
            import safetensors.torch

            return safetensors.torch.load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # About odd pickles; the error below is clearer.
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # Damaged files end in nearly every kind of error.
        raise ValueError(_unreadable(path, error)) from error


def _check_sums(path: Path) -> None:
    """Refuse an archive whose contents are not those that were written: `torch.load` reads them."""
    try:
        with zipfile.ZipFile(path) as archive:
            # Files written without checksums (`torch.serialization.set_crc32_options`) have none.
            known = any(item.CRC for item in archive.infolist())
            damaged = archive.testzip() if known else None
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError, EOFError):
        return  # No archive, or one that cannot be read: said by what reads it.
    if damaged is not None:
        raise ValueError(
            f"`{path}` is damaged: `{damaged}` in it does not have the checksum that was written "
            "with it, so the weights are not those that were saved; copy or download it again."
        )


def _unreadable(path: Path, error: Exception) -> str:
    """The message for a file that gave no weights, with what to do."""
    save = "`torch.save(model.state_dict(), path)` or `safetensors.torch.save_model(model, path)`"
    code = re.search(r"GLOBAL (\S+)", str(error))
    if code:
        return (
            f"`{path}` holds more than numbers: to open it, `{code[1]}` would have to be run. "
            f"Needed are the weights alone, as a pickle can run any code; if you trust the "
            f"file, open it where it was made and save them with {save}."
        )
    if "TorchScript" in str(error):
        return f"`{path}` is a TorchScript program; needed are weights; save them with {save}."
    kind = "safetensors" if path.suffix == ".safetensors" else "PyTorch"
    reason = (str(error).strip() or "it ends too early").splitlines()[0]
    if len(reason) > 160 or _RAW.search(reason) or isinstance(error, LookupError):
        reason = "it cannot be read as plain data"
    return (
        f"`{path}` is cut short or not a {kind} file ({reason}); needed is what {save} writes, "
        f"with its ending `.pt` or `.safetensors`; check it, or download it again."
    )


def _unwrap(content: Any, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Find the weights among whatever else was saved."""
    keys: list[str] = []
    for _ in range(8):  # Bounded: a file may hold itself.
        named = {key: content.get(key) for key in _KEYS} if isinstance(content, Mapping) else {}
        if key := next((key for key, inner in named.items() if _may_hold(inner)), None):
            keys.append(key)
            content = content[key]
        elif _may_hold(content) and not isinstance(content, Mapping):
            content = content[0]
    where = "".join(f"[{key!r}]" for key in keys)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"`{path}`{where} holds `{type(content).__name__}`; needed are tensors by name; "
            f"save `model.state_dict()`."
        )
    if not any(isinstance(value, Tensor) for value in content.values()):
        names = ", ".join(f"`{name}`" for name in list(content)[:_SHOWN]) or "nothing"
        raise ValueError(
            f"`{path}`{where} holds {names}; needed are tensors by name, there or under one of "
            f"{', '.join(f'`{key}`' for key in _KEYS)}; save `model.state_dict()`."
        )
    notes = [f"took the weights under `{'` → `'.join(keys)}`"] if keys else []
    return {str(key): value for key, value in content.items()}, notes


def _may_hold(value: Any) -> bool:
    """Whether weights may be in a value: a mapping, or one thing in a list."""
    return isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and len(value) == 1)


def _rename(weights: dict[str, Any], own: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Match names without regard to what wrappers put before them, on either side."""
    stripped = {_strip_wrappers(name): name for name in own}
    target = {name: name if name in own else _strip_wrappers(name) for name in weights}
    if len(stripped) == len(own):
        target = {
            name: stripped.get(_strip_wrappers(name), short) for name, short in target.items()
        }
    if len(set(target.values())) < len(target):
        return weights, []  # Two entries would get one name: take the names as they are.
    notes = []
    for prefix in ("module.", "_orig_mod."):
        change = sum((prefix in new) - (prefix in old) for old, new in target.items())
        if change:
            verb = "added the model's own" if change > 0 else "removed the"
            notes.append(f"{verb} prefix `{prefix}` in {abs(change)} names")
    return {target[name]: value for name, value in weights.items()}, notes


def _strip_wrappers(name: str) -> str:
    """Strip a name of the marks of `DataParallel` and `torch.compile`."""
    return re.sub(r"^(module\.)+", "", re.sub(r"\b_orig_mod\.", "", name))


def _transfer(model: nn.Module, weights: dict[str, Any]) -> list[str]:
    """Load the weights, or restore the model and return what does not fit."""
    own = model.state_dict()
    if unusable := _unusable(own, weights):
        return unusable
    before = {name: value.clone() for name, value in own.items() if isinstance(value, Tensor)}
    refusal = []
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        refusal = [str(error)]
        missing = [name for name in own if name not in weights]
        unexpected = [name for name in weights if name not in own]
    here = {_memory(own[name]) for name in weights if name in own}
    missing = [name for name in missing if _memory(own.get(name)) not in here]  # or tied to it
    reshaped = [
        f"`{name}` {_shape(value)} in the file, {_shape(own[name])} in the model"
        for name, value in weights.items()
        if name in own and _shape(value) != _shape(own[name])
    ]
    kinds = {
        "missing from the file": [f"`{name}` {_shape(own.get(name))}" for name in missing],
        "unknown to the model": [f"`{name}` {_shape(weights[name])}" for name in unexpected],
        "of another shape": reshaped,
    }
    problems = _list_kinds(kinds) or refusal
    if problems:
        for name, value in before.items():
            own[name].copy_(value)
    return problems


def _memory(value: Any) -> object:
    """Identify a tensor by the memory it names, so that tied weights are one."""
    if not isinstance(value, Tensor) or not value.numel():
        return object()
    return (value.data_ptr(), value.shape, value.stride())


def _unusable(own: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """List the tensors that hold no plain numbers of the model's kind."""
    kinds: dict[str, list[str]] = {
        "without values (saved on the device meta)": [],
        "sparse or quantized (save them with `.to_dense()` or `.dequantize()`)": [],
        "complex, where the model's are real": [],
    }
    hollow, packed, complex_ones = kinds.values()
    for name, value, held in _common_tensors(own, weights):
        if value.is_meta:
            hollow.append(f"`{name}`")
        elif value.layout is not torch.strided or value.is_quantized:
            packed.append(f"`{name}`")
        elif value.is_complex() and not held.is_complex():
            complex_ones.append(f"`{name}`")
    return _list_kinds(kinds)


def _common_tensors(
    own: Mapping[str, Any], weights: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Names of tensors that file and model have, with both."""
    for name, value in weights.items():
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor):
            yield name, value, own[name]


def _list_kinds(kinds: Mapping[str, list[str]]) -> list[str]:
    """How many problems there are of each kind, with a handful of names."""
    return [
        f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)}"
        for kind, names in kinds.items()
        if names
    ]


def _shape(value: Any) -> str:
    """Write the shape of a tensor, or the type of anything else."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _conversions(own: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """Notes on dtypes that were converted."""
    pairs = Counter(
        (str(value.dtype), str(held.dtype)) for _, value, held in _common_tensors(own, weights)
    )
    return [
        f"{count} tensors stored as {old[6:]} were read as {new[6:]}"
        for (old, new), count in pairs.items()
        if old != new
    ]
