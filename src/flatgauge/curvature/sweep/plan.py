"""What a sweep gives exactly, where each parameter is read, and which handler computes each op.

What enters: the model's exported graph. What leaves: a `SweepPlan`. A parameter is exact if the
output is of degree one in it, one op reads it, and samples stay apart from there to the output;
for every other one the plan has the reason. `place_ops` then makes, for one chunk, the handlers of
the ops that read requested parameters, with an accumulator for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from flatgauge.curvature.sweep.accumulate import (
    PARAMETER_PARTS,
    LayerAccumulator,
    SweepChunk,
    VectorAccumulator,
)
from flatgauge.curvature.sweep.conv import (
    ConvAccumulator,
    FactorRecorder,
    vectors_per_product,
)
from flatgauge.curvature.sweep.linear import (
    VECTORS_TOGETHER,
    HeadLayer,
    LinearAccumulator,
    MLPHead,
)
from flatgauge.curvature.sweep.ops import (
    BATCH_NORMS,
    BatchNormOp,
    ConvBatchNormOp,
    ConvPoolOp,
    GenericOp,
    LayerOp,
    OpHandler,
    batch_norm_behind,
    is_cheaper_behind_pooling,
    pooling_behind,
)
from flatgauge.graph.export import Handler, ModelGraph, SampleAxis
from flatgauge.graph.layers import Layer, find_layers
from flatgauge.graph.ops import arguments_of, call_op, op_name, parameter_degrees, shape_of

#: Last operations that belong to the loss rather than to the model: curved, without parameters.
_HEADS = ("log_softmax", "softmax", "sigmoid", "log_sigmoid", "tanh", "exp", "log", "softplus")

#: Why a parameter is not swept whose factor vectors belong to no single sample.
_MIXED = "samples are not separate in what it is multiplied by"


@dataclass(frozen=True)
class Site:
    """Where a parameter is read."""

    role: str  # "layer", its "bias", "norm" (scale or shift), or "point" for anything else.
    node: fx.Node  # The op that reads it.


@dataclass(frozen=True)
class SweepPlan:
    """How one graph is swept."""

    graph: ModelGraph
    logits: fx.Node  # The node whose output the loss is taken of.
    heads: tuple[fx.Node, ...]  # The last operations, from there to the model's output.
    layers: dict[str, Layer]  # Those among the trainable parameters.
    exact: tuple[str, ...]  # The trainable parameters whose blocks the sweep gives exactly.
    reasons: dict[str, str]  # For every other one, why not.
    sites: dict[str, Site]  # Where exact ones are read; what the output ignores has none.

    def without(self, mixed: Mapping[str, str]) -> SweepPlan:
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

    def output_of(self, logits: Tensor) -> Tensor:
        """The model's output, from where the sweep's part of it ends."""
        for head in self.heads:
            (source,) = head.all_input_nodes
            logits = as_function(head, source)(logits)
        return logits

    def head_names(self) -> list[str]:
        """The names of the last operations."""
        return [op_name(head) for head in self.heads]

    def head_axis(self) -> int:
        """The axis along which the first of the last operations works."""
        axis = int(arguments_of(self.heads[0]).get("dim", 0))
        return axis % len(shape_of(self.logits))

    def times_read(self, name: str) -> int:
        """Number of ops that read the weight of a layer."""
        return _readers(self.graph.parameters[name], self.layers[name].node)[1]

    def activations_per_sample(self) -> int:
        """Numbers that the graph computes from one sample."""
        return sum(self.numbers(node) for node in self.graph.nodes if op_name(node))

    def numbers_per_sample(self) -> int:
        """Numbers that a sweep holds for one sample at most."""
        # Activations and the gradients by them, what every layer adds up, patches, buffered vectors
        # and gradients where layers have many positions, and vectors that are recorded.
        factors = self.outputs_per_sample()
        numbers = 2 * self.activations_per_sample() + 4 * factors
        transient = 0
        for layer in self.layers.values():
            inputs, outputs = self.numbers(layer.input), self.numbers(layer.node)
            weights = math.prod(layer.shape)
            numbers += (3 + min(factors, 64)) * outputs + 3 * inputs
            if layer.kind == "linear":
                transient = max(transient, min(factors, VECTORS_TOGETHER) * inputs)
            if self.many_positions(layer):
                together = vectors_per_product(layer)
                taps = math.prod(layer.shape[2:]) if layer.kind != "linear" else 1
                numbers += taps * inputs + together * outputs
                transient = max(transient, together * (outputs + 2 * weights))
        return numbers + transient

    def numbers(self, node: fx.Node) -> int:
        """Numbers that a node gives for one sample; none for what does not grow with them."""
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
        """Number of outputs that the loss is taken of."""
        return self.numbers(self.logits)

    def axis(self, node: fx.Node) -> SampleAxis:
        """Where the samples lie in what a node gives, on the way of exact parameters."""
        axis = self.graph.sample_axis(node)
        assert axis is not None  # Else the parameter would not be in `exact`.
        return axis

    def many_positions(self, layer: Layer) -> bool:
        """Whether a layer is applied more than once to every sample."""
        return layer.kind != "linear" or self.numbers(layer.node) > layer.shape[layer.out_axis]

    def records_gradients(self, layer: Layer) -> bool:
        """Whether gradients by a layer's weight take no more memory than vectors at its output."""
        units = layer.shape[layer.out_axis] * (layer.groups if layer.kind == "transposed" else 1)
        outputs = self.numbers(layer.node)
        return outputs > units and math.prod(layer.shape) <= 2 * outputs


