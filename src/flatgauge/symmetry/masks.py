"""Parameters that are read through a constant mask, as those of pruned layers are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from flatgauge.nodes import arguments_of, op_name, shape_of


def mask_of(node: fx.Node, weight: fx.Node, constants: Mapping[fx.Node, Any]) -> Tensor | None:
    """Where an op that multiplies a tensor by a constant hides it.

    Args:
        node: The op.
        weight: The tensor.
        constants: The values of constant nodes.

    Returns:
        Whether the constant is zero, entry by entry of the tensor; None where the op is no such
        product, or changes the tensor's shape.
    """
    if op_name(node) not in ("mul", "multiply") or shape_of(node) != shape_of(weight):
        return None
    factors = list(arguments_of(node).values())[:2]
    others = [factor for factor in factors if factor is not weight]
    value = constants.get(others[0]) if len(others) == 1 else None
    if not isinstance(value, Tensor):
        return None
    return (value == 0).expand(shape_of(weight))


def masked_form(weight: fx.Node, constants: Mapping[fx.Node, Any]) -> fx.Node:
    """The one product with a constant that reads a parameter, else the parameter itself."""
    if len(weight.users) == 1:
        (user,) = weight.users
        if mask_of(user, weight, constants) is not None:
            return user
    return weight


def hidden_entries(
    names: Mapping[fx.Node, str], constants: Mapping[fx.Node, Any]
) -> dict[str, Tensor]:
    """The entries of parameters that every op reads times a constant zero.

    Args:
        names: The names of the parameters, by node.
        constants: The values of constant nodes.

    Returns:
        For every parameter that has such entries, which they are.
    """
    masks: dict[str, list[Tensor]] = {}
    for node, name in names.items():
        for user in node.users:
            mask = mask_of(user, node, constants)
            masks.setdefault(name, []).append(
                torch.zeros((), dtype=torch.bool) if mask is None else mask
            )
    found = {}
    for name, parts in masks.items():
        whole = parts[0]
        for part in parts[1:]:
            whole = whole & part
        if bool(whole.any()):
            found[name] = whole
    return found
