"""Placing taps: which one stands in for which op of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from flatgauge.curvature.factors import KeptColumns
from flatgauge.curvature.gathers import Gather, Positions
from flatgauge.curvature.layer_taps import LayerTap
from flatgauge.curvature.normed_taps import NormedTap, norm_behind
from flatgauge.curvature.parameter_taps import BatchNormTap, PointTap
from flatgauge.curvature.plan import Plan, Site
from flatgauge.curvature.pooled_taps import PooledTap, gains, pooling_behind
from flatgauge.curvature.rows import Rows
from flatgauge.curvature.tail import Link, Tail
from flatgauge.curvature.taps import OF_ALL, Chunk, Tap, VectorGather
from flatgauge.layers import Layer
from flatgauge.nodes import arguments_of, op_name, shape_of


def place_taps(
    plan: Plan, chunk: Chunk, values: Mapping[str, Tensor], names: frozenset[str]
) -> list[Tap]:
    """Place taps for some parameters.

    Args:
        plan: Where parameters are read.
        chunk: The chunk that is swept.
        values: The parameters' values.
        names: Which of the exact parameters to gather.

    Returns:
        The taps.
    """
    read: dict[fx.Node, dict[str, Site]] = {}
    for name, site in plan.sites.items():
        if name in names:
            read.setdefault(site.node, {})[name] = site
    if not chunk.wanted & set(OF_ALL):  # Biases, norms, ... have no other parts.
        names = names & plan.layers.keys()
    placing = _Placing(plan, chunk, values, names)
    last, relus = last_layers(plan, read)
    taken = {layer.node for layer in last}
    taps: list[Tap] = [placing.tail(last, relus)] if last else []
    for node, sites in read.items():  # Layers come first: norms behind them are taken then.
        if node in taken:
            continue
        layer = plan.layers_by_node.get(node)
        norm = None if layer is None or layer.name not in sites else norm_behind(layer)
        is_norm = any(site.role == "norm" for site in sites.values())
        if layer is not None and norm is not None:
            taps.append(placing.at_convolution_and_norm(layer, norm))
            taken.add(norm)
        elif is_norm or not names.isdisjoint(sites):
            taps.append(placing.at(node, sites))
    return taps


def last_layers(
    plan: Plan, read: Mapping[fx.Node, Mapping[str, Site]]
) -> tuple[list[Layer], list[fx.Node]]:
    """Find the perceptron at the end of a model.

    Args:
        plan: Where parameters are read.
        read: The parameters to gather, by the op that reads them.

    Returns:
        Its layers, and the ReLUs between them; nothing if it would be a single layer.
    """
    known = {
        layer.node: layer
        for name, layer in plan.layers.items()
        if name in read.get(layer.node, ()) and _maps_rows(plan, layer)
    }
    layers: list[Layer] = []
    relus: list[fx.Node] = []
    node: fx.Node | None = plan.logits
    while node in known:
        layers.insert(0, known[node])
        relu = layers[0].input
        node = relu.all_input_nodes[0] if op_name(relu) == "relu" else None
        if node in known and len(relu.users) == len(node.users) == 1:
            relus.insert(0, relu)
        else:
            node = None
    return (layers, relus) if relus else ([], [])


def _maps_rows(plan: Plan, layer: Layer) -> bool:
    """Whether a layer maps one row per sample, and adds no more than a bias."""
    if layer.kind != "linear" or plan.many_positions(layer) or len(shape_of(layer.node)) != 2:
        return False
    given = arguments_of(layer.node)
    added = given.get("self" if op_name(layer.node) == "addmm" else "bias")
    return added is None or shape_of(added) == (layer.shape[layer.out_axis],)


@dataclass(frozen=True)
class _Placing:
    """Makes the taps of one chunk."""

    plan: Plan
    chunk: Chunk
    values: Mapping[str, Tensor]
    names: frozenset[str]

    def tail(self, layers: Sequence[Layer], relus: Sequence[fx.Node]) -> Tail:
        """What stands in for the perceptron at the end."""
        links: list[Link] = []
        for layer in layers:
            weight, bias = self.values[layer.name], layer.bias
            gather, keeper = self._gathers(layer)
            assert gather is None or isinstance(gather, Rows)  # See `_maps_rows`.
            biases = None
            if bias in self.names and bias in self.plan.sites:
                biases = VectorGather(self.chunk, bias, self.values[bias])
            before = links[-1] if links else None
            links.append(Link(self.chunk, layer, weight, biases, gather, keeper, before))
        return Tail(self.chunk, self.plan.axis(layers[-1].node), links, relus)

    def at_convolution_and_norm(self, layer: Layer, norm: fx.Node) -> NormedTap:
        """The tap at a convolution with a batch-norm behind it."""
        gather, keeper = self._gathers(layer)
        assert gather is None or isinstance(gather, Positions)  # Convolutions have positions.
        axes = self.plan.axis(layer.input), self.plan.axis(layer.node)
        return NormedTap(self.chunk, layer, axes, gather, keeper, self._at_norm(norm))

    def at(self, node: fx.Node, sites: Mapping[str, Site]) -> Tap:
        """The tap at any other op."""
        roles = {site.role for site in sites.values()}
        if roles <= {"layer", "bias"}:
            return self._at_layer(self.plan.layers_by_node[node], sites)
        if roles == {"norm"}:
            return self._at_norm(node)
        graph = self.plan.graph
        found = {n: graph.sample_axis(n) for n in node.all_input_nodes}
        known = {n: axis for n, axis in found.items() if axis is not None}
        wanted = [name for name in sites if name in self.names]
        parameters = [(name, graph.parameters[name], self.values[name]) for name in wanted]
        return PointTap(self.chunk, node, self.plan.axis(node), parameters, known)

    def _at_layer(self, layer: Layer, sites: Mapping[str, Site]) -> LayerTap:
        """The tap at a contraction, or behind the pooling that follows it."""
        plan, node = self.plan, layer.node
        axes = plan.axis(layer.input), plan.axis(node)
        wanted = layer.bias in sites and layer.bias in self.names
        bias = self.values[layer.bias] if wanted and layer.bias is not None else None
        gather, keeper = self._gathers(layer) if layer.name in sites else (None, None)
        pool = pooling_behind(layer)
        if pool is not None and keeper is None and isinstance(gather, Positions):
            channels, area = layer.shape[0], plan.numbers(node) / plan.numbers(pool)
            if gains(gather, channels, area):
                return PooledTap(self.chunk, layer, axes, bias, gather, pool)
        return LayerTap(self.chunk, layer, axes, bias, gather, keeper)

    def _at_norm(self, node: fx.Node) -> BatchNormTap:
        """The tap at a batch-norm."""
        plan = self.plan
        parameters = {node: name for name, node in plan.graph.parameters.items()}
        given = arguments_of(node)
        roles = {role: parameters.get(given[role], "") for role in ("weight", "bias")}
        wanted = {
            role: name for role, name in roles.items() if name in self.names and name in plan.sites
        }
        return BatchNormTap(self.chunk, node, plan.axis(node), wanted)

    def _gathers(self, layer: Layer) -> tuple[Gather | None, KeptColumns | None]:
        """What gathers a layer's curvature, and what keeps its columns, as far as is wanted."""
        chunk, plan, weight = self.chunk, self.plan, self.values[layer.name]
        gather = keeper = None
        if chunk.wanted - {"columns"}:
            kind = Positions if plan.many_positions(layer) else Rows
            activations = plan.numbers(layer.input) + plan.numbers(layer.node)
            gather = kind(chunk, layer, weight, activations)
        if "columns" in chunk.wanted:
            keeper = KeptColumns(chunk, layer, weight)
        return gather, keeper
