"""How a model is swept: which parameters come out exactly, where they are read, what it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from flatgauge.curvature.degree import linearity
from flatgauge.curvature.parameter_taps import BATCH_NORMS, Chain, chain_from, link
from flatgauge.curvature.sample_gradients import columns_together
from flatgauge.curvature.tail import TOGETHER
from flatgauge.graph import ModelGraph, SampleAxis
from flatgauge.layers import Layer, find_layers
from flatgauge.nodes import arguments_of, op_name, shape_of

#: Last operations that belong to the loss rather than to the model: curved, without parameters.
_HEADS = ("log_softmax", "softmax", "sigmoid", "log_sigmoid", "tanh", "exp", "log", "softplus")


_MIXED = "samples cannot be told apart in what it is multiplied by"


@dataclass(frozen=True)
class Site:
    """Where a parameter is read.

    Attributes:
        role: ``"layer"``, ``"bias"`` (of a layer), ``"norm"`` (scale or shift of a batch-norm), or
            ``"point"`` for anything else.
        node: The op that reads it.
    """

    role: str
    node: fx.Node


@dataclass(frozen=True)
class Plan:
    """How one graph is swept.

    Attributes:
        graph: The model's graph.
        logits: The node whose output the loss is taken of.
        heads: The last operations, from there to the model's output.
        layers: The layers among the trainable parameters.
        exact: The trainable parameters whose block curvature the sweep gives exactly.
        reasons: For every other one, why not.
        sites: Where the exact ones are read; those that the output does not depend on, nowhere.
    """

    graph: ModelGraph
    logits: fx.Node
    heads: tuple[fx.Node, ...]
    layers: dict[str, Layer]
    exact: tuple[str, ...]
    reasons: dict[str, str]
    sites: dict[str, Site]

    def without(self, mixed: Mapping[str, str]) -> Plan:
        """The plan with fewer exact parameters, each with the reason."""
        exact = tuple(name for name in self.exact if name not in mixed)
        sites = {name: site for name, site in self.sites.items() if name not in mixed}
        return replace(self, exact=exact, sites=sites, reasons=self.reasons | dict(mixed))

    def signature(self) -> list[Any]:
        """What must be the same for all batches that are swept together."""
        layers = [
            (name, layer.kind, layer.out_axis, layer.in_axis, layer.groups, layer.bias)
            for name, layer in self.layers.items()
        ]
        return [self.exact, {n: site.role for n, site in self.sites.items()}, layers]

    def finish(self, logits: Tensor) -> Tensor:
        """The model's output, from where the sweep's part of it ends."""
        for head in self.heads:
            (source,) = head.all_input_nodes
            logits = link(head, source)(logits)
        return logits

    def head_names(self) -> list[str]:
        """The names of the last operations."""
        return [op_name(head) for head in self.heads]

    def head_axis(self) -> int:
        """The axis along which the first of the last operations works."""
        axis = int(arguments_of(self.heads[0]).get("dim", 0))
        return axis % len(shape_of(self.logits))

    def times_read(self, name: str) -> int:
        """How often the weight of a layer is read."""
        return _readers(self.graph.parameters[name], self.layers[name].node)[1]

    def activations_per_sample(self) -> int:
        """How many numbers the graph computes from one sample."""
        return sum(self.numbers(node) for node in self.graph.nodes if op_name(node))

    def numbers_per_sample(self) -> int:
        """How many numbers a sweep holds for one sample at most.

        Activations and what is passed back through them, what every layer gathers, patches,
        columns and gradients where layers have many positions, and columns that are to be kept.

        Returns:
            The number.
        """
        columns = self.outputs_per_sample()
        numbers = 2 * self.activations_per_sample() + 4 * columns
        transient = 0
        for layer in self.layers.values():
            inputs, outputs = self.numbers(layer.input), self.numbers(layer.node)
            weights = math.prod(layer.shape)
            numbers += (3 + min(columns, 64)) * outputs + 3 * inputs
            if layer.kind == "linear":
                transient = max(transient, min(columns, TOGETHER) * inputs)
            if self.many_positions(layer):
                together = columns_together(layer)
                taps = math.prod(layer.shape[2:]) if layer.kind != "linear" else 1
                numbers += taps * inputs + together * outputs
                transient = max(transient, together * (outputs + 2 * weights))
        return numbers + transient

    def numbers(self, node: fx.Node) -> int:
        """How many numbers a node gives for one sample; none for what does not grow with them."""
        if not shape_of(node):
            return 0
        return math.prod(self.graph.sizes(node, 3)) - math.prod(self.graph.sizes(node, 2))

    @cached_property
    def layers_by_node(self) -> dict[fx.Node, Layer]:
        """The layers by the op that contracts them."""
        return {layer.node: layer for layer in self.layers.values()}

    def has_positions(self) -> bool:
        """Whether any layer is applied more than once to every sample."""
        return any(self.many_positions(layer) for layer in self.layers.values())

    def outputs_per_sample(self) -> int:
        """How many outputs the loss is taken of."""
        return self.numbers(self.logits)

    def axis(self, node: fx.Node) -> SampleAxis:
        """Where the samples lie in what a node gives, among those that exact parameters meet."""
        axis = self.graph.sample_axis(node)
        assert axis is not None  # Else the parameter would not be in `exact`.
        return axis

    def many_positions(self, layer: Layer) -> bool:
        """Whether a layer is applied more than once to every sample."""
        return layer.kind != "linear" or self.numbers(layer.node) > layer.shape[layer.out_axis]


def make_plan(graph: ModelGraph, output: fx.Node, trainable: tuple[str, ...]) -> Plan:
    """Read from the graph what can be swept.

    Args:
        graph: The model's graph.
        output: The node that the loss is taken of.
        trainable: The parameters asked for.

    Returns:
        The plan.
    """
    heads: list[fx.Node] = []
    while op_name(output) in _HEADS and len(output.all_input_nodes) == 1:
        heads.insert(0, output)
        (output,) = output.all_input_nodes
    layers = {n: layer for n, layer in find_layers(graph).items() if n in trainable}
    found = linearity(graph, [output])
    front = graph.sample_axis(output)
    sites: dict[str, Site] = {}
    reasons: dict[str, str] = {}
    for name in sorted(trainable, key=lambda n: n not in layers):  # Layers come first.
        if name in found.reasons:
            reasons[name] = f"the output is curved in it: {found.reasons[name]}"
        elif name not in found.degrees:
            continue  # The output does not depend on it: its curvature is zero.
        elif front is None or front.axis != 0 or str(shape_of(output)[0]) != graph.symbol:
            reasons[name] = "the outputs do not have the samples in front"
        else:
            site = _site(graph, name, layers, sites)
            if isinstance(site, str):
                reasons[name] = site
            else:
                sites[name] = site
    exact = tuple(name for name in trainable if name not in reasons)
    return Plan(graph, output, tuple(heads), layers, exact, reasons, sites)


def without_sweep(graph: ModelGraph, trainable: tuple[str, ...], reason: str) -> Plan:
    """A plan for a graph of which nothing can be swept.

    Args:
        graph: The model's graph.
        trainable: The parameters asked for.
        reason: Why.

    Returns:
        The plan: it knows the layers, none of them exact.
    """
    layers = {n: layer for n, layer in find_layers(graph).items() if n in trainable}
    node = next(n for n in graph.outputs if isinstance(n, fx.Node))
    return Plan(graph, node, (), layers, (), dict.fromkeys(trainable, reason), {})


def _site(
    graph: ModelGraph, name: str, layers: Mapping[str, Layer], sites: Mapping[str, Site]
) -> Site | str:
    """Where and how a parameter that the output is linear in is read, or why that is no use."""
    node = graph.parameters[name]
    layer = layers.get(name)
    chain, times = _readers(node, None if layer is None else layer.node)
    if times > 1:
        return f"it is read {times} times"
    reader = chain.reader if layer is None else layer.node
    if graph.sample_axis(reader) is None:
        return f"samples cannot be told apart where {op_name(reader)} reads it"
    if layer is not None:
        precision = reader.meta["val"].dtype
        if precision != node.meta["val"].dtype:
            return f"it is read in {str(precision).removeprefix('torch.')}"
        return Site("layer", reader) if _told_apart(graph, layer) else _MIXED
    given = arguments_of(reader)
    for owner in layers.values():
        if owner.node is reader and owner.bias == name:
            plain = shape_of(node) == (shape_of(reader)[_unit_axis(owner)],)
            if plain and given.get("bias", given.get("self")) is node:
                return Site("bias", reader) if _told_apart(graph, owner) else _MIXED
    axis = graph.sample_axis(reader)
    if op_name(reader) in BATCH_NORMS and given["weight"] is given["bias"]:
        return "it is both scale and shift of a norm"
    if op_name(reader) in BATCH_NORMS and node in (given["weight"], given["bias"]):
        return Site("norm", reader) if axis is not None and axis.axis == 0 else _MIXED
    taken = [other for other, site in sites.items() if site.node is reader]
    if any(sites[other].role != "point" for other in taken):
        return f"{op_name(reader)} reads it beside `{taken[0]}`"
    if any(layer.node is reader for layer in layers.values()) or op_name(reader) in BATCH_NORMS:
        return f"there is no rule for reading it by {op_name(reader)} in this way"
    others = [n for n in reader.all_input_nodes if n is not chain.end]
    known = all(isinstance(n.meta.get("val"), Tensor) for n in others)
    return Site("point", reader) if known else f"there is no rule for {op_name(reader)} with sizes"


def _readers(parameter: fx.Node, contraction: fx.Node | None) -> tuple[Chain, int]:
    """The ops between a parameter and its reader, and how often the parameter is read."""
    node = parameter
    while len(node.users) == 1:
        (reader,) = node.users
        if reader is contraction or len(reader.all_input_nodes) > 1 or len(reader.users) != 1:
            break
        node = reader
    return chain_from(parameter) if len(parameter.users) == 1 else Chain(), len(node.users)


def _told_apart(graph: ModelGraph, layer: Layer) -> bool:
    """Whether the samples of a layer's input can be told apart, and where it expects them."""
    axis = graph.sample_axis(layer.input)
    return axis is not None and (layer.kind == "linear" or axis.axis == 0)


def _unit_axis(layer: Layer) -> int:
    """The axis of a layer's output along which its units lie."""
    return -1 if layer.kind == "linear" else 1
