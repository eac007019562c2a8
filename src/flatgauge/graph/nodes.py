"""Single nodes of an exported graph: which op, on what, of which shape, from which line."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

#: What ops that read no more than a shape fill it with.
_FILLINGS = {"zeros_like": 0, "new_zeros": 0, "zero": 0, "ones_like": 1, "new_ones": 1}

#: The file from which models are called when they are exported: no code of the user's.
_CALLER = os.path.join(os.path.dirname(__file__), "export.py")


def op_name(node: fx.Node) -> str:
    """The name of a node's operation without namespace and overload, "" for no operation."""
    if node.op != "call_function":
        return ""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return str(getattr(node.target, "__name__", node.target))
    return str(schema.name).rpartition("::")[2]


def call_op(node: fx.Node, *arguments: Any, **keywords: Any) -> Any:
    """Call a node's operation."""
    assert callable(node.target)
    return node.target(*arguments, **keywords)


def filling(node: fx.Node) -> float | None:
    """What an operation that reads no more than a shape fills it with; None for others."""
    if not all(isinstance(size, int) for size in shape_of(node)):
        return None
    if op_name(node) not in ("full_like", "new_full", "fill"):
        return _FILLINGS.get(op_name(node))
    arguments = arguments_of(node)
    given = arguments.get("fill_value", arguments.get("value"))
    return given if isinstance(given, (int, float)) else None


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = arguments_of(node)  # Attention, dropout and the like may draw nothing.
    return given.get("dropout_p") != 0 and given.get("train", given.get("training")) is not False


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names of the operation's schema, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): value for i, value in enumerate(node.args)} | dict(node.kwargs)
    named = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            named[argument.name] = node.args[position]
        else:
            default = argument.default_value if argument.has_default_value() else None
            named[argument.name] = node.kwargs.get(argument.name, default)
    return named


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """The shape of a node's (first) output, sizes possibly symbolic; () where it has none."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def is_floating(node: fx.Node) -> bool:
    """Whether a node gives numbers that can be differentiated."""
    values = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    return any(value.is_floating_point() or value.is_complex() for value in values)


def source_line(node: fx.Node) -> str:
    """Where in the user's code an operation stands: ``file.py:12``, "" where unknown."""
    home = os.path.dirname(torch.__file__)
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [place for place in frames if not place[0].startswith(home) and place[0] != _CALLER]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""
