"""Taps at convolutions with a batch-norm behind them, run as the one convolution that they are.

With stored statistics a batch-norm is a scale and a shift of every channel, and the scale is as
well one of the weights. Columns are then heard behind the norm, and need not be passed through it:
forms and relative flatness are the same there, and gradients take the scale along where columns
are copied anyway.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from flatgauge.curvature.factors import KeptColumns
from flatgauge.curvature.gathers import Positions
from flatgauge.curvature.layer_taps import LayerTap
from flatgauge.curvature.parameter_taps import BATCH_NORMS, BatchNormTap
from flatgauge.curvature.taps import Chunk, Parts
from flatgauge.graph import Handler, SampleAxis
from flatgauge.layers import Layer
from flatgauge.nodes import arguments_of, call_op, op_name


def norm_behind(layer: Layer) -> fx.Node | None:
    """The batch-norm with stored statistics that alone reads what a convolution puts out.

    Args:
        layer: The layer.

    Returns:
        The op; None if there is none, or the convolution has a bias of its own.
    """
    if layer.kind != "convolution" or len(layer.node.users) != 1:
        return None
    (node,) = layer.node.users
    if op_name(node) not in BATCH_NORMS or arguments_of(layer.node)["bias"] is not None:
        return None
    given = arguments_of(node)
    stored = given["running_mean"] is not None and given["running_var"] is not None
    alone = given["input"] is layer.node and not given.get("training")
    return node if stored and alone else None


class NormedTap(LayerTap):
    """A tap at a convolution that listens behind the batch-norm.

    Args:
        chunk: The chunk that is swept.
        layer: The layer.
        axes: Where in input and output the samples lie.
        gather: What gathers the weight's curvature, None if it is not to be gathered.
        keeper: What keeps the columns, None if they are not to be kept.
        norm: The tap at the batch-norm, which gathers its own parameters.
    """

    def __init__(
        self,
        chunk: Chunk,
        layer: Layer,
        axes: tuple[SampleAxis, SampleAxis],
        gather: Positions | None,
        keeper: KeptColumns | None,
        norm: BatchNormTap,
    ) -> None:
        super().__init__(chunk, layer, axes, None, gather, keeper)
        self._norm, self._positions = norm, gather
        self._called: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def handlers(self) -> dict[fx.Node, Handler]:
        """Stand in for the convolution and for the norm."""
        return {self.node: self, self._norm.node: self._normed}

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Wait for the norm, which alone reads the output."""
        self._called = arguments, keywords
        activation: Tensor = arguments[self.layer.position]
        return activation

    def _normed(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute both."""
        norm, (called, named) = self._norm.read(*arguments, **keywords), self._called
        self._called = (), {}
        if self._norm.reads_inputs and norm.vanishes:
            # What goes into the norm cannot be told from what comes out.
            return self._norm(super().__call__(*called, **named), *arguments[1:], **keywords)
        given, scale = list(called), norm.scale
        place = list(arguments_of(self.node)).index("weight")
        given[place] = given[place] * scale.view(-1, *(1,) * (given[place].dim() - 1))
        activation = self.listening(given)
        values = call_op(self.node, *given, **named)
        inputs, outputs = self.taken(activation, values.detach())
        if self._positions is not None:
            self._positions.open(inputs, outputs, scale=scale)
        if self.keeper is not None:
            self.keeper.open(inputs, outputs)
        normal = None
        if self._norm.reads_inputs:
            assert norm.weight is not None  # It is to be gathered.
            normal = values.detach() / norm.spread(norm.weight)
            normal -= norm.spread(norm.mean * norm.inverse)
        self._norm.open(norm, normal)

        def listener(column: Tensor) -> None:
            self._norm.hear(column)
            if self.keeper is not None:
                self.keeper.hear(self.first(column * norm.spread(scale)))
            if self._positions is not None:
                self._positions.hear(self.first(column))

        output = self.chunk.started(values + norm.spread(norm.shift))
        output.register_hook(listener)
        return self._norm.returned(output)

    def take(self) -> dict[str, Parts]:
        """The parts of the convolution and of the norm since the last time."""
        return super().take() | self._norm.take()

    def diagonals(self) -> dict[str, Tensor]:
        """The diagonals of the convolution and of the norm."""
        return super().diagonals() | self._norm.diagonals()
