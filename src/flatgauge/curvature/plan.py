"""How a model is swept: which parameters come out exactly, and what listens where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from flatgauge.curvature.degree import linearity
from flatgauge.curvature.factors import KeptColumns
from flatgauge.curvature.gathers import Gather, Positions
from flatgauge.curvature.layer_taps import LayerTap
from flatgauge.curvature.normed_taps import NormedTap, norm_behind
from flatgauge.curvature.parameter_taps import (
    BATCH_NORMS,
    BatchNormTap,
    Chain,
    PointTap,
    chain_from,
    link,
)
from flatgauge.curvature.pooled_taps import PooledTap, gains, pooling_behind
from flatgauge.curvature.rows import Rows
from flatgauge.curvature.sample_gradients import columns_together
from flatgauge.curvature.tail import TOGETHER, Link, Tail
from flatgauge.curvature.taps import OF_ALL, Chunk, Tap, VectorGather
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

    def taps(self, chunk: Chunk, values: Mapping[str, Tensor], names: frozenset[str]) -> list[Tap]:
        """Place taps for some parameters.

        Args:
            chunk: The chunk that is swept.
            values: The parameters' values.
            names: Which of the exact parameters to gather.

        Returns:
            The taps.
        """
        read: dict[fx.Node, dict[str, Site]] = {}
        for name, site in self.sites.items():
            if name in names:
                read.setdefault(site.node, {})[name] = site
        if not chunk.wanted & set(OF_ALL):  # Biases, norms, ... have no other parts.
            names = names & self.layers.keys()
        last, relus = self._last_layers(read)
        taken = {layer.node for layer in last}
        taps: list[Tap] = [self._tail(chunk, values, last, relus, names)] if last else []
        for node, sites in read.items():  # Layers come first: norms behind them are taken then.
            layer = self._layers_by_node.get(node)
            norm = None if layer is None or layer.name not in sites else norm_behind(layer)
            is_norm = any(site.role == "norm" for site in sites.values())
            if node in taken:
                continue
            if layer is not None and norm is not None:
                behind = self._norm_tap(chunk, norm, names)
                taps.append(self._normed_tap(chunk, values, layer, behind))
                taken.add(norm)
            elif is_norm or not names.isdisjoint(sites):
                taps.append(self._tap(chunk, values, node, sites, names))
        return taps

    @cached_property
    def _layers_by_node(self) -> dict[fx.Node, Layer]:
        return {layer.node: layer for layer in self.layers.values()}

    def _normed_tap(
        self, chunk: Chunk, values: Mapping[str, Tensor], layer: Layer, norm: BatchNormTap
    ) -> NormedTap:
        """The tap at a convolution with a batch-norm behind it."""
        gather, keeper = self._gathers(chunk, layer, values[layer.name])
        assert gather is None or isinstance(gather, Positions)  # Convolutions have positions.
        axes = self._axis(layer.input), self._axis(layer.node)
        return NormedTap(chunk, layer, axes, gather, keeper, norm)

    def _last_layers(
        self, read: Mapping[fx.Node, Mapping[str, Site]]
    ) -> tuple[list[Layer], list[fx.Node]]:
        """The perceptron at the end: its layers that are read, and the ReLUs between them."""
        known = {
            layer.node: layer
            for name, layer in self.layers.items()
            if name in read.get(layer.node, ()) and self._maps_rows(layer)
        }
        layers: list[Layer] = []
        relus: list[fx.Node] = []
        node: fx.Node | None = self.logits
        while node in known:
            layers.insert(0, known[node])
            relu = layers[0].input
            node = relu.all_input_nodes[0] if op_name(relu) == "relu" else None
            if node in known and len(relu.users) == len(node.users) == 1:
                relus.insert(0, relu)
            else:
                node = None
        return (layers, relus) if relus else ([], [])

    def _tail(
        self,
        chunk: Chunk,
        values: Mapping[str, Tensor],
        layers: Sequence[Layer],
        relus: Sequence[fx.Node],
        names: frozenset[str],
    ) -> Tail:
        """What stands in for the perceptron at the end."""
        links: list[Link] = []
        for layer in layers:
            weight, bias = values[layer.name], layer.bias
            gather, keeper = self._gathers(chunk, layer, weight)
            assert gather is None or isinstance(gather, Rows)  # See `_maps_rows`.
            biases = None
            if bias in names and bias in self.sites:
                biases = VectorGather(chunk, bias, values[bias])
            before = links[-1] if links else None
            links.append(Link(chunk, layer, weight, biases, gather, keeper, before))
        return Tail(chunk, self._axis(layers[-1].node), links, relus)

    def _maps_rows(self, layer: Layer) -> bool:
        """Whether a layer maps one row per sample, and adds no more than a bias."""
        if layer.kind != "linear" or self._many_positions(layer) or len(shape_of(layer.node)) != 2:
            return False
        given = arguments_of(layer.node)
        added = given.get("self" if op_name(layer.node) == "addmm" else "bias")
        return added is None or shape_of(added) == (layer.shape[layer.out_axis],)

    def _gathers(
        self, chunk: Chunk, layer: Layer, weight: Tensor
    ) -> tuple[Gather | None, KeptColumns | None]:
        """What gathers a layer's curvature, and what keeps its columns, as far as is wanted."""
        gather = keeper = None
        if chunk.wanted - {"columns"}:
            kind = Positions if self._many_positions(layer) else Rows
            activations = self.numbers(layer.input) + self.numbers(layer.node)
            gather = kind(chunk, layer, weight, activations)
        if "columns" in chunk.wanted:
            keeper = KeptColumns(chunk, layer, weight)
        return gather, keeper

    def _tap(
        self,
        chunk: Chunk,
        values: Mapping[str, Tensor],
        node: fx.Node,
        sites: Mapping[str, Site],
        names: frozenset[str],
    ) -> Tap:
        """The tap at one op."""
        roles = {site.role for site in sites.values()}
        if roles <= {"layer", "bias"}:
            layer = self._layers_by_node[node]
            axes = self._axis(layer.input), self._axis(node)
            bias = values[layer.bias] if layer.bias in sites and layer.bias in names else None
            gather = keeper = None
            if layer.name in sites:
                gather, keeper = self._gathers(chunk, layer, values[layer.name])
            pool = pooling_behind(layer)
            if pool is not None and keeper is None and isinstance(gather, Positions):
                channels, area = layer.shape[0], self.numbers(node) / self.numbers(pool)
                if gains(gather, channels, area):
                    return PooledTap(chunk, layer, axes, bias, gather, pool)
            return LayerTap(chunk, layer, axes, bias, gather, keeper)
        if roles == {"norm"}:
            return self._norm_tap(chunk, node, names)
        found = {n: self.graph.sample_axis(n) for n in node.all_input_nodes}
        known = {n: axis for n, axis in found.items() if axis is not None}
        wanted = [name for name in sites if name in names]
        parameters = [(name, self.graph.parameters[name], values[name]) for name in wanted]
        return PointTap(chunk, node, self._axis(node), parameters, known)

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
            if self._many_positions(layer):
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

    def has_positions(self) -> bool:
        """Whether any layer is applied more than once to every sample."""
        return any(self._many_positions(layer) for layer in self.layers.values())

    def outputs_per_sample(self) -> int:
        """How many outputs the loss is taken of."""
        return self.numbers(self.logits)

    def _axis(self, node: fx.Node) -> SampleAxis:
        axis = self.graph.sample_axis(node)
        assert axis is not None  # Else the parameter would not be in `exact`.
        return axis

    def _many_positions(self, layer: Layer) -> bool:
        """Whether a layer is applied more than once to every sample."""
        return layer.kind != "linear" or self.numbers(layer.node) > layer.shape[layer.out_axis]

    def _norm_tap(self, chunk: Chunk, node: fx.Node, names: frozenset[str]) -> BatchNormTap:
        """The tap at a batch-norm."""
        parameters = {node: name for name, node in self.graph.parameters.items()}
        given = arguments_of(node)
        roles = {role: parameters.get(given[role], "") for role in ("weight", "bias")}
        wanted = {
            role: name for role, name in roles.items() if name in names and name in self.sites
        }
        return BatchNormTap(chunk, node, self._axis(node), wanted)


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
