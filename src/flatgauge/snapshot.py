"""What a model holds beside the values of its weights, remembered and put back in content."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Values that cannot change in place, which most attributes are.
_FIXED = frozenset({bool, int, float, complex, str, bytes, type(None)})

#: The tables of a module whose tensors are its weights: others stand in for them in every call.
_WEIGHTS = frozenset({"_parameters", "_buffers"})

#: Containers that are emptied by `clear`, and nothing else happens.
_TABLES = frozenset({dict, OrderedDict, list, set, deque})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


class Snapshot:
    """The attributes of every module, and the contents of all that they hold.

    Contents are those of dicts (all tables of hooks among them), lists, sets and deques at any
    depth, of tensors and arrays that are no parameters or buffers, and the states of random
    generators. Modules that are held in a list are looked into like registered ones.

    Args:
        model: The model.
        generators: Whether to remember the states of random generators.
    """

    def __init__(self, model: nn.Module, *, generators: bool = True) -> None:
        self._empty: list[Any] = []  # Apart from the others, as most tables of hooks are.
        self._held: list[Callable[[], bool]] = []
        seen: set[int] = set()
        waiting: list[Any] = [model]
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                table = vars(value)
                self._held.append(_mapping(table))
                for name, held in table.items():
                    if type(held) in _FIXED:
                        continue
                    if name in _WEIGHTS:  # Remembered by identity, everything else in content.
                        self._keep(held, _mapping)
                    elif type(held) in _TABLES and not held:
                        self._empty.append(held)
                    else:
                        waiting.append(held)
            elif isinstance(value, _CONTAINERS):
                self._keep(value, _contents)
                inside = value.values() if isinstance(value, dict) else value
                waiting += [item for item in inside if type(item) not in _FIXED]
            else:
                restore = _contents(value) or (_generator(value) if generators else None)
                if restore is not None:
                    self._held.append(restore)

    def restore(self) -> bool:
        """Put everything back.

        Returns:
            Whether anything had changed.
        """
        filled = [container for container in self._empty if container]
        for container in filled:
            container.clear()
        return any([restore() for restore in self._held]) or bool(filled)

    def _keep(self, container: Any, contents: Callable[[Any], Callable[[], bool] | None]) -> None:
        """Remember what a container holds."""
        if not container and type(container) in _TABLES:
            self._empty.append(container)
        elif (restore := contents(container)) is not None:
            self._held.append(restore)


def _contents(value: Any) -> Callable[[], bool] | None:
    """A function that puts the contents of a value back, None for what is not looked into."""
    if isinstance(value, dict):
        return _mapping(value)
    if isinstance(value, (list, deque)):
        return _sequence(value)
    if isinstance(value, set):
        return _set(value)
    if type(value) is Tensor:
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return _array(value)
    return None


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def _mapping(table: dict[Any, Any]) -> Callable[[], bool]:
    keys, values = list(table), list(table.values())
    # The methods of the class itself: one derived from it may do more.
    base: Any = OrderedDict if isinstance(table, OrderedDict) else dict

    def restore() -> bool:
        if _same(list(table), keys) and _same(list(table.values()), values):
            return False
        base.clear(table)
        for key, value in zip(keys, values, strict=True):
            base.__setitem__(table, key, value)
        return True

    return restore


def _sequence(items: list[Any] | deque[Any]) -> Callable[[], bool]:
    before = list(items)
    base: Any = deque if isinstance(items, deque) else list

    def restore() -> bool:
        if _same(list(items), before):
            return False
        base.clear(items)
        base.extend(items, before)
        return True

    return restore


def _set(items: set[Any]) -> Callable[[], bool]:
    before = set(items)

    def restore() -> bool:
        if items == before:
            return False
        set.clear(items)
        set.update(items, before)
        return True

    return restore


def _tensor(tensor: Tensor) -> Callable[[], bool] | None:
    """Of a tensor that a forward pass may write to."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if tensor.is_inference() or not tensor.is_leaf:  # Not written to; or computed from weights.
        return None
    version, before, slope = tensor._version, tensor.detach().clone(), tensor.requires_grad

    def restore() -> bool:
        if tensor._version == version:
            return False
        with torch.no_grad():
            tensor.detach_().copy_(before).requires_grad_(slope)
        return True

    return restore


def _array(array: np.ndarray[Any, Any]) -> Callable[[], bool] | None:
    if not array.flags.writeable or array.dtype.hasobject:
        return None
    before = array.copy()

    def restore() -> bool:
        if array.tobytes() == before.tobytes():
            return False
        array[...] = before
        return True

    return restore


def _generator(value: Any) -> Callable[[], bool] | None:
    """Of a source of random numbers that the model has for itself."""
    read: Any
    write: Any
    if isinstance(value, torch.Generator):
        read, write = value.get_state, value.set_state
    elif isinstance(value, random.Random):
        read, write = value.getstate, value.setstate
    elif isinstance(value, np.random.RandomState):
        read, write = value.get_state, value.set_state
    elif isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        read, write = lambda: bits.state, lambda state: setattr(bits, "state", state)
    else:
        return None
    before = read()

    def restore() -> bool:
        changed = repr(read()) != repr(before)
        write(before)
        return changed

    return restore
