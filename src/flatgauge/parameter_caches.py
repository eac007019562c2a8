"""Tables in which a model keeps what it computed from its parameters, to be read in later calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatgauge.snapshot import Snapshot


class ParameterCache(NamedTuple):
    """A dict of a module that holds tensors computed from parameters.

    Attributes:
        path: Its name in the model.
        module: The module.
        attribute: The name of the dict.
    """

    path: str
    module: nn.Module
    attribute: str

    def empty(self) -> None:
        """Make the model compute its entries again."""
        getattr(self.module, self.attribute).clear()


def find_caches(model: nn.Module, call: Callable[[], Any]) -> list[ParameterCache]:
    """Find the tables that hide parameters from derivatives: filled in an earlier call.

    Tables of tensors are emptied, and those that the model fills again with the same entries,
    computed from its parameters, are caches. (LeViT keeps its attention biases so in eval mode.)

    Args:
        model: The model; left as it was.
        call: Calls it on an example, with parameters that require gradients.

    Returns:
        The caches that hold anything.
    """
    filled = {
        ParameterCache(f"{path}.{name}".lstrip("."), module, name): set(table)
        for path, module in model.named_modules()
        for name, table in vars(module).items()
        if type(table) is dict and name not in ("_parameters", "_buffers", "_modules") and table
        if all(isinstance(item, Tensor) for item in table.values())
    }
    if not filled:
        return []
    found = _filled_again(model, call, filled)
    if found is None:  # The model needs what is in some of them.
        single = (_filled_again(model, call, {cache: keys}) for cache, keys in filled.items())
        found = [cache for caches in single for cache in caches or ()]
    return found


def _filled_again(
    model: nn.Module, call: Callable[[], Any], filled: dict[ParameterCache, set[Any]]
) -> list[ParameterCache] | None:
    """The tables that get their entries again, computed from parameters; None for an error."""
    before = Snapshot(model)
    try:
        for cache in filled:
            cache.empty()
        with torch.enable_grad():
            call()
        return [cache for cache, keys in filled.items() if _depends(cache, keys)]
    except Exception:
        return None
    finally:
        before.restore()


def _depends(cache: ParameterCache, keys: set[Any]) -> bool:
    """Whether a table has its entries, and some of them depend on parameters."""
    table = getattr(cache.module, cache.attribute)
    return keys == set(table) and any(item.requires_grad for item in table.values())
