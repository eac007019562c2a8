"""Copies of a user's model, and what stands in their way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


def computed(model: nn.Module) -> dict[int, Tensor]:
    """Copies of the tensors that a model computes and holds (pruning, old weight norms).

    Args:
        model: The model.

    Returns:
        The copies by the identity of what they are copied from: a memo for `copy.deepcopy`, which
        copies no computed tensors by itself.
    """
    held = [value for module in model.modules() for value in vars(module).values()]
    return {id(v): v.detach().clone() for v in held if isinstance(v, Tensor) and not v.is_leaf}


@contextmanager
def copying(model: nn.Module) -> Iterator[None]:
    """Copy a model in the block; what fails there says what cannot be copied.

    Args:
        model: The model.

    Yields:
        Nothing.

    Raises:
        ValueError: If the model holds something that cannot be copied.
        MemoryError: If there is no room for the copy.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        place = next(_uncopyable(model), None)
        if place is None:
            raise
        raise ValueError(
            f"the model cannot be copied, and this is measured on a copy: {place} "
            f"({type(error).__name__}: {error}). Keep locks, open files and connections out of "
            "the model's attributes, or give the class that holds them a `__deepcopy__`."
        ) from error


def _uncopyable(model: nn.Module) -> Iterator[str]:
    """The attributes of a model that cannot be copied."""
    # Modules stand for themselves: each is looked at once.
    known = {id(module): module for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, {**known, **computed(module)})
            except Exception:
                yield f"`{f'{path}.{name}'.lstrip('.')}` is of type {type(value).__name__}"
