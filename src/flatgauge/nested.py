"""Tensors inside nested tuples, lists and mappings: what a batch is made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nested structure, in a fixed order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for key in tree:
            yield from tensors(tree[key])
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors(item)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield everything in a nested structure that is no tuple, list or mapping."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def fingerprint(tree: Any, *, depth: int = 8) -> Hashable:
    """What tells structures apart by content; objects of unknown kind by their attributes."""
    kind = type(tree).__name__
    if depth == 0 or tree is None or isinstance(tree, (str, bytes, int, float, complex)):
        return kind if depth == 0 else (kind, repr(tree))
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided:
            tree = tree.to_dense()
        flat = tree.detach().cpu().contiguous().reshape(-1)
        return kind, str(tree.dtype), tuple(tree.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(tree, np.ndarray):
        return kind, str(tree.dtype), tree.shape, tree.tobytes()
    if isinstance(tree, Mapping):
        return kind, tuple((repr(k), fingerprint(v, depth=depth - 1)) for k, v in tree.items())
    if isinstance(tree, (tuple, list)):
        return kind, tuple(fingerprint(item, depth=depth - 1) for item in tree)
    if isinstance(tree, (set, frozenset)):
        return kind, frozenset(fingerprint(item, depth=depth - 1) for item in tree)
    slots = [name for part in type(tree).__mro__ for name in getattr(part, "__slots__", ())]
    inside = {name: getattr(tree, name, None) for name in slots} | getattr(tree, "__dict__", {})
    return kind, fingerprint(inside, depth=depth - 1)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Rebuild a nested structure with every tensor replaced; other leaves stay as they are."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def as_tensors(tree: Any) -> Any:
    """Turn the NumPy arrays and plain mappings of a nested structure into tensors and dicts."""
    if isinstance(tree, np.ndarray):
        return torch.as_tensor(tree)
    if isinstance(tree, Mapping):
        return {key: as_tensors(value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [as_tensors(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def concatenate(trees: list[Any]) -> Any:
    """Join structures of one shape along the sample dimension of each of their tensors."""
    first = trees[0]
    if len(trees) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(trees)
    if isinstance(first, Mapping):
        return {key: concatenate([tree[key] for tree in trees]) for key in first}
    if isinstance(first, (tuple, list)):
        items = [concatenate([tree[i] for tree in trees]) for i in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first


def signature(tree: Any) -> Any:
    """Describe a structure up to its number of samples: equal signatures concatenate."""
    if isinstance(tree, Tensor):
        return (tree.dtype, tree.device.type, tuple(tree.shape[1:]))
    if isinstance(tree, Mapping):
        return tuple((key, signature(tree[key])) for key in tree)
    if isinstance(tree, (tuple, list)):
        return (type(tree), tuple(signature(item) for item in tree))
    return ("constant", repr(tree))
