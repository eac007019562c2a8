"""Caches in a model's output: what a language model keeps for its next call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What models of Hugging Face transformers call their caches.
_NAMES = ("past_key_values", "cache_params", "mems")

#: Where the classes of caches are defined.
_HOME = "transformers.cache_utils"


def without_caches(output: Any) -> Any:
    """A model's output without what it keeps for its next call.

    Keys and values that a language model stores are by-products: they are no part of the function
    from inputs to predictions.

    Args:
        output: What the model returns.

    Returns:
        The rest; the output itself where it holds no cache.
    """
    if not caches_in(output):
        return output
    if isinstance(output, Mapping):
        return {key: value for key, value in output.items() if not _is_cache(key, value)}
    return tuple(value for value in output if not _is_cache("", value))


def caches_in(output: Any) -> tuple[str, ...]:
    """The names of the caches in a model's output; the class of one that has no name.

    Args:
        output: What the model returns.

    Returns:
        The names.
    """
    if isinstance(output, Mapping):
        return tuple(str(key) for key, value in output.items() if _is_cache(key, value))
    if isinstance(output, (tuple, list)):
        return tuple(type(value).__name__ for value in output if _is_cache("", value))
    return ()


def _is_cache(key: Any, value: Any) -> bool:
    """Whether an entry of an output is a cache."""
    return key in _NAMES or any(base.__module__ == _HOME for base in type(value).__mro__)