def build_plan(graph: ModelGraph, output: fx.Node, trainable: tuple[str, ...]) -> SweepPlan:
    """Read from the graph what can be swept of some parameters, if the loss is taken of a node."""
    heads: list[fx.Node] = []
    while op_name(output) in _HEADS and len(output.all_input_nodes) == 1:
        heads.insert(0, output)
        (output,) = output.all_input_nodes
    layers = {n: layer for n, layer in find_layers(graph).items() if n in trainable}
    found = parameter_degrees(graph, [output])
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
    return SweepPlan(graph, output, tuple(heads), layers, exact, reasons, sites)


def without_sweep(graph: ModelGraph, trainable: tuple[str, ...], reason: str) -> SweepPlan:
    """The plan for a graph of which nothing can be swept: it knows the layers, none exact."""
    layers = {n: layer for n, layer in find_layers(graph).items() if n in trainable}
    node = next(n for n in graph.outputs if isinstance(n, fx.Node))
    return SweepPlan(graph, node, (), layers, (), dict.fromkeys(trainable, reason), {})


def _site(
    graph: ModelGraph, name: str, layers: Mapping[str, Layer], sites: Mapping[str, Site]
) -> Site | str:
    """Where and how a parameter is read that the output is linear in, or why it is not swept."""
    node = graph.parameters[name]
    layer = layers.get(name)
    chain, times = _readers(node, None if layer is None else layer.node)
    if times > 1:
        return f"it is read {times} times"
    reader = chain.reader if layer is None else layer.node
    if graph.sample_axis(reader) is None:
        return f"samples are not separate where {op_name(reader)} reads it"
    if layer is not None:
        precision = reader.meta["val"].dtype
        if precision != node.meta["val"].dtype:
            return f"it is read in {str(precision).removeprefix('torch.')}"
        return Site("layer", reader) if _has_separate_samples(graph, layer) else _MIXED
    given = arguments_of(reader)
    for owner in layers.values():
        if owner.node is reader and owner.bias == name:
            plain = shape_of(node) == (shape_of(reader)[_unit_axis(owner)],)
            if plain and given.get("bias", given.get("self")) is node:
                return Site("bias", reader) if _has_separate_samples(graph, owner) else _MIXED
    axis = graph.sample_axis(reader)
    if op_name(reader) in BATCH_NORMS and given["weight"] is given["bias"]:
        return "it is both scale and shift of a norm"
    if op_name(reader) in BATCH_NORMS and node in (given["weight"], given["bias"]):
        return Site("norm", reader) if axis is not None and axis.axis == 0 else _MIXED
    taken = [other for other, site in sites.items() if site.node is reader]
    if any(sites[other].role != "point" for other in taken):
        return f"{op_name(reader)} reads it next to `{taken[0]}`"
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


