"""From the words of a command line to models, surfaces and measures."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatgauge.analysis.formatting import one_line
from flatgauge.cli.options import SurfaceOptions
from flatgauge.cli.streams import log
from flatgauge.cli.torchrun import device_of, processes
from flatgauge.loading.datasets import load_dataset
from flatgauge.loading.models import build_model, load_weights, resolve
from flatgauge.measures import registry
from flatgauge.measures.registry import BALANCED
from flatgauge.runtime.resources import (
    MIN_BUDGET,
    format_bytes,
    parse_bytes,
    resident_bytes,
    set_threads,
)
from flatgauge.surface.losses import NAMED
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.find import surface_gauge
from flatgauge.symmetry.gauge import multiply

#: A model's reference and its checkpoint, None for the model as its factory makes it.
Entry = tuple[str, str | None]

_CHECKPOINTS = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")

#: What torch and others load when they are first used (the exporter, solvers). Measured.
_LIBRARIES = 144 * 2**20


# -- models and their names -----------------------------------------------------------------------


def read_models(words: Sequence[str]) -> list[Entry]:
    """Read ``MODEL CHECKPOINT ... MODEL CHECKPOINT ...``: a checkpoint is for the model before it.

    Args:
        words: References to models (``file.py:factory``) and files.

    Returns:
        One entry per checkpoint, and one for a model that no checkpoint follows.

    Raises:
        ValueError: If a checkpoint comes before any model.

    Example:
        >>> read_models(["nets.py:lenet", "a.pt", "b.pt", "nets.py:pretrained"])
        [('nets.py:lenet', 'a.pt'), ('nets.py:lenet', 'b.pt'), ('nets.py:pretrained', None)]
    """
    entries: list[Entry] = []
    for word in words:
        if is_model(word):
            entries.append((word, None))
        elif not entries:
            raise ValueError(
                f"`{word}` is a checkpoint without a model before it; write "
                f"`path/to/file.py:factory {word} ...`."
            )
        elif entries[-1][1] is None:
            entries[-1] = entries[-1][0], word
        else:
            entries.append((entries[-1][0], word))
    return entries


def is_model(word: str) -> bool:
    """Whether a word refers to a model, ``file.py:factory``, and not to a file."""
    _, colon, name = word.rpartition(":")
    if not colon or word.endswith(_CHECKPOINTS) or Path(word).is_file():
        return False
    return all(part.isidentifier() for part in name.split("."))


def names_of(entries: Sequence[Entry]) -> list[str]:
    """A short name for every entry, different for all.

    Args:
        entries: Models with their checkpoints.

    Returns:
        The stems of the files; where these are the same, with as many folders before them as it
        takes, then with their endings and their models. A model without file has the name of its
        factory.

    Example:
        >>> names_of([("nets.py:net", f"runs/{run}/best.pt") for run in (1, 2)])
        ['1/best', '2/best']
    """
    deepest = max(len(Path(file or ".").parts) for _, file in entries) or 1
    ways: list[Callable[[Entry], str]] = [
        partial(_path_end, depth=depth) for depth in range(1, deepest + 1)
    ]
    ways += [lambda entry: entry[1] or entry[0], lambda entry: " ".join(filter(None, entry))]
    for way in ways:
        names = [one_line(way(entry)) for entry in entries]
        if len(set(names)) == len(names):
            return names
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):  # The very same entry twice.
        seen[name] += 1
        names[number] = f"{name} ({seen[name]})" if seen[name] > 1 else name
    return names


def _path_end(entry: Entry, depth: int) -> str:
    """The last parts of a checkpoint's path, without the ending."""
    model, file = entry
    if file is None:
        return model.rpartition(":")[2]
    return "/".join(Path(file).with_suffix("").parts[-depth:])


def _labels(names: str, count: int) -> list[str]:
    """The names that were given, if they fit."""
    labels = [one_line(name.strip()) for name in names.split(",")]
    if len(set(labels)) != count or len(labels) != count or not all(labels):
        raise ValueError(
            f"`--names {names}` has {len(set(filter(None, labels)))} different names, and there "
            f"are {count} models; give one for each, with commas between them."
        )
    return labels


