"""Taps at layers: linear maps and convolutions of every kind, with their biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flatgauge.curvature.factors import Kept, KeptColumns
from flatgauge.curvature.gathers import Gather
from flatgauge.curvature.rows import Rows
from flatgauge.curvature.taps import Chunk, Parts, Tap, VectorGather
from flatgauge.graph import SampleAxis
from flatgauge.layers import Layer
from flatgauge.nodes import arguments_of, call_op, op_name


class OfLayer:
    """What listens to one layer.

    Attributes:
        layer: The layer.
        biases: What gathers its bias, None if it is not to be gathered.
        gather: What gathers the weight's curvature, None if it is not to be gathered.
        keeper: What keeps the columns, None if they are not to be kept.
    """

    layer: Layer
    biases: VectorGather | None
    gather: Gather | None
    keeper: KeptColumns | None

    def diagonals(self) -> dict[str, Tensor]:
        """The diagonals of weight and bias."""
        found = self.biases.diagonal() if self.biases else {}
        diagonal = None if self.gather is None else self.gather.diagonal()
        if diagonal is not None:
            found[self.layer.name] = self.layer.original(diagonal)
        return found

    def sizes(self) -> dict[str, Tensor]:
        """The size of the weight's diagonal."""
        size = None if self.gather is None else self.gather.size()
        return {} if size is None else {self.layer.name: self.layer.original(size)}

    def kept(self) -> dict[str, Kept]:
        """The columns that were kept."""
        return {} if self.keeper is None else {self.layer.name: self.keeper.kept()}


class LayerTap(OfLayer, Tap):
    """A tap at a contraction; its bias is gathered along with its weight.

    Args:
        chunk: The chunk that is swept.
        layer: The layer.
        axes: Where in input and output the samples lie.
        bias: Its bias, None if it is not to be gathered.
        gather: What gathers the weight's curvature, None if it is not to be gathered.
        keeper: What keeps the columns, None if they are not to be kept.
    """

    def __init__(
        self,
        chunk: Chunk,
        layer: Layer,
        axes: tuple[SampleAxis, SampleAxis],
        bias: Tensor | None,
        gather: Gather | None,
        keeper: KeptColumns | None,
    ) -> None:
        super().__init__(chunk, layer.node, axes[1])
        self.layer = layer
        self._input_axis = axes[0]
        self.biases = None
        if bias is not None and layer.bias is not None:
            self.biases = VectorGather(chunk, layer.bias, bias)
        self.gather, self.keeper = gather, keeper

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the contraction."""
        given = list(arguments)
        activation = self.listening(given)
        output = call_op(self.node, *given, **keywords)
        if self.gather is not None or self.keeper is not None:
            values = output.detach() - added_by(self.layer, given)
            inputs, outputs = self.taken(activation, values)
            if self.gather is not None:
                self.gather.open(inputs, outputs)
            if self.keeper is not None:
                self.keeper.open(inputs, outputs)
        return self.heard(output, self.hear)

    def listening(self, given: list[Any]) -> Tensor:
        """The activation among an op's arguments; there it hears what is passed on, if need be."""
        activation: Tensor = given[self.layer.position]
        if self.gather is not None and self.gather.reads_back:
            activation = self.chunk.started(activation.view_as(activation))
            activation.register_hook(self._hear_back)
            given[self.layer.position] = activation
        return activation

    def taken(self, activation: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What goes in and what comes out, without bias, with the samples in front."""
        inputs = self._input_axis.first(activation.detach(), self.chunk.samples)
        return inputs, self.first(values)

    def take(self) -> dict[str, Parts]:
        """The parts of weight and bias gathered since the last time."""
        if self.biases is not None and isinstance(self.gather, Rows):
            self.biases.add_squares(self.gather.s2)
        parts = {} if self.gather is None else {self.layer.name: self.gather.take()}
        return parts | (self.biases.take() if self.biases else {})

    def hear(self, column: Tensor) -> None:
        """A column (n, positions, ...) at the layer's output."""
        if self.biases is not None and not isinstance(self.gather, Rows):
            units = -1 if self.layer.kind == "linear" else 2
            self.biases.add(column.movedim(units, 1).flatten(2).sum(2))
        if self.gather is not None:
            self.gather.hear(column)
        if self.keeper is not None:
            self.keeper.hear(column)

    def _hear_back(self, column: Tensor) -> None:
        """The same column, passed on to the layer's input."""
        if self.gather is not None:
            self.gather.hear_back(self._input_axis.first(column, self.chunk.samples))


def added_by(layer: Layer, given: Sequence[Any]) -> Tensor | float:
    """What the op of a layer adds to the contraction.

    Args:
        layer: The layer.
        given: The op's arguments.

    Returns:
        The bias, to be added to the output; zero if there is none.
    """
    names = list(arguments_of(layer.node))
    role = "self" if op_name(layer.node) == "addmm" else "bias"
    place = names.index(role) if role in names else len(given)
    if place >= len(given) or given[place] is None:
        return 0.0
    added: Tensor = given[place].detach()
    if layer.kind != "linear":
        added = added.reshape(-1, *(1,) * len(layer.stride))
    return added
