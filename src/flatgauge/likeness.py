"""What a model computes, apart from the values of its weights, as a key that can be compared."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import os
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatgauge.code_names import closed_over, imported_in, installed, names_in

#: Values that are the same where they are equal and of one type.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice)
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)

#: What belongs to every module and does not steer its forward pass in eval mode.
BOOKKEEPING = frozenset(
    {
        "training",
        "_parameters",
        "_buffers",
        "_modules",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_is_full_backward_hook",
        "_compiled_call_impl",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)

#: Objects that are looked into at most; a model that holds more has no key.
_MOST = 100_000


#: What code names that reads the environment of the process.
_ENVIRONMENT = frozenset({"environ", "getenv", "environb", "getenvb"})


class OpaqueError(Exception):
    """Something that the model may read cannot be compared."""


def likeness(model: nn.Module, *others: Any) -> tuple[Any, ...]:
    """A key that two models share only if they run the same code on the same settings.

    It holds classes, code (with what it closes over and the globals it names), the tree of
    modules, shapes, precisions, strides and ties of parameters and buffers, forward hooks, and
    the value of every other attribute, tensors included. It leaves out the values of parameters
    and buffers, and the train/eval mode: models are read in eval mode.

    Args:
        model: The model.
        others: What else the key should tell apart.

    Returns:
        The key. It keeps functions and classes alive, but neither the model nor its tensors.

    Raises:
        OpaqueError: If the model holds something whose state cannot be seen: a generator, an
            open file, an object of an extension.
    """
    reader = _Reader(model)
    surroundings = (
        torch.__version__,
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(),
    )
    return (surroundings, *reader.modules(), reader.of(others))


def known_likeness(model: nn.Module, *others: Any) -> tuple[Any, ...] | None:
    """The same, or None where it cannot be told whether two models are alike."""
    try:
        key = likeness(model, *others)
        hash(key)
    except (OpaqueError, TypeError, RecursionError):
        return None
    return key


class _Reader:
    """Turns objects into keys; an object met again is told by when it was met first."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[int, int] = {}
        self._alive: list[Any] = []  # So that no two objects have one identity.
        self._model = model
        self._paths: dict[int, str] = {}
        for path, module in model.named_modules():
            self._paths[id(module)] = path

    def modules(self) -> Iterator[Any]:
        """Every module under each of its names."""
        for path, module in self._model.named_modules(remove_duplicate=False):
            first = self._paths[id(module)]
            if first != path:
                yield path, first
                continue
            yield path, self._class(type(module))
            yield tuple(self._tensor(*item) for item in module._parameters.items())
            kept = frozenset(module._buffers) - module._non_persistent_buffers_set
            yield tuple((*self._tensor(*i), i[0] in kept) for i in module._buffers.items())
            for name, value in vars(module).items():
                if name not in BOOKKEEPING and (name != "sparse" or not _embeds(module)):
                    yield name, self.of(value)

    def of(self, value: Any) -> Any:
        """The key of any value."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, repr(value) if kind in (float, complex, slice) else value
        if isinstance(value, (enum.Enum, *_TORCH, types.ModuleType, types.BuiltinFunctionType)):
            return value
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if isinstance(value, type):
            return self._class(value)
        if kind is tuple:
            return kind, *(self.of(item) for item in value)
        if id(value) in self._paths:
            return nn.Module, self._paths[id(value)]
        if id(value) in self._places:
            return "again", self._places[id(value)]
        self._places[id(value)] = len(self._places)
        self._alive.append(value)
        if len(self._places) > _MOST:
            raise OpaqueError(f"more than {_MOST} objects")
        return self._looked_into(value)

    def _looked_into(self, value: Any) -> Any:
        """The key of a value that is met for the first time."""
        kind = type(value)
        if isinstance(value, Tensor):
            return _held(value)
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise OpaqueError("an array of objects")
            return kind, str(value.dtype), value.shape, _digest(np.ascontiguousarray(value))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return kind, self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, functools.partial):
            return kind, self.of((value.func, value.args, value.keywords))
        parts: list[Any] = [kind if kind.__module__ == "builtins" else self._class(kind)]
        if isinstance(value, Mapping):
            parts += [(self.of(key), self.of(item)) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            parts += [self.of(item) for item in value]
        elif isinstance(value, AbstractSet):
            parts += sorted((self.of(item) for item in value), key=repr)
        elif isinstance(value, _PLAIN[:6]) or not (hasattr(value, "__dict__") or _slots(kind)):
            raise OpaqueError(f"an object of type {kind.__name__}")
        for slot in _slots(kind):
            if "__slots__" not in vars(slot.__objclass__):  # Of an extension: there may be more.
                raise OpaqueError(f"an object of type {kind.__name__}")
            try:
                parts.append((slot.__name__, self.of(slot.__get__(value, kind))))
            except AttributeError:
                parts.append((slot.__name__, "empty"))
        if hasattr(value, "__dict__"):
            parts += [(name, self.of(item)) for name, item in vars(value).items()]
        return tuple(parts)

    def _class(self, kind: type) -> Any:
        """A class, with the code and settings of those of its bases that are not torch's."""
        if id(kind) in self._places:
            return kind
        self._places[id(kind)] = len(self._places)
        parts: list[Any] = [kind]
        for base in kind.__mro__[:-1]:
            if base is nn.Module:
                break
            if not installed(base.__module__):
                parts += [
                    (name, self._mentioned(value))
                    for name, value in list(vars(base).items())
                    if not name.startswith("__") or name == "__call__"
                ]
            else:
                parts.append(vars(base).get("forward"))
        return tuple(parts)

    def _function(self, function: types.FunctionType) -> Any:
        """A function: its code, what it closes over, and the globals that it names."""
        cells = closed_over(function)
        if installed(function.__module__):
            return function.__code__, self.of(cells)
        held = self.of((function.__defaults__, function.__kwdefaults__, cells))
        names, attributes = names_in(function.__code__)
        seen = {id(function.__globals__)}
        named = [*self._named(function.__globals__, names, attributes, seen)]
        for module in imported_in(function):
            named += [module, *self._named(vars(module), attributes, attributes, seen)]
        if attributes & _ENVIRONMENT:
            named.append(tuple(sorted(os.environ.items())))
        return function.__code__, held, tuple(named)

    def _named(
        self,
        table: Mapping[str, Any],
        names: frozenset[str],
        attributes: frozenset[str],
        seen: set[int],
    ) -> Iterator[Any]:
        """What code finds under names in a module, and in the modules that are found there."""
        for name in sorted(names & table.keys()):
            value = table[name]
            if not isinstance(value, types.ModuleType) or installed(value.__name__):
                yield name, self._mentioned(value)
            elif id(vars(value)) not in seen:
                seen.add(id(vars(value)))
                inner = self._named(vars(value), attributes, attributes, seen)
                yield name, value, tuple(inner)
            else:
                yield name, value

    def _mentioned(self, value: Any) -> Any:
        """What code mentions: looked into as far as it can be, else told by its identity."""
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget, value.fset
        known = len(self._places)
        try:
            return self.of(value)
        except OpaqueError:
            while len(self._places) > known:  # What was met on the way is not in the key.
                self._places.popitem()
            return _Same(value)

    def _tensor(self, name: str, tensor: Tensor | None) -> tuple[Any, ...]:
        """A parameter or buffer, without its values."""
        if tensor is None:
            return (name, None)
        if id(tensor) in self._places:
            return name, "again", self._places[id(tensor)]
        self._places[id(tensor)] = len(self._places)
        self._alive.append(tensor)
        return (name, *form(tensor), tensor.requires_grad)