def _has_separate_samples(graph: ModelGraph, layer: Layer) -> bool:
    """Whether a layer's input keeps samples apart, on the axis where the layer expects them."""
    axis = graph.sample_axis(layer.input)
    return axis is not None and (layer.kind == "linear" or axis.axis == 0)


def _unit_axis(layer: Layer) -> int:
    """The axis of a layer's output along which its units lie."""
    return -1 if layer.kind == "linear" else 1


def place_ops(
    plan: SweepPlan,
    chunk: SweepChunk,
    values: Mapping[str, Tensor],
    names: frozenset[str],
    *,
    record: bool = False,
) -> dict[fx.Node, Handler]:
    """Make the handlers of ops that read some parameters; accumulators go into the chunk."""
    read: dict[fx.Node, dict[str, Site]] = {}
    for name, site in plan.sites.items():
        if name in names:
            read.setdefault(site.node, {})[name] = site
    if not chunk.context.parts & set(PARAMETER_PARTS):  # Biases, norms, ... have no other parts.
        names = names & plan.layers.keys()
    placement = _Placement(plan, chunk, values, names, record)
    handlers: dict[fx.Node, Handler] = {}
    layers, relus = find_mlp_head(plan, read)
    if layers:
        handlers |= placement.place_head(layers, relus)
    for node, sites in read.items():  # Layers come first: norms behind them are placed then.
        if node not in handlers:
            requested = not names.isdisjoint(sites)
            if requested or any(site.role == "norm" for site in sites.values()):
                handlers |= placement.make_handler(node, sites).handlers(chunk)
    return handlers


def find_mlp_head(
    plan: SweepPlan, read: Mapping[fx.Node, Mapping[str, Site]]
) -> tuple[list[Layer], list[fx.Node]]:
    """The layers of a perceptron of at least two at the end of a model, and its ReLUs."""
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


def _maps_rows(plan: SweepPlan, layer: Layer) -> bool:
    """Whether a layer maps one row per sample, and adds no more than a bias."""
    if layer.kind != "linear" or plan.many_positions(layer) or len(shape_of(layer.node)) != 2:
        return False
    given = arguments_of(layer.node)
    added = given.get("self" if op_name(layer.node) == "addmm" else "bias")
    return added is None or shape_of(added) == (layer.shape[layer.out_axis],)


