"""Taps at layers: linear maps and convolutions of every kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatgauge.curvature.patches import patches
from flatgauge.curvature.taps import Chunk, Parts, Tap, VectorGather
from flatgauge.graph import SampleAxis, arguments_of, op_name
from flatgauge.layers import Layer


class LayerTap(Tap):
    """A tap at a contraction; its bias is gathered along with its weight.

    Args:
        chunk: The chunk that is swept.
        layer: The layer.
        axes: Where in input and output the samples lie.
        weight: The layer's weight, None if it is not to be gathered.
        bias: Its bias, None if it is not to be gathered.
    """

    def __init__(
        self,
        chunk: Chunk,
        layer: Layer,
        axes: tuple[SampleAxis, SampleAxis],
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        super().__init__(chunk, layer.node, axes[1])
        self.layer = layer
        self._input_axis = axes[0]
        self._weight = weight
        self._biases = None
        if bias is not None and layer.bias is not None:
            self._biases = VectorGather(chunk, layer.bias, bias)
        self._gather: _Rows | _Positions | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute the contraction."""
        given = list(arguments)
        activation = given[self.layer.position]
        listens = self._weight is not None and self._reads_back(activation)
        if listens:
            activation = activation.view_as(activation)
            activation = self.chunk.started(activation)
            activation.register_hook(self._hear_back)
            given[self.layer.position] = activation
        output = self.node.target(*given, **keywords)  # type: ignore[operator]
        if self._weight is not None:
            self._gather = self._gathering(activation.detach(), output.detach() - self._added(given))
        return self.heard(output, self._hear)

    def take(self) -> dict[str, Parts]:
        """The parts of weight and bias gathered since the last time."""
        parts = {} if self._gather is None else {self.layer.name: self._gather.take()}
        return parts | (self._biases.take() if self._biases else {})

    def diagonals(self) -> dict[str, Tensor]:
        """The diagonals of weight and bias."""
        found = self._biases.diagonal() if self._biases else {}
        if self._gather is not None and self._weight is not None:
            diagonal = self._gather.diagonal()
            if diagonal is not None:
                shape = tuple(self._weight.shape)
                found[self.layer.name] = self.layer.original(diagonal, shape)
        return found

    def _added(self, given: list[Any]) -> Tensor | float:
        """What the op adds to the contraction."""
        names = list(arguments_of(self.node))
        role = "self" if op_name(self.node) == "addmm" else "bias"
        place = names.index(role) if role in names else len(given)
        if place >= len(given) or given[place] is None:
            return 0.0
        added: Tensor = given[place].detach()
        if self.layer.kind != "linear":
            added = added.reshape(-1, *(1,) * len(self.layer.stride))
        return added

    def _reads_back(self, activation: Tensor) -> bool:
        """Whether what is passed on to the layer's input is needed here."""
        if not {"outgoing", "relative"} & self.chunk.wanted:
            return False
        return self._is_single(activation) or "outgoing" in self.chunk.wanted

    def _is_single(self, activation: Tensor) -> bool:
        """Whether every sample has one position only."""
        units = activation.shape[-1]
        return (
            self.layer.kind == "linear"
            and activation.numel() // units == self.chunk.samples
        )

    def _gathering(self, activation: Tensor, output: Tensor) -> _Rows | _Positions:
        """What gathers the weight's curvature from this chunk."""
        assert self._weight is not None
        images = self._input_axis.first(activation, self.chunk.samples)
        outputs = self.axis.first(output, self.chunk.samples)
        kind = _Rows if self._is_single(activation) else _Positions
        return kind(self.chunk, self.layer, self._weight, images, outputs)

    def _hear(self, column: Tensor) -> None:
        """A column (n, positions, ...) at the layer's output."""
        if self._biases is not None:
            units = -1 if self.layer.kind == "linear" else 2
            self._biases.add(column.movedim(units, 1).flatten(2).sum(2))
        if self._gather is not None:
            self._gather.hear(column)

    def _hear_back(self, column: Tensor) -> None:
        """The same column, passed on to the layer's input."""
        if self._gather is not None:
            self._gather.hear_back(self._input_axis.first(column, self.chunk.samples))


class _Rows:
    """Linear layers with one position per sample: squares first, one product at the end."""

    def __init__(
        self, chunk: Chunk, layer: Layer, weight: Tensor, inputs: Tensor, outputs: Tensor
    ) -> None:
        self._chunk = chunk
        self._squares = inputs.reshape(chunk.samples, -1).square()  # a², (n, in)
        self._outputs = outputs.reshape(chunk.samples, -1)  # Wa, (n, out)
        self._s2 = torch.zeros_like(self._outputs)  # Σ λ s²
        self._t2 = torch.zeros_like(self._squares)  # Σ λ (Wᵀs)²
        self._all_s2 = torch.zeros_like(self._outputs)

    def hear(self, column: Tensor) -> None:
        self._chunk.add_square(self._s2, column.reshape(self._s2.shape))

    def hear_back(self, column: Tensor) -> None:
        self._chunk.add_square(self._t2, column.reshape(self._t2.shape))

    def take(self) -> Parts:
        wanted, parts = self._chunk.wanted, Parts()
        norms = self._squares.sum(1)
        if "trace" in wanted:
            parts.trace = norms * self._s2.sum(1)
        if "incoming" in wanted:
            parts.incoming = self._s2 * self._outputs.square()
        if "outgoing" in wanted:
            parts.outgoing = self._squares * self._t2
        if "relative" in wanted:
            parts.relative = norms * self._t2.sum(1)
        self._all_s2 += self._s2
        self._s2.zero_()
        self._t2.zero_()
        return parts

    def diagonal(self) -> Tensor | None:
        if "diagonal" not in self._chunk.wanted:
            return None
        return (self._all_s2.T @ self._squares)[None, :, :, None]