class _Same:
    """Is equal to what stands for the same object, while that exists."""

    def __init__(self, value: Any) -> None:
        self._identity = id(value)
        try:
            self._value: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __eq__(self, other: object) -> bool:
        found = self._value()
        return isinstance(other, _Same) and found is not None and found is other._value()

    def __hash__(self) -> int:
        return hash(self._identity)


def _held(tensor: Tensor) -> Any:
    """A tensor that is no parameter or buffer: the exporter may have made it a constant."""
    if tensor.layout is not torch.strided or tensor.is_meta or type(tensor) is not Tensor:
        raise OpaqueError(f"a tensor of type {type(tensor).__name__}")
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return (*form(tensor), _digest(content))


def form(tensor: Tensor) -> tuple[Any, ...]:
    """All that there is to a tensor but its values."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tuple(tensor.shape), strides, tensor.dtype, str(tensor.device)


def _embeds(module: nn.Module) -> bool:
    """Whether `sparse` says how gradients are stored, not what is computed."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _digest(array: Any) -> bytes:
    return hashlib.blake2b(memoryview(array).cast("B"), digest_size=16).digest()


def _slots(kind: type) -> list[Any]:
    """What a class keeps outside the dictionaries of its objects."""
    return [
        value
        for base in kind.__mro__
        for value in vars(base).values()
        if inspect.ismemberdescriptor(value) and value.__name__ not in ("__dict__", "__weakref__")
    ]