@dataclass(frozen=True)
class _Placement:
    """Makes the handlers of one chunk, and the accumulators they feed."""

    plan: SweepPlan
    chunk: SweepChunk
    values: Mapping[str, Tensor]
    names: frozenset[str]
    record: bool

    def place_head(self, layers: list[Layer], relus: list[fx.Node]) -> dict[fx.Node, Handler]:
        """Make the head of the chunk."""
        context, found = self.chunk.context, list[HeadLayer]()
        for layer in layers:
            accumulator, recorder = self._accumulate(layer)
            assert accumulator is None or isinstance(accumulator, LinearAccumulator)
            bias = self._accumulate_vector(layer.bias)
            before = found[-1] if found else None
            weight = self.values[layer.name]
            found.append(HeadLayer(context, layer, weight, accumulator, recorder, bias, before))
        self.chunk.head = head = MLPHead(context, found, relus)
        return head.handlers()

    def make_handler(self, node: fx.Node, sites: Mapping[str, Site]) -> OpHandler:
        """The handler of an op, and of what is computed together with it."""
        roles = {site.role for site in sites.values()}
        if roles <= {"layer", "bias"}:
            return self._make_layer_op(self.plan.layers_by_node[node], sites)
        if roles == {"norm"}:
            return self._make_batch_norm(node)
        graph, samples = self.plan.graph, self.chunk.context.samples
        found = {n: graph.sample_axis(n) for n in node.all_input_nodes}
        axes = {n: axis for n, axis in found.items() if axis is not None}
        parameters = []
        for name in sites:
            accumulator = self._accumulate_vector(name)
            if accumulator is not None:
                chain = chain_from(graph.parameters[name])
                parameters.append((chain, self.values[name], accumulator))
        return GenericOp(samples, node, self.plan.axis(node), parameters, axes)

    def _make_layer_op(self, layer: Layer, sites: Mapping[str, Site]) -> OpHandler:
        """The handler of a contraction, alone or with a batch-norm or a pooling behind it."""
        plan, samples = self.plan, self.chunk.context.samples
        axes = plan.axis(layer.input), plan.axis(layer.node)
        accumulator = recorder = None
        if layer.name in sites:
            accumulator, recorder = self._accumulate(layer)
            norm = batch_norm_behind(layer)
            if norm is not None:
                assert accumulator is None or isinstance(accumulator, ConvAccumulator)
                handler = self._make_batch_norm(norm)
                return ConvBatchNormOp(samples, layer, axes, accumulator, recorder, handler)
        bias = self._accumulate_vector(layer.bias) if layer.bias in sites else None
        pool = pooling_behind(layer)
        if pool is not None and recorder is None and isinstance(accumulator, ConvAccumulator):
            area = plan.numbers(layer.node) / plan.numbers(pool)
            if is_cheaper_behind_pooling(accumulator, layer.shape[0], area):
                return ConvPoolOp(samples, layer, axes, accumulator, bias, pool)
        return LayerOp(samples, layer, axes, accumulator, recorder, bias)

    def _make_batch_norm(self, node: fx.Node) -> BatchNormOp:
        """The handler of a batch-norm."""
        owners = {source: name for name, source in self.plan.graph.parameters.items()}
        given = arguments_of(node)
        weight, bias = (
            self._accumulate_vector(owners.get(given[role])) for role in ("weight", "bias")
        )
        return BatchNormOp(self.chunk.context.samples, node, self.plan.axis(node), weight, bias)

    def _accumulate(self, layer: Layer) -> tuple[LayerAccumulator | None, FactorRecorder | None]:
        """What adds up a layer's curvature and what records its factors, as far as requested."""
        chunk, weight = self.chunk, self.values[layer.name]
        accumulator: LayerAccumulator | None = None
        if chunk.context.parts:
            if self.plan.many_positions(layer):
                activations = self.plan.numbers(layer.input) + self.plan.numbers(layer.node)
                accumulator = ConvAccumulator(chunk.context, layer, weight, activations)
            else:
                accumulator = LinearAccumulator(chunk.context, layer, weight)
            chunk.accumulators[layer.name] = accumulator
        if self.record:
            gradients = self.plan.records_gradients(layer)
            recorder = FactorRecorder(chunk.context, layer, weight, gradients=gradients)
            chunk.recorders[layer.name] = recorder
        return accumulator, chunk.recorders.get(layer.name)

    def _accumulate_vector(self, name: str | None) -> VectorAccumulator | None:
        """What adds up the curvature of a parameter that is not a layer, if it is requested."""
        if name is None or name not in self.names or name not in self.plan.sites:
            return None
        found = VectorAccumulator(self.chunk.context, self.values[name])
        self.chunk.accumulators[name] = found
        return found


class Chain(list[Callable[[Tensor], Tensor]]):
    """The ops between a parameter and the op that combines it with samples."""

    end: fx.Node  # The last of these ops, or the parameter itself.
    reader: fx.Node  # The op that combines it with samples.


def chain_from(parameter: fx.Node) -> Chain:
    """Follow a parameter up to the first op with another tensor in it."""
    chain = Chain()
    node = parameter
    while True:
        (reader,) = node.users
        if len(reader.all_input_nodes) > 1 or len(reader.users) != 1:
            break
        chain.append(as_function(reader, node))
        node = reader
    chain.end, chain.reader = node, reader
    return chain


def as_function(op: fx.Node, source: fx.Node) -> Callable[[Tensor], Tensor]:
    """An op that reads one node, as a function of that node's value."""

    def function(tensor: Tensor) -> Tensor:
        arguments, keywords = pytree.tree_map(
            lambda leaf: tensor if leaf is source else leaf, (op.args, dict(op.kwargs))
        )
        output: Tensor = call_op(op, *arguments, **keywords)
        return output

    return function
