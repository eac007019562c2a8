"""Graphs of models that were read before, used again where the model is still the same."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from flatgauge.graph import ModelGraph
from flatgauge.likeness import form, known_likeness

#: Graphs that are kept, those used last.
_MOST = 16

#: How far graph and model may differ, in units of rounding and relative to the largest output.
_ROUNDINGS, _COARSEST = 1e3, 1e-2

_kept: OrderedDict[Any, ModelGraph] = OrderedDict()


def graph_of(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    samples: int,
    chosen: Callable[[Any], Any] = lambda output: output,
) -> ModelGraph:
    """The graph of a model: exported, or one that was exported from a model like it.

    Reading a graph takes seconds; a copy of a model, rescaled or trained further, has the same.
    A kept graph is used only for a model of the same code and settings (see `likeness`), and
    only after it has computed the model's own outputs on the example: what the key cannot see
    (a file that the model reads, say) leads to a new export, not to another model's numbers.

    Args:
        model: The model, in eval mode.
        arguments: Positional inputs of an example call.
        keywords: Keyword inputs of an example call.
        samples: How many samples the example holds, at least two; 0 where its tensors do not
            have the samples in front.
        chosen: Takes from the model's output what is wanted of it.

    Returns:
        The graph; it may be shared, and is not to be changed.

    Raises:
        UnsupportedGraphError: If torch.export cannot follow the model.
    """
    forms = pytree.tree_map(
        lambda leaf: form(leaf) if isinstance(leaf, Tensor) else leaf, (arguments, keywords)
    )
    key = known_likeness(model, forms, samples, chosen)
    if key in _kept and _reproduces(_kept[key], model, (arguments, keywords), chosen):
        _kept.move_to_end(key)
        return _kept[key]
    graph = ModelGraph(model, arguments, keywords, samples, chosen)
    if key is not None:
        _kept[key] = graph
        while len(_kept) > _MOST:
            _kept.popitem(last=False)
    return graph


def forget() -> None:
    """Let go of all graphs."""
    _kept.clear()


@torch.no_grad()
def _reproduces(
    graph: ModelGraph, model: nn.Module, inputs: Any, chosen: Callable[[Any], Any]
) -> bool:
    """Whether a graph gives the outputs of a model."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())

    def copies() -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    try:
        output = chosen(functional_call(model, copies(), *copy.deepcopy(inputs)))
        expected = pytree.tree_leaves(output)
        if len(expected) != len(graph.outputs):
            return False
        for node, value in zip(graph.outputs, expected, strict=True):
            if not isinstance(node, fx.Node):
                if isinstance(value, Tensor) or node != value:
                    return False
                continue
            leaves = pytree.tree_leaves(copy.deepcopy(inputs))
            if not _close(graph.run(copies(), leaves, {}, node), value):
                return False
    except Exception:  # The exporter will say what is wrong.
        return False
    return True


def _close(got: Any, expected: Any) -> bool:
    """Whether outputs agree as far as rounding lets them."""
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        return type(got) is type(expected) and bool(got == expected)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if not got.numel() or not got.is_floating_point():
        return torch.equal(got, expected)
    allowed = min(_ROUNDINGS * torch.finfo(got.dtype).eps, _COARSEST)
    return bool((got - expected).abs().max() <= allowed * expected.abs().max())
