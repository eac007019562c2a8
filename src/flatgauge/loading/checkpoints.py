"""Trained weights from a file, put into a model.

`load_weights` reads a checkpoint without running code in it, finds the tensors among whatever else
was saved, matches their names to the model's, and loads all of them or none. It returns notes on
what it did to make them fit, and raises an error that lists what does not.
"""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatgauge.loading.files import check_readable, expand

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
    lazy = [name for name, value in own.items() if is_lazy(value)]
    if lazy:
        raise ValueError(
            f"`{lazy[0]}` of the model has no shape yet; needed is a model that knows its "
            f"shapes; call it once on an input before loading weights."
        )
    hollow = [name for name, value in own.items() if isinstance(value, Tensor) and value.is_meta]
    if hollow:
        raise ValueError(
            f"`{hollow[0]}` of the model is on the device `meta` and cannot hold weights; give the "
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
        key = _weights_key(content) if isinstance(content, Mapping) else None
        if key is not None:
            keys.append(key)
            content = content[key]
        elif isinstance(content, (list, tuple)) and len(content) == 1:
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


def _weights_key(content: Mapping[str, Any]) -> str | None:
    """The entry that holds the weights, if they lie deeper."""
    for name in _KEYS:
        inner = content.get(name)
        if isinstance(inner, Mapping) or (isinstance(inner, (list, tuple)) and len(inner) == 1):
            return name
    return None


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
    problems = _misfits(own, weights, missing, unexpected) or refusal
    if problems:
        for name, value in before.items():
            own[name].copy_(value)
    return problems


def _memory(value: Any) -> object:
    """Identify a tensor by the memory it names, so that tied weights are one."""
    if not isinstance(value, Tensor) or not value.numel():
        return object()
    return (value.data_ptr(), value.shape, value.stride())


def _misfits(
    own: Mapping[str, Any],
    weights: Mapping[str, Any],
    missing: list[str],
    unexpected: list[str],
) -> list[str]:
    """List the names and shapes that differ, a handful of each kind."""
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
    return _list_kinds(kinds)


def _unusable(own: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """List the tensors that hold no plain numbers of the model's kind."""
    kinds: dict[str, list[str]] = {}
    for name, value in weights.items():
        if not (isinstance(value, Tensor) and isinstance(own.get(name), Tensor)):
            continue
        if value.is_meta:
            kind = "without values (saved on the device meta)"
        elif value.layout is not torch.strided or value.is_quantized:
            kind = "sparse or quantized (save them with `.to_dense()` or `.dequantize()`)"
        elif value.is_complex() and not own[name].is_complex():
            kind = "complex, where the model's are real"
        else:
            continue
        kinds.setdefault(kind, []).append(f"`{name}`")
    return _list_kinds(kinds)


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
        (str(value.dtype), str(own[name].dtype))
        for name, value in weights.items()
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor)
    )
    return [
        f"{count} tensors stored as {old[6:]} were read as {new[6:]}"
        for (old, new), count in pairs.items()
        if old != new
    ]
