"""How a model is swept: which parameters come out exactly, and what listens where."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from flatgauge.curvature.degree import linearity
from flatgauge.curvature.factors import KeptColumns
from flatgauge.curvature.gathers import Gather, Positions, Rows
from flatgauge.curvature.layer_taps import LayerTap
from flatgauge.curvature.parameter_taps import BATCH_NORMS, BatchNormTap, PointTap, chain_from, link
from flatgauge.curvature.taps import Chunk, Tap
from flatgauge.graph import ModelGraph, SampleAxis, arguments_of, op_name, shape_of
from flatgauge.layers import Layer, find_layers

#: Last operations that belong to the loss rather than to the model: curved, without parameters.
_HEADS = ("log_softmax", "softmax", "sigmoid", "log_sigmoid", "tanh", "exp", "log", "softplus")


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
    """

    graph: ModelGraph
    logits: fx.Node
    heads: tuple[fx.Node, ...]
    layers: dict[str, Layer]
    exact: tuple[str, ...]
    reasons: dict[str, str]

    def finish(self, logits: Tensor) -> Tensor:
        """The model's output, from where the sweep's part of it ends."""
        for head in self.heads:
            (source,) = head.all_input_nodes
            logits = link(head, source)(logits)
        return logits

    def head_names(self) -> list[str]:
        """The names of the last operations."""
        return [op_name(head) for head in self.heads]

    def taps(
        self, chunk: Chunk, values: Mapping[str, Tensor], names: frozenset[str]
    ) -> dict[fx.Node, Tap]:
        """Place taps for some parameters.

        Args:
            chunk: The chunk that is swept.
            values: The parameters' values.
            names: Which of the exact parameters to gather.

        Returns:
            The taps by the op they sit at.
        """
        taps: dict[fx.Node, Tap] = {}
        for layer in self.layers.values():
            weight, bias = (
                values[name] if name is not None and name in names and name in self.exact else None
                for name in (layer.name, layer.bias)
            )
            if weight is not None or bias is not None:
                axes = self._axis(layer.input), self._axis(layer.node)
                gather = None if weight is None else self._gather(chunk, layer, weight)
                taps[layer.node] = LayerTap(chunk, layer, axes, bias, gather)
        points: dict[fx.Node, list[tuple[str, fx.Node, Tensor]]] = {}
        for name in names & set(self.exact):
            node = self.graph.parameters.get(name)
            reader = chain_from(node).reader if node is not None and node.users else None
            if reader is not None and node is not None and reader not in taps:
                points.setdefault(reader, []).append((name, node, values[name]))
        for reader, read in points.items():
            if op_name(reader) in BATCH_NORMS:
                taps[reader] = self._batch_norm(chunk, reader, [name for name, *_ in read])
            else:
                found = {n: self.graph.sample_axis(n) for n in reader.all_input_nodes}
                known = {node: axis for node, axis in found.items() if axis is not None}
                taps[reader] = PointTap(chunk, reader, self._axis(reader), read, known)
        return taps

    def activations_per_sample(self) -> int:
        """How many numbers the graph computes from one sample."""
        return sum(self.numbers(node) for node in self.graph.nodes if op_name(node))

    def numbers_per_sample(self) -> int:
        """How many numbers a sweep holds for one sample: activations, patches, gradients."""
        numbers = 2 * self.activations_per_sample()
        for layer in self.layers.values():
            shape = layer.shape
            if layer.kind != "linear":
                numbers += math.prod(shape[2:]) * self.numbers(layer.input)
            if self._has_positions(layer):
                numbers += 3 * math.prod(shape)
        return numbers

    def numbers(self, node: fx.Node) -> int:
        """How many numbers a node gives for one sample."""
        shape = shape_of(node)
        return math.prod(self.graph.sizes(node, 2)) // 2 if shape else 0

    def outputs_per_sample(self) -> int:
        """How many outputs the loss is taken of."""
        return self.numbers(self.logits)

    def _axis(self, node: fx.Node) -> SampleAxis:
        axis = self.graph.sample_axis(node)
        assert axis is not None  # Else the parameter would not be in `exact`.
        return axis

    def _gather(self, chunk: Chunk, layer: Layer, weight: Tensor) -> Gather:
        """What gathers a layer's curvature."""
        if "columns" in chunk.wanted:
            return KeptColumns(chunk, layer, weight, 0)
        kind = Positions if self._has_positions(layer) else Rows
        return kind(chunk, layer, weight, self.numbers(layer.input) + self.numbers(layer.node))

    def _has_positions(self, layer: Layer) -> bool:
        """Whether a layer is applied more than once to every sample."""
        return layer.kind != "linear" or self.numbers(layer.node) > layer.shape[layer.out_axis]

    def _batch_norm(self, chunk: Chunk, node: fx.Node, names: list[str]) -> Tap:
        parameters = {node: name for name, node in self.graph.parameters.items()}
        given = arguments_of(node)
        roles = {role: parameters.get(given[role], "") for role in ("weight", "bias")}
        wanted = {role: name for role, name in roles.items() if name in names}
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
    found = linearity(graph, [output])
    layers = {n: layer for n, layer in find_layers(graph).items() if n in trainable}
    exact, reasons = [], {}
    for name in trainable:
        if name in found.reasons:
            reason: str | None = f"the output is curved in it: {found.reasons[name]}"
        elif name not in found.degrees:
            reason = None  # The output does not depend on it: its curvature is zero.
        else:
            reason = _objection(graph, name, layers)
        if reason is None:
            exact.append(name)
        else:
            reasons[name] = reason
    return Plan(graph, output, tuple(heads), layers, tuple(exact), reasons)


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
    return Plan(graph, node, (), layers, (), dict.fromkeys(trainable, reason))


def _objection(graph: ModelGraph, name: str, layers: Mapping[str, Layer]) -> str | None:
    """Why a parameter that the output is linear in cannot be swept, None if it can."""
    node = graph.parameters[name]
    if len(node.users) != 1:
        return f"it is read {len(node.users)} times"
    chain = chain_from(node)
    reader = layers[name].node if name in layers else chain.reader
    if graph.sample_axis(reader) is None:
        return f"samples cannot be told apart where {op_name(reader)} reads it"
    if name in layers:
        told = graph.sample_axis(layers[name].input)
        return None if told else "samples cannot be told apart in the layer's input"
    if any(name == layer.bias for layer in layers.values()) or op_name(reader) in BATCH_NORMS:
        return None
    others = [n for n in reader.all_input_nodes if n is not chain.end]
    known = all(isinstance(n.meta.get("val"), Tensor) for n in others)
    return None if known else f"there is no rule for reading it by {op_name(reader)}"
