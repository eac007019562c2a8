"""What of a model `torch.compile` has taken over, and how to run it without."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from flatgauge.code_names import closed_over, installed, names_in


def eager(model: nn.Module) -> AbstractContextManager[Any]:
    """Run compiled parts of a model eagerly: a compiled backward pass has no derivative.

    Args:
        model: The model.

    Returns:
        The context; it does nothing where nothing is compiled, as torch's own control flow
        (`torch.cond`) needs the compiler.

    Raises:
        TypeError: If torch is too old to switch compiled parts off.
    """
    parts = compiled_parts(model)
    if not parts:
        return nullcontext()
    set_stance = getattr(torch.compiler, "set_stance", None)
    if set_stance is None:
        raise TypeError(
            f"{in_words(parts)} of the model is compiled (`torch.compile`), and a compiled graph "
            "has no second derivative; pass a model that was not compiled, or use torch 2.6 or "
            "later."
        )
    stance: AbstractContextManager[Any] = set_stance("force_eager")
    return stance


def is_compiled(module: Any) -> bool:
    """Whether calls of a module go through the compiler."""
    wrapped = isinstance(getattr(module, "_orig_mod", None), nn.Module)
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def compiled_parts(model: nn.Module) -> list[str]:
    """The modules, methods and functions of a model that are compiled, by name.

    Modules anywhere in it are found, and functions that its modules hold as attributes, as
    methods, in closures, or as globals that their code names; not those inside installed packages.

    Args:
        model: The model.

    Returns:
        The names, each once; "" for the model itself.
    """
    if "torch._dynamo" not in sys.modules:  # Whatever is compiled has loaded the compiler.
        return []
    found: dict[str, None] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if is_compiled(module):
            found[path] = None
            continue
        for name, value in vars(module).items():
            if isinstance(value, (types.FunctionType, types.MethodType)):
                found |= dict.fromkeys(_in(value, f"{path}.{name}".lstrip("."), seen))
        if id(type(module)) in seen:
            continue
        seen.add(id(type(module)))
        for base in type(module).__mro__:
            if not installed(base.__module__):
                for name, value in vars(base).items():
                    found |= dict.fromkeys(_in(value, name, seen))
    return list(found)


def in_words(parts: list[str]) -> str:
    """Names of parts as a phrase."""
    names = [f"`{part}`" if part else "the whole" for part in parts]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _in(value: Any, name: str, seen: set[int]) -> Iterator[str]:
    """The compiled functions among a value and what it reads."""
    value = getattr(value, "__func__", value)  # Of methods, class methods, static methods.
    if not isinstance(value, types.FunctionType) or id(value) in seen:
        return
    seen.add(id(value))
    if hasattr(value, "_torchdynamo_orig_callable"):
        if not getattr(value, "_torchdynamo_disable", False):
            yield name
        return
    if installed(value.__module__):
        return
    for inner in closed_over(value):
        yield from _in(inner, getattr(inner, "__name__", name), seen)
    for other in names_in(value.__code__)[0] & value.__globals__.keys():
        yield from _in(value.__globals__[other], other, seen)
