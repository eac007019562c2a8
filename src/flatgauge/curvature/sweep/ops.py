"""Op handlers: each computes one op of the graph and says which tensors to watch.

What enters: while the graph runs forward, a handler is called in place of its op, with the op's
arguments. What leaves: the op's output, watched (see `accumulate`), so that every factor vector
that comes back there reaches the accumulators of the op's parameters, with the samples in front.

    LayerOp          a contraction with its bias: linear, matrix product, convolution of every kind
    BatchNormOp      scale and shift of a batch-norm with stored statistics
    ConvBatchNormOp  a convolution with such a batch-norm behind it
    ConvPoolOp       a convolution with max-pooling behind it
    GenericOp        anything else that is linear in its parameters, by a vector-Jacobian product
                     per sample (`vmap` of `vjp`)

The vectors of two ops at once are received behind the second. A batch-norm with stored statistics
is a scale γ̂ and a shift of every channel, and the scale is as well one of the weights, W̃ = γ̂ W:
forms of units and relative flatness are the same behind the norm, and gradients take the scale
along where vectors are copied anyway (G from γ̂ s). Max-pooling passes back zeros to all but the
largest value of every window: if nothing in front of the layer is watched, vectors s_w behind it
need not be spread out, and G = Σ_w s_w a_wᵀ, with a_w what the largest value of window w was
computed from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from flatgauge.graph.ops import arguments_of, call_op, op_name

if TYPE_CHECKING:
    from flatgauge.curvature.sweep.accumulate import (
        LayerAccumulator,
        Receiver,
        SweepChunk,
        VectorAccumulator,
    )
    from flatgauge.curvature.sweep.conv import ConvAccumulator, FactorRecorder
    from flatgauge.curvature.sweep.plan import Chain
    from flatgauge.graph.export import Handler, SampleAxis
    from flatgauge.graph.layers import Layer

#: The names of batch-norm with stored statistics in exported graphs.
BATCH_NORMS = ("batch_norm", "_native_batch_norm_legit_no_training")

#: How many times more patches there may be, cut out for every channel by itself, than positions.
_PATCHES = 4


class OpHandler(ABC):
    """Computes one op; `axis` says where in its output the samples lie.

    It is handed the chunk and does not keep it: what the chunk refers to must not refer to it.
    """

    def __init__(self, samples: int, node: fx.Node, axis: SampleAxis) -> None:
        self.samples, self.node, self.axis = samples, node, axis

    @abstractmethod
    def compute(self, chunk: SweepChunk, *arguments: Any, **keywords: Any) -> Any:
        """Compute the op's output, and watch it."""

    def handlers(self, chunk: SweepChunk) -> dict[fx.Node, Handler]:
        """What computes which ops while the graph runs."""
        return {self.node: partial(self.compute, chunk)}

    def watch_output(self, chunk: SweepChunk, output: Tensor, receive: Receiver) -> Tensor:
        """Watch an output; vectors are received with the samples in front (n, f, ...)."""
        return chunk.watch(output, samples_first(self.axis, self.samples, receive))

    def outputs_first(self, outputs: Tensor) -> Tensor:
        """Outputs with the samples in front (n, f, ...)."""
        return self.axis.first(outputs.detach(), self.samples)


def samples_first(axis: SampleAxis, samples: int, receive: Receiver) -> Receiver:
    """A receiver of vectors with the samples in front (n, f, ...), made one for any layout."""
    return lambda vectors, weights: receive(axis.first(vectors, samples), weights)


