"""Taps at the first layer, where pooling comes behind it: columns are heard behind the pooling.

Only the largest value of every window is passed on, so that what is passed back is zero everywhere
else. Where nothing in front of a layer is to be heard, its columns need not be spread out again:
forms and gradients are sums over the windows, of what is found where each has its largest value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from flatgauge.curvature.gathers import Positions
from flatgauge.curvature.layer_taps import LayerTap, added_by
from flatgauge.curvature.taps import Chunk
from flatgauge.graph import Handler, SampleAxis
from flatgauge.layers import Layer
from flatgauge.nodes import call_op, op_name

#: How many times more patches there may be, cut out for every channel by itself, than positions.
_PATCHES = 4


def pooling_behind(layer: Layer) -> fx.Node | None:
    """The max-pooling that alone reads what a layer puts out, also behind a relu.

    Args:
        layer: The layer.

    Returns:
        The op; None if there is none.
    """
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


def gains(gather: Positions, channels: int, area: float) -> bool:
    """Whether columns are better heard behind the pooling.

    Args:
        gather: What hears them.
        channels: How many the layer puts out.
        area: How many positions there are for every window.

    Returns:
        Whether they are.
    """
    return not gather.reads_back and (not gather.by_gradient or channels <= _PATCHES * area)


class PooledTap(LayerTap):
    """A tap at a convolution that listens behind the pooling, if nothing in front of it listens.

    Args:
        chunk: The chunk that is swept.
        layer: The layer.
        axes: Where in input and output the samples lie.
        bias: Its bias, None if it is not to be gathered.
        gather: What gathers the weight's curvature.
        pool: The pooling.
    """

    def __init__(
        self,
        chunk: Chunk,
        layer: Layer,
        axes: tuple[SampleAxis, SampleAxis],
        bias: Tensor | None,
        gather: Positions,
        pool: fx.Node,
    ) -> None:
        super().__init__(chunk, layer, axes, bias, gather, None)
        self._pool, self._positions = pool, gather
        self._rectified = self.node not in pool.all_input_nodes
        self._opened: tuple[Tensor, Tensor] | None = None

    def handlers(self) -> dict[fx.Node, Handler]:
        """Stand in for the convolution and for the pooling."""
        return {self.node: self, self._pool: self._pooled}

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the contraction."""
        activation = arguments[self.layer.position]
        if activation.requires_grad or len(activation) != self.chunk.samples:
            return super().__call__(*arguments, **keywords)
        output: Tensor = call_op(self.node, *arguments, **keywords)
        self._opened = activation[:, None], (output - added_by(self.layer, arguments))[:, None]
        return output

    def _pooled(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the pooling, listening to what will be passed back through it."""
        if self._opened is None:
            pooled: Tensor = call_op(self._pool, *arguments, **keywords)
            return pooled
        largest, places = torch.ops.aten.max_pool2d_with_indices(*arguments, **keywords)
        inputs, outputs = self._opened
        self._positions.open(inputs, outputs, winners=places.flatten(2))
        self._opened = None

        def listener(column: Tensor) -> None:
            if self._rectified:
                column = torch.ops.aten.threshold_backward(column, largest, 0)
            self.hear(column.flatten(2)[:, None])

        output = self.chunk.started(largest.detach())
        output.register_hook(listener)
        return output
