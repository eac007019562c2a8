"""What the commands share: a surface from the words of a command line."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flatgauge.loading.datasets import load_dataset
from flatgauge.loading.models import build_model, load_weights, resolve
from flatgauge.measures import registry
from flatgauge.measures.registry import BALANCED
from flatgauge.runtime.distributed import ProcessGroup
from flatgauge.runtime.resources import MIN_BUDGET, format_bytes, parse_bytes, resident_bytes
from flatgauge.runtime.resources import set_threads as set_threads
from flatgauge.surface.losses import NAMED
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.find import surface_gauge
from flatgauge.symmetry.gauge import multiply

#: What torch and others load when they are first used (the exporter, solvers). Measured.
_LIBRARIES = 144 * 2**20

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def open_surface(
    *,
    model: str,
    weights: str | None,
    data: str,
    loss: str,
    split: str,
    limit: int | None,
    mean: str | None,
    std: str | None,
    dtype: str | None,
    device: str,
    memory: str,
    weight_decay: float,
    seed: int,
    processes: ProcessGroup | None = None,
) -> tuple[LossSurface, list[str]]:
    """Build the surface that a command line describes.

    Args:
        model: Reference to a model or its factory.
        weights: Checkpoint file.
        data: Name of or reference to the data.
        loss: Name of or reference to the loss; "output" for the model's own.
        split: Which part of the data.
        limit: How many samples.
        mean: Numbers with commas, per channel.
        std: Numbers with commas, per channel.
        dtype: Precision.
        device: Where to run.
        memory: Budget.
        weight_decay: Penalty.
        seed: Of a factory that draws its weights.
        processes: Who measures together; None for this process alone.

    Returns:
        The surface, and notes on the weights.
    """
    surfaces, notes = open_surfaces(
        {"": (model, weights)},
        data=data,
        loss=loss,
        split=split,
        limit=limit,
        mean=mean,
        std=std,
        dtype=dtype,
        device=device,
        memory=memory,
        weight_decay=weight_decay,
        seed=seed,
        processes=processes,
    )
    return surfaces[""], notes


def open_surfaces(
    entries: Mapping[str, tuple[str, str | None]],
    *,
    data: str,
    loss: str,
    split: str,
    limit: int | None,
    mean: str | None,
    std: str | None,
    dtype: str | None,
    device: str,
    memory: str,
    weight_decay: float,
    seed: int,
    processes: ProcessGroup | None = None,
) -> tuple[dict[str, LossSurface], list[str]]:
    """Build the surfaces of several models on the same data, which are read once.

    Args:
        entries: Reference to the model, and checkpoint or None, by name.
        data: As for `open_surface`, and so are all others.
        loss: Name of the loss.
        split: Which part of the data.
        limit: How many samples.
        mean: Per channel.
        std: Per channel.
        dtype: Precision.
        device: Where to run.
        memory: Budget.
        weight_decay: Penalty.
        seed: Of factories.
        processes: Who measures together.

    Returns:
        The surfaces by name, and notes on the weights.

    Raises:
        ValueError: If a word is not understood.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"`--dtype {dtype}` is unknown; use {' or '.join(_DTYPES)}.")
    _check_memory(memory)
    chosen_loss = _loss(loss)
    modules, notes = _modules(entries, device, seed)
    samples = load_dataset(
        data, split=split, limit=limit, mean=_numbers("mean", mean), std=_numbers("std", std)
    )
    room = memory if device.startswith(("cuda", "mps")) else _room(memory, modules)
    surfaces = {
        name: LossSurface(
            module,
            chosen_loss,
            samples,
            memory=room,
            dtype=None if dtype is None else _DTYPES[dtype],
            weight_decay=weight_decay,
            processes=processes,
        )
        for name, module in modules.items()
    }
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
    held = resident_bytes()
    if memory == "auto" or held is None:
        return memory
    # Every surface has a copy of its model's parameters; its own is part of its budget.
    sizes = [sum(p.nbytes for p in module.parameters()) for module in modules.values()]
    copies = sum(sizes) - max(sizes)
    total = parse_bytes(memory)
    left = total - held - _LIBRARIES - copies
    if left < MIN_BUDGET:
        needed = held + _LIBRARIES + copies + 10 * max(sizes)
        raise MemoryError(
            f"`--memory {memory}` bounds the whole process: models, data and libraries hold "
            f"{format_bytes(held)} of it already, and {format_bytes(_LIBRARIES + copies)} will be "
            f"loaded yet, so that nothing is left to measure with; give {format_bytes(needed)} or "
            "more, or take fewer samples with `--limit`."
        )
    return left


def _modules(
    entries: Mapping[str, tuple[str, str | None]], device: str, seed: int
) -> tuple[dict[str, nn.Module], list[str]]:
    """The models with their weights, where they are to run, and notes on how these fitted."""
    modules: dict[str, nn.Module] = {}
    notes = []
    for name, (model, weights) in entries.items():
        module, told = open_model(model, weights, seed)
        notes += [f"{name}: {note}" if name else note for note in told]
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


def read_certified(words: list[str], *, every: bool) -> dict[str, dict[str, Any]] | str | None:
    """Read which measures to certify.

    Args:
        words: As for `read_measures`.
        every: Whether all are asked for.

    Returns:
        What `fg.certify` takes as `measures`.

    Raises:
        ValueError: If both are given.
    """
    if every and words:
        raise ValueError("`--all` and `-m` exclude each other; give one of them.")
    return "all" if every else read_measures(words)


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