class LayerOp(OpHandler):
    """A contraction, with its bias.

    `axes` say where in input and output the samples lie; accumulators and recorder are None if
    they are not requested.
    """

    def __init__(
        self,
        samples: int,
        layer: Layer,
        axes: tuple[SampleAxis, SampleAxis],
        accumulator: LayerAccumulator | None,
        recorder: FactorRecorder | None,
        bias: VectorAccumulator | None = None,
    ) -> None:
        super().__init__(samples, layer.node, axes[1])
        self.layer, self._input_axis = layer, axes[0]
        self.accumulator, self.recorder, self.bias = accumulator, recorder, bias

    def compute(self, chunk: SweepChunk, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the contraction."""
        given = list(arguments)
        inputs = self.watch_input(chunk, given)
        output = call_op(self.node, *given, **keywords)
        if self.accumulator is not None or self.recorder is not None:
            outputs = output.detach() - self.layer.bias_of(given)
            inputs, outputs = self.inputs_first(inputs), self.outputs_first(outputs)
            if self.accumulator is not None:
                self.accumulator.begin(inputs, outputs)
            if self.recorder is not None:
                self.recorder.begin(inputs, outputs)
        return self.watch_output(chunk, output, self.receive)

    def watch_input(self, chunk: SweepChunk, given: list[Any]) -> Tensor:
        """The input among an op's arguments, watched if need be."""
        inputs: Tensor = given[self.layer.position]
        if self.accumulator is not None and self.accumulator.needs_input_vectors:
            # Other ops may read the same tensor: a view of it has the gradients of this op alone.
            receive = samples_first(self._input_axis, self.samples, self.accumulator.add_at_input)
            inputs = given[self.layer.position] = chunk.watch(inputs.view_as(inputs), receive)
        return inputs

    def inputs_first(self, inputs: Tensor) -> Tensor:
        """Inputs with the samples in front (n, f, ...)."""
        return self._input_axis.first(inputs.detach(), self.samples)

    def receive(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Receive a factor vector (n, f, ...) at the layer's output."""
        if self.bias is not None:
            units = -1 if self.layer.kind == "linear" else 2
            self.bias.add(vectors.movedim(units, 1).flatten(2).sum(2), weights)
        if self.accumulator is not None:
            self.accumulator.add(vectors, weights)
        if self.recorder is not None:
            self.recorder.add(vectors, weights)


@dataclass(frozen=True)
class NormConstants:
    """A batch-norm with stored statistics, by channel; images have `space` axes behind channels."""

    space: int
    mean: Tensor
    inverse_std: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @property
    def scale(self) -> Tensor:
        """What every channel is multiplied by, all in all."""
        return self.inverse_std if self.weight is None else self.inverse_std * self.weight

    @property
    def shift(self) -> Tensor:
        """What is added afterwards."""
        shift = -self.mean * self.scale
        return shift if self.bias is None else shift + self.bias

    @property
    def vanishes(self) -> bool:
        """Whether some channel is multiplied by so little that its digits are lost."""
        kind = torch.finfo(self.mean.dtype)
        least = [part.abs().min() for part in (self.scale, self.weight) if part is not None]
        return bool(min(least) < kind.tiny / kind.eps)

    def as_image(self, values: Tensor) -> Tensor:
        """Values of channels, to be multiplied with images."""
        return values.view(1, -1, *(1,) * self.space)


class BatchNormOp(OpHandler):
    """A batch-norm with stored statistics: a scale and a shift of every channel.

    With x̂ the normalised input, the gradient by the scale is Σ_p s x̂, that by the shift Σ_p s.
    `weight` adds up the scale's curvature and `bias` the shift's; None if it is not requested.
    """

    def __init__(
        self,
        samples: int,
        node: fx.Node,
        axis: SampleAxis,
        weight: VectorAccumulator | None,
        bias: VectorAccumulator | None,
    ) -> None:
        super().__init__(samples, node, axis)
        self._roles = list(arguments_of(node))
        self.weight, self.bias = weight, bias
        self._normalised: Tensor | None = None  # (n * f, channels, p)

    def compute(self, chunk: SweepChunk, *arguments: Any, **keywords: Any) -> Any:
        """Scale and shift."""
        norm = self.read(*arguments, **keywords)
        images: Tensor = arguments[0] if arguments else keywords["input"]
        scale, shift = norm.as_image(norm.scale), norm.as_image(norm.shift)
        output = torch.addcmul(shift, images, scale)
        if self.weight is not None:
            mean, inverse = norm.as_image(norm.mean), norm.as_image(norm.inverse_std)
            self.begin((images.detach() - mean) * inverse)
        return self.as_returned(self.watch(chunk, output))

    def watch(self, chunk: SweepChunk, output: Tensor) -> Tensor:
        """Watch an output, if any curvature is requested."""
        requested = self.weight is not None or self.bias is not None
        return chunk.watch(output, self.receive) if requested else output

    def read(self, *arguments: Any, **keywords: Any) -> NormConstants:
        """What the op is called with."""
        given = dict(zip(self._roles, arguments, strict=False)) | keywords
        inverse = (given["running_var"] + given["eps"]).rsqrt()
        weight, bias = (
            None if given[role] is None else given[role].detach() for role in ("weight", "bias")
        )
        return NormConstants(given["input"].dim() - 2, given["running_mean"], inverse, weight, bias)

    def begin(self, normalised: Tensor) -> None:
        """Take the normalised input, if the scale's curvature is requested."""
        self._normalised = normalised.reshape(*normalised.shape[:2], -1)

    def as_returned(self, output: Tensor) -> Any:
        """The op's output, as it returns it."""
        if op_name(self.node) == "batch_norm":
            return output
        return output, output.new_empty(0), output.new_empty(0)

    def receive(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Receive a factor vector at the output, in the layout of images."""
        vectors = vectors.reshape(*vectors.shape[:2], -1)  # (n * f, channels, p)
        if self.bias is not None:
            self.bias.add(self._per_sample(vectors.sum(2)), weights)
        if self.weight is not None and self._normalised is not None:
            slopes = torch.linalg.vecdot(vectors, self._normalised)
            self.weight.add(self._per_sample(slopes), weights)

    def _per_sample(self, values: Tensor) -> Tensor:
        """Values (n * f, channels), summed over folds (n, channels)."""
        return self.axis.first(values, self.samples).sum(1)


def batch_norm_behind(layer: Layer) -> fx.Node | None:
    """The batch-norm with stored statistics that alone reads a convolution without bias."""
    if layer.kind != "convolution" or len(layer.node.users) != 1:
        return None
    (node,) = layer.node.users
    if op_name(node) not in BATCH_NORMS or arguments_of(layer.node)["bias"] is not None:
        return None
    given = arguments_of(node)
    stored = given["running_mean"] is not None and given["running_var"] is not None
    alone = given["input"] is layer.node and not given.get("training")
    return node if stored and alone else None


class ConvBatchNormOp(LayerOp):
    """A convolution with a batch-norm behind it, whose handler has accumulators of its own."""

    def __init__(
        self,
        samples: int,
        layer: Layer,
        axes: tuple[SampleAxis, SampleAxis],
        accumulator: ConvAccumulator | None,
        recorder: FactorRecorder | None,
        norm: BatchNormOp,
    ) -> None:
        super().__init__(samples, layer, axes, accumulator, recorder)
        self._norm, self._accumulator = norm, accumulator
        self._called: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def handlers(self, chunk: SweepChunk) -> dict[fx.Node, Handler]:
        """Compute the convolution and the norm."""
        return super().handlers(chunk) | {self._norm.node: partial(self._normalise, chunk)}

    def compute(self, chunk: SweepChunk, *arguments: Any, **keywords: Any) -> Tensor:
        """Wait for the norm, which alone reads the output."""
        self._called = arguments, keywords
        activation: Tensor = arguments[self.layer.position]
        return activation

    def _normalise(self, chunk: SweepChunk, *arguments: Any, **keywords: Any) -> Any:
        """Compute both."""
        norm, (called, named) = self._norm.read(*arguments, **keywords), self._called
        self._called = (), {}
        if self._norm.weight is not None and norm.vanishes:
            # What goes into the norm cannot be computed from what comes out.
            output = super().compute(chunk, *called, **named)
            return self._norm.compute(chunk, output, *arguments[1:], **keywords)
        given, scale = list(called), norm.scale
        place = list(arguments_of(self.node)).index("weight")
        given[place] = given[place] * scale.view(-1, *(1,) * (given[place].dim() - 1))
        inputs = self.watch_input(chunk, given)
        values = call_op(self.node, *given, **named)
        inputs, outputs = self.inputs_first(inputs), self.outputs_first(values)
        if self._accumulator is not None:
            self._accumulator.begin(inputs, outputs, scale=scale)
        if self.recorder is not None:
            self.recorder.begin(inputs, outputs)
        if self._norm.weight is not None:
            assert norm.weight is not None  # It is requested.
            normalised = values.detach() / norm.as_image(norm.weight)
            normalised -= norm.as_image(norm.mean * norm.inverse_std)
            self._norm.begin(normalised)

        def receive(vectors: Tensor, weights: Tensor | None) -> None:
            self._norm.receive(vectors, weights)
            if self.recorder is not None:
                self.recorder.add(self.outputs_first(vectors * norm.as_image(scale)), weights)
            if self._accumulator is not None:
                self._accumulator.add(self.outputs_first(vectors), weights)

        output = chunk.watch(values + norm.as_image(norm.shift), receive)
        return self._norm.as_returned(output)


def pooling_behind(layer: Layer) -> fx.Node | None:
    """The max-pooling that alone reads what a layer puts out, also behind a ReLU."""
    if layer.kind != "convolution" or len(layer.stride) != 2 or layer.groups != 1:
        return None
    node = layer.node
    for _ in range(2):
        if len(node.users) != 1:
            return None
        (node,) = node.users
        if op_name(node) == "max_pool2d":
            return node
        if op_name(node) != "relu":
            return None
    return None


def is_cheaper_behind_pooling(
    accumulator: ConvAccumulator, channels: int, positions_per_window: float
) -> bool:
    """Whether vectors are better received behind the pooling."""
    if accumulator.needs_input_vectors:
        return False
    return not accumulator.may_need_gradients or channels <= _PATCHES * positions_per_window


class ConvPoolOp(LayerOp):
    """A convolution with max-pooling behind it, if nothing in front of it is watched."""

    def __init__(
        self,
        samples: int,
        layer: Layer,
        axes: tuple[SampleAxis, SampleAxis],
        accumulator: ConvAccumulator,
        bias: VectorAccumulator | None,
        pool: fx.Node,
    ) -> None:
        super().__init__(samples, layer, axes, accumulator, None, bias)
        self._accumulator, self._pool = accumulator, pool
        self._has_relu = self.node not in pool.all_input_nodes
        self._called: tuple[Tensor, Tensor] | None = None

    def handlers(self, chunk: SweepChunk) -> dict[fx.Node, Handler]:
        """Compute the convolution and the pooling."""
        return super().handlers(chunk) | {self._pool: partial(self._max_pool, chunk)}

    def compute(self, chunk: SweepChunk, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the convolution."""
        inputs = arguments[self.layer.position]
        if inputs.requires_grad or len(inputs) != self.samples:
            return super().compute(chunk, *arguments, **keywords)
        output: Tensor = call_op(self.node, *arguments, **keywords)
        self._called = inputs[:, None], (output - self.layer.bias_of(arguments))[:, None]
        return output

    def _max_pool(self, chunk: SweepChunk, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the pooling; vectors are received behind it."""
        if self._called is None:
            pooled: Tensor = call_op(self._pool, *arguments, **keywords)
            return pooled
        largest, places = torch.ops.aten.max_pool2d_with_indices(*arguments, **keywords)
        inputs, outputs = self._called
        self._accumulator.begin(inputs, outputs, winners=places.flatten(2))
        self._called = None

        def receive(vectors: Tensor, weights: Tensor | None) -> None:
            if self._has_relu:
                vectors = torch.ops.aten.threshold_backward(vectors, largest, 0)
            self.receive(vectors.flatten(2)[:, None], weights)

        return chunk.watch(largest.detach(), receive)


class GenericOp(OpHandler):
    """Any op that is linear in its parameters: their gradients by single samples by `vjp`.

    `parameters` are every requested one's chain of ops, value and accumulator; `axes` say where in
    the op's other inputs the samples lie.
    """

    def __init__(
        self,
        samples: int,
        node: fx.Node,
        axis: SampleAxis,
        parameters: Sequence[tuple[Chain, Tensor, VectorAccumulator]],
        axes: Mapping[fx.Node, SampleAxis],
    ) -> None:
        super().__init__(samples, node, axis)
        self._axes = axes
        self._parameters = [(chain, value.detach(), each) for chain, value, each in parameters]

    def compute(self, chunk: SweepChunk, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the op, keeping what it was computed from."""
        given = pytree.tree_leaves((arguments, keywords))
        nodes, spec = pytree.tree_flatten((self.node.args, dict(self.node.kwargs)))
        places = {i: self._axes[n] for i, n in enumerate(nodes) if n in self._axes}
        moved = {i: axis.first(given[i].detach(), self.samples) for i, axis in places.items()}

        def op(chain: Chain, parameter: Tensor, rows: dict[int, Tensor]) -> Tensor:
            """The op on one sample, along whose axis are its folds."""
            for step in chain:
                parameter = step(parameter)
            leaves = [parameter if n is chain.end else x for n, x in zip(nodes, given, strict=True)]
            for i, row in rows.items():
                leaves[i] = row.movedim(0, places[i].axis)
            positional, named = pytree.tree_unflatten(leaves, spec)
            output: Tensor = call_op(self.node, *positional, **named)
            return output

        def receive(vectors: Tensor, weights: Tensor | None) -> None:
            for chain, value, accumulator in self._parameters:

                def gradient(
                    rows: dict[int, Tensor],
                    vector: Tensor,
                    chain: Chain = chain,
                    value: Tensor = value,
                ) -> Tensor:
                    back = torch.func.vjp(lambda p: op(chain, p, rows), value)[1]
                    found: Tensor = back(vector.movedim(0, self.axis.axis))[0]
                    return found

                slopes = torch.vmap(gradient)(moved, vectors)
                accumulator.add(slopes.reshape(len(vectors), -1), weights)

        return self.watch_output(chunk, call_op(self.node, *arguments, **keywords), receive)