# -- surfaces -------------------------------------------------------------------------------------


def open_surface(
    model: str, weights: str | None, options: SurfaceOptions
) -> tuple[LossSurface, list[str]]:
    """The surface of one model, and notes on its weights, which are logged as well."""
    surfaces, notes = _open({"": (model, weights)}, options)
    return surfaces[""], notes


def open_surfaces(
    words: Sequence[str], options: SurfaceOptions, names: str | None = None
) -> tuple[dict[str, LossSurface], list[str]]:
    """Build the surfaces of several models on the same data, which are read once.

    Args:
        words: Models, each with the checkpoints that follow it.
        options: Data, loss, and how to run.
        names: What to call them, with commas; None for the names of their files.

    Returns:
        The surfaces by name, and notes on the weights, which are logged as well.
    """
    entries = read_models(words)
    labels = names_of(entries) if names is None else _labels(names, len(entries))
    return _open(dict(zip(labels, entries, strict=True)), options)


def _open(
    entries: Mapping[str, Entry], options: SurfaceOptions
) -> tuple[dict[str, LossSurface], list[str]]:
    set_threads(options.threads)
    _check_memory(options.memory)
    loss, device = _loss(options.loss), device_of(options.device)
    modules, notes = _modules(entries, device, options.seed)
    samples = load_dataset(
        options.data,
        split=options.split,
        limit=options.limit,
        mean=_numbers("mean", options.mean),
        std=_numbers("std", options.std),
    )
    on_gpu = device.startswith(("cuda", "mps"))
    room = options.memory if on_gpu else _room(options.memory, modules)
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    surfaces = {
        name: LossSurface(
            module,
            loss,
            samples,
            memory=room,
            dtype=dtype,
            weight_decay=options.weight_decay,
            processes=processes(),
        )
        for name, module in modules.items()
    }
    for note in notes:
        log(f"note: {note}")
    return surfaces, notes


def _check_memory(memory: str) -> None:
    """Refuse what is not an amount of memory, before anything is read."""
    try:
        parse_bytes("1GiB" if memory == "auto" else memory)
    except ValueError:
        raise ValueError(
            f"`--memory {memory}` is not an amount of memory of 1 MiB or more; write it as 2GiB, "
            "500MB or a number of bytes, or leave it out."
        ) from None


def _room(memory: str, modules: Mapping[str, nn.Module]) -> str | int:
    """What is left of a bound on the whole process, now that models and data are loaded."""
    resident = resident_bytes()
    if memory == "auto" or resident is None:
        return memory
    # Every surface has a copy of its model's parameters; its own is part of its budget.
    sizes = [sum(p.nbytes for p in module.parameters()) for module in modules.values()]
    copies = sum(sizes) - max(sizes)
    left = parse_bytes(memory) - resident - _LIBRARIES - copies
    if left < MIN_BUDGET:
        needed = resident + _LIBRARIES + copies + 10 * max(sizes)
        raise MemoryError(
            f"`--memory {memory}` bounds the whole process: models, data and libraries hold "
            f"{format_bytes(resident)} of it already, and {format_bytes(_LIBRARIES + copies)} will "
            f"be loaded yet, so that nothing is left to measure with; give {format_bytes(needed)} "
            "or more, or take fewer samples with `--limit`."
        )
    return left


def _modules(
    entries: Mapping[str, Entry], device: str, seed: int
) -> tuple[dict[str, nn.Module], list[str]]:
    """The models with their weights, where they are to run, and notes on how these fitted."""
    modules: dict[str, nn.Module] = {}
    notes = []
    for name, (model, weights) in entries.items():
        module, remarks = open_model(model, weights, seed)
        notes += [f"{name}: {remark}" if name else remark for remark in remarks]
        empty = [key for key, value in module.state_dict().items() if value.is_meta]
        if empty:
            raise ValueError(
                f"`{empty[0]}` of `{model}` has no values (it was made on the device meta); make "
                "the model on the device cpu."
            )
        try:
            modules[name] = module.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"`--device {device}` cannot be used here: {error}") from error
    return modules, notes


