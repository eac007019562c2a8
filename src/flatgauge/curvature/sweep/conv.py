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

Shapes: n samples, f folds (positions merged with the samples, mostly 1), g groups, o and i units
per group, k kernel taps, p positions, c factor vectors. Weights are (g, o, i, k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatgauge.curvature.sweep.accumulate import (
    ChunkContext,
    LayerAccumulator,
    SampleParts,
    add_weighted_squares,
    reciprocal_or_zero,
)
from flatgauge.curvature.sweep.sample_gradients import SampleGradients
from flatgauge.graph.layers import Layer

#: The parts that are sums of squared gradients.
_SQUARES = frozenset({"trace", "diagonal", "weighted_diagonal"})

#: The parts with one number per unit, and those that come from gradients or positions.
_UNITS, _RELATIVE = frozenset({"incoming", "outgoing"}), frozenset({"relative", "normalized"})

#: The parts that are summed up per sample.
_PER_SAMPLE = ("trace", "weighted_diagonal", "incoming", "outgoing", "relative", "normalized")


class ConvAccumulator(LayerAccumulator):
    """Adds up the curvature of one layer with many positions over one chunk.

    `activations` is how many numbers enter and leave the layer for one sample.

    Attributes:
        may_need_gradients: Whether gradients are computed, unless positions are few.
        needs_input_vectors: Whether `add_at_input` must be called with every factor vector.
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
