"""Curvature of layers applied at many positions: convolutions, position-wise linear maps.

What enters: for one chunk of samples the layer's inputs a and outputs z = W a (without bias), then
one backpropagated factor vector s at the layer's output after the other, each with a weight per
sample (λ in the formulas; None if all are one). What leaves: what every sample adds to each part,
and the diagonal of the layer's Hessian block, summed over the chunk.

How it works: the weight acts at every position p, so one factor vector has the per-sample gradient
G = Σ_p s_p a_pᵀ, which is summed over positions before it is squared. Some parts can also be had
from activations, without G; t = Wᵀs is the factor vector at the layer's input:

    part                 from gradients               from activations
    trace                Σ λ ‖G‖²                     -
    diagonal             Σ λ G²                       -
    weighted_diagonal    Σ λ W² G²                    -
    incoming[i]          Σ λ (Σ_j W_ij G_ij)²         Σ λ (Σ_p s_ip z_ip)²
    outgoing[j]          Σ λ (Σ_i W_ij G_ij)²         Σ λ (Σ_p a_jp t_jp)²
    relative             Σ λ ⟨G, W Wᵀ G⟩              Σ λ ⟨sᵀ W Wᵀ s, aᵀ a⟩
    normalized           as `relative`, with W σ and a / σ in place of W and a

Which side is cheaper is decided once: for units in `__init__`, for `relative` in `begin`.

`SampleGradients` computes G: what every position sees is cut out of the inputs once
(`cut_patches`), and vectors wait in a buffer until there are enough for one large matrix product.
What a unit reads is one row of G: input units and kernel taps, in the order in which they lie in
memory (taps first where images have their channels last). `FactorRecorder` keeps either G or (a, s)
for later products with the layer's block.

Shapes: n samples, f folds (positions merged with the samples, mostly 1), g groups, o and i units
per group, k kernel taps, p positions, c factor vectors. Weights are (g, o, i, k).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from flatgauge.curvature.sweep.accumulate import (
    ChunkContext,
    LayerAccumulator,
    SampleParts,
    add_weighted_squares,
    reciprocal_or_zero,
)
from flatgauge.graph.layers import Layer
from flatgauge.surface.derivatives import SubmatrixIndex

#: The parts that are sums of squared gradients.
_SQUARES = frozenset({"trace", "diagonal", "weighted_diagonal"})

#: The parts with one number per unit, and those that come from gradients or positions.
_UNITS, _RELATIVE = frozenset({"incoming", "outgoing"}), frozenset({"relative", "normalized"})

#: The parts that are summed up per sample.
_PER_SAMPLE = ("trace", "weighted_diagonal", "incoming", "outgoing", "relative", "normalized")

#: Gradients are computed for this many vectors at once, as larger products are faster, but only for
#: as many samples as fit into these bytes with their vectors: else what is computed has left the
#: cache before it is squared.
_STACKED, _BLOCK = 9, 16 * 2**20

#: From a shape to memory of that shape; None for a new tensor.
Allocate = Callable[[Sequence[int]], Tensor] | None


class ConvAccumulator(LayerAccumulator):
    """Adds up the curvature of one layer with many positions over one chunk.

    `activations` is how many numbers enter and leave the layer for one sample;
    `may_need_gradients`, whether gradients are computed, unless positions are few.
    """

    def __init__(
        self, context: ChunkContext, layer: Layer, weight: Tensor, activations: int
    ) -> None:
        parts = context.parts
        self._context, self._layer = context, layer
        self._gradients = SampleGradients(context, layer, weight)
        self._weight = self._gradients.weight  # (g, o, i, k)
        groups, out, inner, _ = self._weight.shape
        self._one_input = inner == 1  # Depthwise: all that enters a group leaves one unit.
        self.may_need_gradients = bool(parts & (_SQUARES | _RELATIVE))
        self._units_from_gradients = self.may_need_gradients and weight.numel() <= activations
        without_inputs = self._units_from_gradients or self._one_input
        self.needs_input_vectors = "outgoing" in parts and not without_inputs
        self._relative: dict[str, RelativeForm] = {}
        if "relative" in parts:
            self._relative["relative"] = RelativeForm(self._weight)
        std = context.input_std.get(layer.name)
        if "normalized" in parts and std is not None:
            self._relative["normalized"] = RelativeForm(self._weight, std.to(weight))
        units = {"incoming": (groups * out,), "outgoing": (groups * inner,)}
        known = (parts - _RELATIVE) | self._relative.keys()
        self._sums = {
            part: weight.new_zeros(context.samples, *units.get(part, ()))
            for part in _PER_SAMPLE
            if part in known
        }
        self._diagonal: Tensor | None = None  # (g, o, i * k)
        self._magnitude: Tensor | None = None  # The same with |λ|, where λ has both signs.

    def begin(
        self,
        inputs: Tensor,
        outputs: Tensor,
        winners: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """Take inputs a (n, f, ...) and outputs z without bias, before the first factor vector.

        Vectors behind a max-pooling (n, 1, o, windows) need `winners` (n, o, windows), the position
        of every window's largest value; vectors behind a batch-norm its `scale` (o,), which is also
        in `outputs`.
        """
        if winners is not None:
            outputs = outputs.flatten(3).gather(3, winners[:, None])
        self._inputs, self._outputs = inputs, outputs
        _, out, inner, taps = self._weight.shape
        positions = outputs[0].numel() // (out * self._layer.groups)
        few_positions = positions * (positions + out) < out * inner * taps
        plain = winners is None and self._layer.kind != "transposed"
        self._relative_from_positions = few_positions and plain
        parts = self._context.parts
        self._needs_gradients = bool(
            parts & _SQUARES
            or (parts & _UNITS and self._units_from_gradients)
            or (self._relative and not self._relative_from_positions)
        )
        if self.may_need_gradients:
            self._gradients.begin(inputs, winners, scale)
        if self._relative_from_positions:
            for form in self._relative.values():
                form.begin(self._gradients)

    def add(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Add one factor vector s at the output (n, f, ...), with its weights (n,)."""
        if not self._units_from_gradients:
            self._add_units_from_outputs(vectors, weights)
        if self._relative_from_positions and self._relative:
            flat = self._gradients.rescale(self._gradients.flatten(vectors))  # (n, g, o, p)
            for part, form in self._relative.items():
                self._sums[part] += form.from_positions(flat, weights)
        if self._needs_gradients and self._gradients.push(vectors, weights):
            self._use_gradients()  # The buffer is full.

    def add_at_input(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Add the same factor vector at the input, t = Wᵀs (n, f, ...)."""
        leaving = self._sum_positions(vectors * self._inputs)
        add_weighted_squares(self._sums["outgoing"], leaving, weights)

    def take(self) -> SampleParts:
        """The parts of every sample from the vectors since the last call."""
        self._use_gradients()
        taken = self._sums
        self._sums = {part: torch.zeros_like(values) for part, values in taken.items()}
        return SampleParts(taken)

    def diagonal(self) -> Tensor | None:
        """The block's diagonal over the whole chunk, in the parameter's shape; given once."""
        found, self._diagonal = self._diagonal, None
        return self._in_own_shape(found)

    def magnitude(self) -> Tensor | None:
        """The diagonal if nothing had cancelled; given once."""
        found, self._magnitude = self._magnitude, None
        return self._in_own_shape(found)

    def _add_units_from_outputs(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Units from Σ_p s z; of a depthwise layer what leaves a unit, too."""
        outgoing = self._one_input and "outgoing" in self._sums
        if not outgoing and "incoming" not in self._sums:
            return
        entering = self._sum_positions(vectors * self._outputs)  # (n, g * o)
        if "incoming" in self._sums:
            add_weighted_squares(self._sums["incoming"], entering, weights)
        if outgoing:
            leaving = entering.unflatten(1, (self._layer.groups, -1)).sum(2)  # (n, g)
            add_weighted_squares(self._sums["outgoing"], leaving, weights)

    def _use_gradients(self) -> None:
        """Turn the buffered factor vectors into gradients, and these into parts."""
        for rows, gradients, weights in self._gradients.drain():  # Some samples at a time.
            if not self._relative_from_positions:
                for part, form in self._relative.items():
                    self._sums[part][rows] += form.from_gradients(
                        gradients, weights, self._gradients
                    )
            if self._units_from_gradients:
                self._add_units(gradients, weights, rows)
            if self._context.parts & _SQUARES:
                self._add_squares(gradients.square_(), weights, rows)  # It overwrites G.

    def _add_units(self, gradients: Tensor, weights: Tensor | None, rows: slice) -> None:
        """Units from sums of W ∘ G, with G (n, g, c, o, i * k)."""
        if not self._sums.keys() & _UNITS:
            return
        products = self._context.workspace.tensor("products", gradients.shape, gradients)
        torch.mul(gradients, self._gradients.as_rows(self._weight)[:, None], out=products)
        entering = products.sum(-1)  # (n, g, c, o)
        if "incoming" in self._sums:
            self._sums["incoming"][rows] += _squared_over_vectors(entering, weights)
        if "outgoing" in self._sums:
            if self._one_input:
                leaving = entering.sum(-1, keepdim=True)
            else:
                leaving = self._gradients.from_rows(products).sum((3, 5))  # (n, g, c, i)
            self._sums["outgoing"][rows] += _squared_over_vectors(leaving, weights)

    def _add_squares(self, squares: Tensor, weights: Tensor | None, rows: slice) -> None:
        """Trace and diagonals from G² (n, g, c, o, i * k), which is overwritten."""
        if weights is not None:
            magnitudes = self._context.magnitudes(weights, rows)
            if magnitudes is not None:
                added = (squares * magnitudes[:, None, :, None, None]).sum((0, 2))
                self._magnitude = added if self._magnitude is None else self._magnitude.add_(added)
            squares = squares.mul_(weights[:, None, :, None, None])
        summed = squares.sum(2) if squares.shape[2] > 1 else squares[:, :, 0]  # (n, g, o, i * k)
        if "trace" in self._sums:
            self._sums["trace"][rows] += summed.flatten(1).sum(1)
        if "weighted_diagonal" in self._sums:
            squared_weight = self._gradients.as_rows(self._weight).square().flatten()
            self._sums["weighted_diagonal"][rows] += summed.flatten(1) @ squared_weight
        if "diagonal" in self._context.parts:
            total = summed.sum(0)
            self._diagonal = total if self._diagonal is None else self._diagonal.add_(total)

    def _sum_positions(self, values: Tensor) -> Tensor:
        """Sum (n, f, ...) over everything but samples and units: (n, units)."""
        units = -1 if self._layer.kind == "linear" else 2
        return values.movedim(units, 1).flatten(2).sum(2)

    def _in_own_shape(self, rows: Tensor | None) -> Tensor | None:
        """Bring (g, o, i * k) to the parameter's shape."""
        return None if rows is None else self._layer.original(self._gradients.from_rows(rows))


class RelativeForm:
    """The form ⟨G, W Wᵀ G⟩ of W (g, o, i, k); with σ (g * i,) given, of W σ and G / σ."""

    def __init__(self, weight: Tensor, std: Tensor | None = None) -> None:
        self._inverse_std: Tensor | None = None
        if std is not None:
            groups, _, inner, taps = weight.shape
            weight = weight * std.reshape(groups, 1, inner, 1)
            inverse = reciprocal_or_zero(std).reshape(groups, inner, 1)
            self._inverse_std = inverse.expand(groups, inner, taps)
        rows = weight.flatten(2)
        self._gram = rows @ rows.mT  # W Wᵀ (g, o, o)

    def begin(self, gradients: SampleGradients) -> None:
        """Compute the overlaps aᵀa of positions."""
        patches = gradients.patches  # (n, g, i * k, p)
        if self._inverse_std is not None:
            patches = patches * gradients.as_rows(self._inverse_std)[:, :, None]
        self._overlaps = patches.mT @ patches  # (n, g, p, p)

    def from_positions(self, vectors: Tensor, weights: Tensor | None) -> Tensor:
        """⟨sᵀ W Wᵀ s, aᵀ a⟩ of one vector (n, g, o, p), per sample (n,)."""
        forms = vectors.mT @ (self._gram @ vectors)
        summed = forms.mul_(self._overlaps).flatten(1).sum(1)
        return summed if weights is None else summed * weights

    def from_gradients(
        self, gradients: Tensor, weights: Tensor | None, layout: SampleGradients
    ) -> Tensor:
        """⟨G, W Wᵀ G⟩ of gradients (n, g, c, o, i * k), summed over the vectors (n,)."""
        if self._inverse_std is not None:
            gradients = gradients * layout.as_rows(self._inverse_std)[:, None, None]
        forms = (self._gram[:, None] @ gradients).mul_(gradients).sum((1, 3, 4))  # (n, c)
        return (forms if weights is None else forms * weights).sum(1)


def _squared_over_vectors(forms: Tensor, weights: Tensor | None) -> Tensor:
    """Square (n, g, c, units) and sum over the vectors: (n, g * units)."""
    squares = forms.square()
    if weights is not None:
        squares *= weights[:, None, :, None]
    return squares.sum(2).flatten(1)


def vectors_per_product(layer: Layer) -> int:
    """Number of factor vectors whose gradients are computed at once."""
    return max(min(_STACKED, _BLOCK // (4 * math.prod(layer.shape))), 1)


class SampleGradients:
    """G = Σ_p s_p a_pᵀ by sample and factor vector; `purpose` names the memory that is reused."""

    patches: Tensor  # What every position sees (n, g, i * k, p); if transposed, the inputs.

    def __init__(
        self, context: ChunkContext, layer: Layer, weight: Tensor, purpose: str = ""
    ) -> None:
        self._context, self._layer, self._purpose = context, layer, purpose
        self.weight = layer.canonical(weight)
        self._kernel = tuple(weight.shape[2:])
        self._capacity = vectors_per_product(layer)
        self._taps_first = False
        self._waiting: list[Tensor] = []  # (n, g, o, p), or as given if transposed
        self._weights: list[Tensor | None] = []
        self._buffer: Tensor | None = None  # (n, g, c, o, p), in any order
        self._winners: Tensor | None = None
        self._scale: Tensor | None = None

    def begin(
        self, inputs: Tensor, winners: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """Cut the inputs a (n, f, ...) into patches; see `ConvAccumulator.begin`."""
        layer, self._winners = self._layer, winners
        self._scale = None if scale is None else scale.view(layer.groups, -1, 1)
        pointwise = layer.kind == "linear" or (
            {*self._kernel, *layer.stride} == {1} and not any(map(any, layer.padding))
        )
        if layer.kind == "transposed" or pointwise:
            self.patches = self.flatten(inputs)
        elif layer.groups == inputs.shape[1] == 1 and (
            winners is not None or _has_channels_last(inputs[:, 0])
        ):
            self._taps_first = True
            patches = self._cut(inputs[:, 0], partial(self._memory, "patches"), by_position=True)
            self.patches = patches.mT[:, None]
        else:
            self.patches = self._cut_groups(inputs, partial(self._memory, "patches"))

    def push(self, vectors: Tensor, weights: Tensor | None) -> bool:
        """Put a factor vector (n, f, ...) into the buffer; whether it is full now."""
        if self._layer.kind == "transposed":
            self._waiting.append(vectors)
        else:
            flat = self.flatten(vectors)
            place = self._place(flat, len(self._waiting))
            if self._scale is None:
                place.copy_(flat)
            else:
                torch.mul(flat, self._scale, out=place)
            self._waiting.append(place)
        self._weights.append(weights)
        return len(self._waiting) >= self._capacity

    def drain(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield samples, their gradients (n, g, c, o, i * k) until the next, and weights (n, c)."""
        if not self._waiting:
            return
        samples, count = self._context.samples, len(self._waiting)
        weights = self._stack_weights()
        numbers = count * (self._waiting[0][0].numel() + 2 * self.weight.numel())
        if self._winners is not None:
            numbers += self._winners[0].numel() * self.patches.shape[2]
        step = max(_BLOCK // (numbers * self.weight.element_size()), 1)
        for start in range(0, samples, step):
            rows = slice(start, start + step)
            yield rows, self._multiply(rows), None if weights is None else weights[rows]
        self._waiting.clear()
        self._weights.clear()

    def gradients_of(self, vectors: Tensor) -> Tensor:
        """The gradients (n, g, c, o, i, k) of vectors (n, c, f, ...) at hand."""
        if self._layer.kind == "transposed":
            return self.from_rows(self._multiply_transposed(list(vectors.unbind(1)), self.patches))
        units = -1 if self._layer.kind == "linear" else 3
        flat = vectors.movedim(units, 2).flatten(3).unflatten(2, (self._layer.groups, -1))
        found = flat.movedim(2, 1).flatten(2, 3) @ self.patches.mT  # (n, g, c * o, i * k)
        return self.from_rows(found.unflatten(2, (vectors.shape[1], -1)))

    def as_rows(self, weights: Tensor) -> Tensor:
        """Weights (..., i, k) as rows (..., i * k), in the order of this layer."""
        return (weights.mT if self._taps_first else weights).flatten(-2)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Rows (..., i * k) as weights (..., i, k)."""
        inner, taps = self.weight.shape[2:]
        order = (taps, inner) if self._taps_first else (inner, taps)
        weights: Tensor = rows.unflatten(-1, order)
        return weights.mT if self._taps_first else weights

    def rescale(self, flat: Tensor) -> Tensor:
        """Vectors (n, g, o, p) times the scale they are to be multiplied by."""
        return flat if self._scale is None else flat * self._scale

    def flatten(self, tensor: Tensor) -> Tensor:
        """Bring (n, f, ...) to (n, g, units / g, p)."""
        units = -1 if self._layer.kind == "linear" else 2
        flat: Tensor = tensor.movedim(units, 1).flatten(2).unflatten(1, (self._layer.groups, -1))
        return flat

    def _place(self, flat: Tensor, number: int) -> Tensor:
        """The place of a vector in the buffer, next to those it is multiplied with."""
        if self._buffer is None:
            n, groups, out, positions = flat.shape
            shape, order = (n, groups, self._capacity, out, positions), (2, 2)
            if self._winners is not None:  # Every channel has patches of its own.
                shape, order = (n, groups, out, self._capacity, positions), (2, 3)
            elif flat.stride(-1) != 1:  # Channels come last: positions stay in front of them.
                shape, order = (n, groups, positions, self._capacity, out), (2, 4)
            self._buffer = self._memory("vectors", shape).movedim(*order)
        return self._buffer[:, :, number]

    def _stack_weights(self) -> Tensor | None:
        """The weights of the waiting vectors (n, c); None if all are one."""
        if all(weights is None for weights in self._weights):
            return None
        one = self.weight.new_ones(self._context.samples)
        return torch.stack([one if weights is None else weights for weights in self._weights], 1)

    def _multiply(self, rows: slice) -> Tensor:
        """The gradients (n, g, c, o, i * k) of some samples by all waiting vectors."""
        count, seen = len(self._waiting), self.patches[rows]
        if self._buffer is None:
            return self._multiply_transposed([vectors[rows] for vectors in self._waiting], seen)
        if self._winners is not None:
            return self._multiply_windows(self._buffer[rows, 0, :count], seen, self._winners[rows])
        vectors = self._buffer[rows, :, :count].flatten(2, 3)  # (n, g, c * o, p)
        shape = (*vectors.shape[:3], seen.shape[2])
        found = self._context.workspace.tensor("gradients", shape, seen)
        torch.matmul(vectors, seen.mT, out=found)
        gradients: Tensor = found.unflatten(2, (count, -1))
        return gradients

    def _multiply_windows(self, vectors: Tensor, seen: Tensor, winners: Tensor) -> Tensor:
        """The same for vectors (n, c, o, windows) behind a pooling: each sees one patch."""
        workspace, (n, out, windows), row = self._context.workspace, winners.shape, seen.shape[2]
        first = torch.arange(n, device=winners.device)[:, None, None] * seen.shape[3]
        cut = workspace.tensor("windows", (n * out * windows, row), seen)
        torch.index_select(seen[:, 0].mT.flatten(0, 1), 0, (winners + first).flatten(), out=cut)
        found = workspace.tensor("gradients", (n, out, vectors.shape[1], row), seen)
        torch.matmul(vectors.movedim(1, 2), cut.view(n, out, windows, row), out=found)
        return found.movedim(2, 1)[:, None]

    def _multiply_transposed(self, vectors: list[Tensor], seen: Tensor) -> Tensor:
        """The same for a transposed convolution: the vectors are cut into patches instead."""
        count, (_, out, _, taps) = len(vectors), self.weight.shape
        cut = self._cut_groups(torch.cat(vectors)).unflatten(0, (count, -1))
        found = cut.movedim(0, 2).flatten(2, 3) @ seen.mT  # (n, g, c * o * k, i)
        turned: Tensor = found.unflatten(2, (count, out, taps)).mT
        return turned.flatten(4)

    def _memory(self, what: str, shape: Sequence[int]) -> Tensor:
        """Memory that is used again in the next chunk."""
        key = (self._purpose, what, self._layer.name)
        return self._context.workspace.tensor(key, shape, self.weight)

    def _cut_groups(self, images: Tensor, allocate: Allocate = None) -> Tensor:
        """The patches of images (n, f, ...): (n, g, units / g * k, p)."""
        n, folds = images.shape[:2]
        cut = self._cut(images.flatten(0, 1), allocate)  # (n * f, units, k, p)
        if folds > 1:
            cut = cut.unflatten(0, (n, folds)).movedim(1, -2).flatten(-2)
        grouped: Tensor = cut.unflatten(1, (self._layer.groups, -1)).flatten(2, 3)
        return grouped

    def _cut(self, images: Tensor, allocate: Allocate, *, by_position: bool = False) -> Tensor:
        """The patches of images (n, units, ...); see `cut_patches`."""
        layer = self._layer
        how = self._kernel, layer.stride, layer.padding, layer.dilation
        return cut_patches(images, *how, by_position=by_position, allocate=allocate)


@dataclass(frozen=True)
class LayerFactors:
    """What the products with a layer's block are made of, for one chunk."""

    inputs: Tensor | None  # The layer's inputs (n, f, ...); None if gradients were recorded.
    vectors: Tensor  # Factor vectors at its output (n, c, f, ...), or gradients (n, c, weights).
    weights: Tensor  # The weights of the vectors (n, c).
    units: SubmatrixIndex = field(default_factory=SubmatrixIndex)  # Of a linear layer, if not all.


class FactorRecorder:
    """Records a layer's inputs and factor vectors, or the gradients they make.

    `gradients` are recorded where they take no more memory: products with them are far cheaper.
    """

    def __init__(
        self, context: ChunkContext, layer: Layer, weight: Tensor, *, gradients: bool
    ) -> None:
        self._context, self._layer, self._weight = context, layer, weight
        self._records_gradients = gradients
        self._vectors: list[Tensor] = []  # (n, c, f, ...)
        self._weights: list[Tensor] = []  # (n, c)

    def begin(self, inputs: Tensor, outputs: Tensor, units: SubmatrixIndex | None = None) -> None:
        """Take inputs and outputs (n, f, ...), of some units of a linear layer if not of all."""
        self._inputs, self._outputs, self._units = inputs, outputs, units or SubmatrixIndex()

    def add(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Record one factor vector at the output (n, f, ...), with its weights (n,)."""
        weights = vectors.new_ones(len(vectors)) if weights is None else weights
        self._vectors.append(vectors[:, None])
        self._weights.append(weights[:, None])

    def add_rows(self, vectors: Tensor, rows: slice, weights: Tensor | None) -> None:
        """Record several vectors (samples, c, f, ...) of some samples, with all weights (c, n)."""
        if rows.start == 0:
            count, (_, many, *shape) = len(self._outputs), vectors.shape
            self._vectors.append(vectors.new_empty(count, many, *shape))
            ones = vectors.new_ones(count, many)
            self._weights.append(ones if weights is None else weights.T)
        self._vectors[-1][rows] = vectors

    def layer_factors(self) -> LayerFactors:
        """What was recorded of this chunk."""
        if not self._vectors:  # The output does not depend on the layer here.
            self._vectors.append(torch.zeros_like(self._outputs)[:, None])
            self._weights.append(self._outputs.new_zeros(len(self._outputs), 1))
        vectors = torch.cat(self._vectors, dim=1)  # (n, c, f, ...)
        weights = torch.cat(self._weights, dim=1)
        if self._records_gradients:
            gradients = SampleGradients(self._context, self._layer, self._weight, "recorded")
            gradients.begin(self._inputs)
            found = gradients.gradients_of(vectors).transpose(1, 2)  # (n, c, g, ...)
            return LayerFactors(None, self._layer.original(found).flatten(2), weights)
        return LayerFactors(self._inputs, vectors, weights, self._units)


def cut_patches(
    images: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    *,
    by_position: bool = False,
    allocate: Allocate = None,
) -> Tensor:
    """Cut images (n, channels, *space) into the patches that a convolution multiplies.

    Returns:
        The patches (n, channels, k, p); `by_position`, with channels last, (n, p, k * channels).

    Example:
        >>> import torch
        >>> row = torch.tensor([[[1.0, 2.0, 3.0]]])
        >>> cut_patches(row, (2,), (1,), ((0, 0),), (1,))[0, 0]
        tensor([[1., 2.],
                [2., 3.]])
    """
    if any(chain.from_iterable(padding)):
        images = F.pad(images, [side for pair in reversed(padding) for side in pair])
    layout = torch.channels_last if by_position else torch.contiguous_format
    images = images.contiguous(memory_format=layout)
    n, channels, *space = images.shape
    sizes = zip(space, images.stride()[2:], kernel, stride, dilation, strict=True)
    # Number of patches along every axis, and the steps in memory within and between them.
    found = [
        ((size - d * (k - 1) - 1) // s + 1, step * d, step * s) for size, step, k, s, d in sizes
    ]
    counts, within, between = zip(*found, strict=True)
    whole: tuple[int, ...]
    if by_position:
        whole = (n, math.prod(counts), math.prod(kernel) * channels)
        shape, steps = (n, *counts, *kernel, channels), (images.stride(0), *between, *within, 1)
    else:
        whole = (n, channels, math.prod(kernel), math.prod(counts))
        shape = (n, channels, *kernel, *counts)
        steps = (*images.stride()[:2], *within, *between)
    view = images.as_strided(shape, steps)
    patches = view.contiguous() if allocate is None else allocate(shape).copy_(view)
    return patches.view(whole)


def _has_channels_last(images: Tensor) -> bool:
    """Whether the channels of images (n, channels, height, width) lie next to each other."""
    return (
        images.dim() == 4
        and not images.is_contiguous()
        and images.is_contiguous(memory_format=torch.channels_last)
    )