def open_model(model: str, weights: str | None, seed: int) -> tuple[nn.Module, list[str]]:
    """Build the model that a command line names, and load its weights.

    Args:
        model: Reference to a model or its factory.
        weights: Checkpoint file.
        seed: Of a factory that draws its weights.

    Returns:
        The model, and notes on the weights.
    """
    torch.manual_seed(seed)  # A factory that draws weights draws the same ones every time.
    module = copy.deepcopy(build_model(model))  # One object under two names has two weights.
    if weights is None:
        return module, ["no checkpoint: taken as the factory makes the model"]
    return module, load_weights(module, weights)


def rescaled_surface(surface: LossSurface, *, seed: int) -> LossSurface:
    """The same function, written differently: every free scale moved by a power of two.

    Args:
        surface: The surface; not changed.
        seed: Of the factors.

    Returns:
        A surface on a rescaled copy of the model.

    Raises:
        ValueError: If nothing of the model can be rescaled.
    """
    gauge = surface_gauge(surface)
    if not gauge.dim:
        raise ValueError(
            "nothing of this model can be rescaled without changing its function; leave "
            f"`--rescaled` out. {gauge.describe()}"
        )
    move = gauge.sample(generator=torch.Generator().manual_seed(seed), powers_of_two=True)
    twin = surface.copy()
    multiply(twin.model, gauge.factors(move))
    return twin


# -- measures, losses, numbers --------------------------------------------------------------------


def read_measures(words: list[str]) -> dict[str, dict[str, Any]] | None:
    """Read measures with their options, and check that they exist.

    Args:
        words: Each ``name`` or ``name:option=value,option=value``, with ``balanced:`` in front to
            measure the balanced form of the model.

    Returns:
        Options by name of the measure; None for all measures if there are no words.

    Raises:
        ValueError: If a measure does not exist or an option cannot be read.

    Example:
        >>> read_measures(["hessian_trace:tolerance=0.05,method=hutchinson"])
        {'hessian_trace': {'tolerance': 0.05, 'method': 'hutchinson'}}
    """
    wanted: dict[str, dict[str, Any]] = {}
    for word in words:
        gauge = BALANCED if word.startswith(BALANCED) else ""
        name, _, settings = word.removeprefix(gauge).partition(":")
        name = gauge + name
        known = registry[name].options
        if name in wanted:
            raise ValueError(
                f"`{name}` is asked for twice, and a report has one number of each measure; run "
                "twice, once with each of the options."
            )
        options = {}
        for setting in filter(None, settings.split(",")):
            key, equals, value = setting.partition("=")
            if not equals or key not in known:
                raise ValueError(
                    f"`{setting}` in `-m {word}` is no option of `{name}`; write "
                    f"`-m {name}:option=value,option=value`, with one of {', '.join(known)}."
                )
            options[key] = _value(value)
        wanted[name] = options
    return wanted or None


def _value(text: str) -> Any:
    """A number, None, or the text itself."""
    known = {"none": "None", "null": "None", "true": "True", "false": "False"}
    try:
        return ast.literal_eval(known.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text


def _loss(text: str) -> str | Callable[[Any, Any], Any] | None:
    """Read the name of a loss, or where to find one."""
    if text == "output":
        return None
    if ":" not in text:
        if text != "auto" and text not in NAMED:
            raise ValueError(
                f"`--loss {text}` is not a loss flatgauge knows; use auto, "
                f"{', '.join(sorted(NAMED))}, "
                "output (the model's own), or path/to/file.py:function."
            )
        return text
    function: Callable[[Any, Any], Any] = resolve(text)
    return function


def _numbers(name: str, text: str | None) -> list[float] | None:
    """Read numbers separated by commas."""
    if text is None:
        return None
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"`--{name} {text}` must be numbers separated by commas, one per channel."
        ) from None
