"""Convolutions that are swept together with the op behind them: batch-norm, or max-pooling.

What enters and leaves is as for `LayerOp`; factor vectors are received behind the second op.

- `ConvBatchNormOp`: with stored statistics a batch-norm is a scale γ̂ and a shift of every channel,
  and the scale is as well one of the weights, W̃ = γ̂ W. Vectors s read behind the norm need not be
  passed through it: forms of units and relative flatness are the same there, and gradients take
  the scale along where vectors are copied anyway (G from γ̂ s).
- `ConvPoolOp`: max-pooling passes back zeros to all but the largest value of every window. If
  nothing in front of the layer is watched, vectors s_w behind the pooling need not be spread out:
  forms and G = Σ_w s_w a_wᵀ are sums over windows, with a_w what the largest value was computed
  from.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from flatgauge.curvature.sweep.accumulate import VectorAccumulator
from flatgauge.curvature.sweep.ops import BATCH_NORMS, BatchNormOp, LayerOp, bias_of
from flatgauge.curvature.sweep.sample_gradients import FactorRecorder
from flatgauge.graph.layers import Layer
from flatgauge.graph.ops import arguments_of, call_op, op_name

if TYPE_CHECKING:
    from flatgauge.curvature.sweep.chunk import SweepChunk
    from flatgauge.curvature.sweep.conv import ConvAccumulator
    from flatgauge.graph.export import Handler, SampleAxis

#: How many times more patches there may be, cut out for every channel by itself, than positions.
_PATCHES = 4


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
        self._called = inputs[:, None], (output - bias_of(self.layer, arguments))[:, None]
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