class _Positions:
    """Layers with many positions per sample: sums over positions before squaring."""

    def __init__(
        self, chunk: Chunk, layer: Layer, weight: Tensor, inputs: Tensor, outputs: Tensor
    ) -> None:
        self._chunk, self._layer = chunk, layer
        self._weight = layer.canonical(weight)
        groups, out, inner, taps = self._weight.shape
        self._shape = (groups, out, inner, taps)
        self._kernel = tuple(weight.shape[2:])
        self._inputs, self._outputs = inputs, outputs
        self._needs_gradient = bool({"trace", "diagonal", "relative"} & chunk.wanted)
        n = chunk.samples
        zeros = weight.new_zeros
        self._incoming, self._outgoing = zeros(n, groups * out), zeros(n, groups * inner)
        self._relative = zeros(n)
        if self._needs_gradient:
            self._patches = self._patched(inputs) if layer.kind != "transposed" else self._flat(inputs)
            self._squares = zeros(n, groups * out * inner * taps)
            self._taken = zeros(n, groups * out * inner * taps)
            rows = self._weight.flatten(2)
            self._products = rows @ rows.mT  # W Wᵀ, (groups, out, out)

    def hear(self, column: Tensor) -> None:
        if "incoming" in self._chunk.wanted:
            forms = self._units(column * self._outputs)
            self._chunk.add_square(self._incoming, forms)
        if self._needs_gradient:
            gradient = self._gradient(column)
            self._chunk.add_square(self._squares, gradient.flatten(1))
            if "relative" in self._chunk.wanted:
                values = ((self._products @ gradient.flatten(3)) * gradient.flatten(3)).flatten(1).sum(1)
                self._relative += values if self._chunk.sign is None else values * self._chunk.sign

    def hear_back(self, column: Tensor) -> None:
        if "outgoing" in self._chunk.wanted:
            self._chunk.add_square(self._outgoing, self._units(column * self._inputs))

    def take(self) -> Parts:
        wanted, parts = self._chunk.wanted, Parts()
        if "trace" in wanted:
            parts.trace = self._squares.sum(1)
        if self._needs_gradient:
            self._taken += self._squares
            self._squares.zero_()
        for name in ("incoming", "outgoing", "relative"):
            if name in wanted:
                gathered = getattr(self, f"_{name}")
                setattr(parts, name, gathered.clone())
                gathered.zero_()
        return parts

    def diagonal(self) -> Tensor | None:
        if "diagonal" not in self._chunk.wanted:
            return None
        return self._taken.sum(0).reshape(self._shape)

    def _gradient(self, column: Tensor) -> Tensor:
        """The weight's gradient by every sample (n, groups, out, in, taps)."""
        groups, out, inner, taps = self._shape
        if self._layer.kind == "transposed":
            cut = self._patched(column)  # (n, groups, out * taps, positions)
            product = (cut @ self._patches.mT).unflatten(2, (out, taps))
            return product.transpose(3, 4)
        product = self._flat(column) @ self._patches.mT  # (n, groups, out, in * taps)
        return product.unflatten(3, (inner, taps))

    def _units(self, values: Tensor) -> Tensor:
        """Sum (n, positions, ...) over everything but samples and units."""
        units = -1 if self._layer.kind == "linear" else 2
        return values.movedim(units, 1).flatten(2).sum(2)

    def _flat(self, tensor: Tensor) -> Tensor:
        """Units and positions (n, groups, units / groups, positions) of a tensor."""
        units = -1 if self._layer.kind == "linear" else 2
        flat = tensor.movedim(units, 1).flatten(2)
        return flat.unflatten(1, (self._layer.groups, -1))

    def _patched(self, images: Tensor) -> Tensor:
        """What every position sees (n, groups, units / groups * taps, positions)."""
        if self._layer.kind == "linear":
            return self._flat(images)
        layer = self._layer
        trivial = set(self._kernel) == {1} == set(layer.stride) and not any(
            side for pair in layer.padding for side in pair
        )
        if trivial:
            return self._flat(images)
        n, folds = images.shape[:2]
        cut = patches(
            images.flatten(0, 1), self._kernel, layer.stride, layer.padding, layer.dilation
        )  # (n * folds, units, taps, positions)
        cut = cut.unflatten(0, (n, folds)).movedim(1, -2).flatten(-2)
        return cut.unflatten(1, (layer.groups, -1)).flatten(2, 3)
