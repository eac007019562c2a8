"""Curvature of linear layers with one row per sample, and of the perceptron at a model's end.

What enters `LinearAccumulator`: a layer's inputs a and outputs z = W a (without bias), then one
factor vector s at its output after the other, with weights λ, and t = Wᵀs at its input. What
leaves: what every sample adds to each part, with S = Σ λ s², T = Σ λ t² summed over the vectors:

    trace                ‖a‖² Σ_i S_i               incoming[i]    S_i z_i²
    diagonal             Sᵀ a² over the samples     outgoing[j]    a_j² T_j
    weighted_diagonal    Σ_j (S W²)_j a_j²          relative       ‖a‖² Σ_j T_j
    normalized           Σ_j a_j² σ_j⁻² · Σ_j σ_j² T_j

`MLPHead` gets S and T faster. Linear layers with nothing but ReLUs between them, the last of which
gives the logits, need no graph: a factor vector is multiplied by a weight and by a mask, layer by
layer. Done for many vectors of a few samples at a time, products are large, and what they give is
still near the cache when it is masked, squared and added up. Behind a ReLU, T of a layer needs no
sum of its own: S of the layer before it differs only where the unit is zero and so is a. Units that
are zero on the whole chunk are left out on both sides (see `flatgauge.surface.derivatives`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from flatgauge.curvature.sweep.accumulate import (
    ChunkContext,
    LayerAccumulator,
    SampleParts,
    VectorAccumulator,
    add_weighted_squares,
    reciprocal_or_zero,
)
from flatgauge.graph.layers import Layer
from flatgauge.surface.derivatives import SubmatrixIndex, active_units

if TYPE_CHECKING:
    from flatgauge.curvature.sweep.accumulate import Start
    from flatgauge.curvature.sweep.conv import FactorRecorder
    from flatgauge.graph.export import Handler
    from flatgauge.surface.losses import Factor

#: The parts that need factor vectors at the layer's input.
_FROM_INPUT_VECTORS = frozenset({"outgoing", "relative", "normalized"})

#: How many vectors go back together, and what the widest layer's share of them may take.
VECTORS_TOGETHER, _BYTES = 16, 5 * 2**19


class LinearAccumulator(LayerAccumulator):
    """Adds up the curvature of a layer with one row per sample."""

    def __init__(self, context: ChunkContext, layer: Layer, weight: Tensor) -> None:
        self._context, self._layer = context, layer
        self.needs_input_vectors = bool(_FROM_INPUT_VECTORS & context.parts)
        self._weight = layer.canonical(weight)[0, :, :, 0]  # (o, i)
        std = context.input_std.get(layer.name) if "normalized" in context.parts else None
        self.std = None if std is None else std.to(weight)  # (i,)
        self._sums: dict[str, Tensor] = {}  # Of the vectors since `take`; see `add_sums`.
        self._turn = 0
        self._all_s2: Tensor | None = None  # S of all vectors.
        self._magnitude: Tensor | None = None  # The same with |λ|, where λ has both signs.

    def begin(self, inputs: Tensor, outputs: Tensor, units: SubmatrixIndex | None = None) -> None:
        """Keep a² and z, of some units if not of all."""
        self._units = units or SubmatrixIndex()
        inputs = inputs.reshape(self._context.samples, -1)
        self._squares = self._memory("squares", inputs)  # a² (n, i)
        torch.mul(inputs, inputs, out=self._squares)
        self._outputs = outputs.reshape(self._context.samples, -1)  # z (n, o)

    def add(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Add one factor vector s at the output, with its weights (n,)."""
        vectors = vectors.reshape(self._outputs.shape)
        self._sums["s2"] = add_weighted_squares(self._sums.get("s2"), vectors, weights)
        magnitudes = self._context.magnitudes(weights)
        if magnitudes is not None:
            self._magnitude = add_weighted_squares(self._magnitude, vectors, magnitudes)

    def add_at_input(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Add the same factor vector at the input, t = Wᵀs."""
        vectors = vectors.reshape(self._squares.shape)
        self._sums["t2"] = add_weighted_squares(self._sums.get("t2"), vectors, weights)

    def add_sums(self, sums: dict[str, Tensor]) -> None:
        """Take sums over factor vectors from elsewhere."""
        # "s2": S (n, o); "t2": T (n, i), needed only where a is not zero; "lengths": Σ λ ‖t‖² (n,)
        # and "scaled": Σ λ ‖σt‖² (n,), where these are needed of all units; "magnitude":
        # Σ |λ| s² (n, o), where λ has both signs.
        magnitude = sums.pop("magnitude", None)
        if magnitude is not None:
            known = self._magnitude
            self._magnitude = magnitude if known is None else known + magnitude
        self._sums = sums

    def take(self) -> SampleParts:
        """The parts of every sample from the vectors since the last call."""
        requested, sums = self._context.parts, self._sums
        parts = SampleParts()
        values = parts.values
        s2 = sums["s2"] if "s2" in sums else torch.zeros_like(self._outputs)
        norms = self._squares.sum(1)  # ‖a‖²
        if "trace" in requested:
            values["trace"] = norms * s2.sum(1)
        if "weighted_diagonal" in requested:
            squared_weight = self._units.take(self._weight).square()
            values["weighted_diagonal"] = (s2 @ squared_weight).mul_(self._squares).sum(1)
        if "incoming" in requested:
            incoming = values["incoming"] = self._memory("incoming", s2)
            torch.mul(s2, self._outputs, out=incoming).mul_(self._outputs)
            if self._units.rows is not None:
                parts.units["incoming"] = self._units.rows, len(self._weight)
        if _FROM_INPUT_VECTORS & requested:
            t2 = sums["t2"] if "t2" in sums else torch.zeros_like(self._squares)
            if "relative" in requested:
                values["relative"] = norms * (sums["lengths"] if "lengths" in sums else t2.sum(1))
            if self.std is not None:
                columns = self._units.columns
                variance = (self.std if columns is None else self.std[columns]).square()
                scaled = sums["scaled"] if "scaled" in sums else t2 @ variance
                values["normalized"] = (self._squares @ reciprocal_or_zero(variance)) * scaled
            if "outgoing" in requested:
                outgoing = values["outgoing"] = self._memory("outgoing", t2)
                torch.mul(t2, self._squares, out=outgoing)
                if self._units.columns is not None:
                    parts.units["outgoing"] = self._units.columns, self._weight.shape[1]
        if "diagonal" in requested:
            self._all_s2 = s2 if self._all_s2 is None else self._all_s2 + s2
        self._sums = {}
        self._turn += 1
        return parts

    def diagonal(self) -> Tensor | None:
        """The diagonal over the whole chunk, Sᵀ a²."""
        return self._over_samples(self._all_s2)

    def magnitude(self) -> Tensor | None:
        """The same if nothing had cancelled."""
        return self._over_samples(self._magnitude)

    def _over_samples(self, s2: Tensor | None) -> Tensor | None:
        """Sᵀ a² in the parameter's shape."""
        if s2 is None:
            return None
        whole = self._units.spread(s2.T @ self._squares, self._weight.shape)
        return self._layer.original(whole[None, :, :, None])

    def _memory(self, what: str, like: Tensor) -> Tensor:
        """Memory of this layer, shaped like a tensor; what is taken stays till the next chunk."""
        key = (what, self._layer.name, self._turn)
        return self._context.workspace.tensor(key, like.shape, like)


@dataclass(frozen=True)
class VectorGroup:
    """Factor vectors that go back together."""

    values: Tensor  # At the logits (c, n, outputs).
    weights: Tensor | None  # λ (c, n); None if all are one.
    magnitudes: Tensor | None  # |λ| if nothing had cancelled (c, n); None if nothing does.

    def split(self, rows: Tensor) -> Tensor:
        """Rows (c * samples, k) as (c, samples, k)."""
        found: Tensor = rows.unflatten(0, (len(self.values), -1))
        return found

    def add(self, total: Tensor, rows: Tensor, samples: slice, weights: Tensor | None) -> None:
        """Add weighted squares of rows (c * samples, k), summed over c, to a total (n, k)."""
        part = total[samples]
        for number, vectors in enumerate(self.split(rows)):
            weighted = vectors if weights is None else vectors * weights[number, samples, None]
            part.addcmul_(weighted, vectors)

    def add_lengths(self, total: Tensor, rows: Tensor, samples: slice) -> None:
        """Add weighted squared lengths of rows (c * samples, k) to a total (n,)."""
        lengths = self.split(torch.linalg.vector_norm(rows, dim=1).square())
        if self.weights is not None:
            lengths = lengths * self.weights[:, samples]
        total[samples] += lengths.sum(0)


class HeadLayer:
    """One layer of the perceptron at the end; `before` is the layer before it, behind a ReLU."""

    inputs: Tensor  # What goes in (n, i), of units that are not zero on the whole chunk.
    _outputs: Tensor
    _mask: Tensor
    _backward_weight: Tensor
    _ordered_std: Tensor

    def __init__(
        self,
        context: ChunkContext,
        layer: Layer,
        weight: Tensor,
        accumulator: LinearAccumulator | None,
        recorder: FactorRecorder | None,
        bias: VectorAccumulator | None,
        before: HeadLayer | None,
    ) -> None:
        self.layer = layer
        self._context, self._before = context, before
        self._accumulator, self._recorder, self._bias = accumulator, recorder, bias
        self._weight = layer.canonical(weight)[0, :, :, 0]  # (o, i)
        self._active: Tensor | None = None  # The output units that are not dead; None for all.
        self._std = None if accumulator is None else accumulator.std
        self._sums: dict[str, Tensor] = {}  # Over factor vectors; see `LinearAccumulator.add_sums`.
        self._turn = 0

    # -- forwards ---------------------------------------------------------------------------------

    def forward(self, inputs: Tensor, bias: Tensor | float) -> Tensor:
        """Run the layer on inputs (n, i) of active units."""
        self.inputs = inputs
        shape = (len(inputs), len(self._weight))
        weight = self._choice(None).take(self._weight)
        self._outputs = torch.mm(inputs.detach(), weight.T, out=self._memory("values", shape))
        return torch.add(self._outputs, bias, out=self._memory("outputs", shape))

    def relu(self, outputs: Tensor) -> Tensor:
        """Run the ReLU behind it; only active units are passed on."""
        units = outputs.relu_()
        self._active = active = active_units(units)
        if active is not None:
            shape = (len(units), len(active))
            values, units = (
                torch.index_select(whole, 1, active, out=self._memory(name, shape))
                for name, whole in (("active values", self._outputs), ("active", units))
            )
            self._outputs = values
        self._mask = torch.gt(units, 0, out=self._memory("mask", units.shape))
        return units

    def begin(self) -> None:
        """Prepare for factor vectors, when all layers have run."""
        choice = self._choice(self._active)
        inputs, outputs = self.inputs.detach(), self._outputs
        if self._accumulator is not None:
            self._accumulator.begin(inputs, outputs, choice)
        if self._recorder is not None:
            # What is recorded outlives the chunk, whose memory is overwritten.
            self._recorder.begin(inputs.clone()[:, None], outputs[:, None], choice)
        order = choice.columns
        if order is not None and (self._needs_lengths or self._std is not None):
            dead = torch.ones(self._weight.shape[1], dtype=torch.bool, device=order.device)
            dead[order] = False
            order = torch.cat([order, dead.nonzero()[:, 0]])
        self._backward_weight = SubmatrixIndex(choice.rows, order).take(self._weight)
        if self._std is not None:
            self._ordered_std = self._std if order is None else self._std[order]

    def _choice(self, rows: Tensor | None) -> SubmatrixIndex:
        """Some output units, and the active units of the layer before."""
        return SubmatrixIndex(rows, None if self._before is None else self._before._active)

    # -- backwards --------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Numbers of a vector on either side, at most."""
        return max(self._backward_weight.shape)

    @property
    def _needs_lengths(self) -> bool:
        return self._accumulator is not None and "relative" in self._context.parts

    @property
    def _needs_input_vectors(self) -> bool:
        return self._accumulator is not None and self._accumulator.needs_input_vectors

    def backward(self, group: VectorGroup, rows: Tensor, samples: slice) -> Tensor:
        """Add vectors at the output (c * samples, o); pass them on to the layer before."""
        if self._accumulator is not None or self._bias is not None:
            group.add(self._sum("s2", rows.shape[1]), rows, samples, group.weights)
            if group.magnitudes is not None:
                group.add(self._sum("magnitude", rows.shape[1]), rows, samples, group.magnitudes)
        if self._recorder is not None:
            recorded = group.split(rows).transpose(0, 1)[:, :, None]
            self._recorder.add_rows(recorded, samples, group.weights)
        if not (self._needs_input_vectors or self._before is not None or self.inputs.requires_grad):
            return rows
        shape = (len(rows), self._backward_weight.shape[1])
        passed = torch.mm(rows, self._backward_weight, out=self._memory("passed", shape))
        if self._needs_lengths:
            group.add_lengths(self._sum("lengths"), passed, samples)
        if self._std is not None:
            group.add_lengths(self._sum("scaled"), passed * self._ordered_std, samples)
        if self._before is None:
            if self._needs_input_vectors:
                group.add(self._sum("t2", passed.shape[1]), passed, samples, group.weights)
            return passed
        passed = passed[:, : self.inputs.shape[1]]
        group.split(passed).mul_(self._before._mask[samples])
        return passed

    def hand_over(self) -> None:
        """Give the sums over all vectors to the accumulators; from the last layer to the first."""
        sums = self._sums
        if "s2" in sums:
            if self._bias is not None:
                self._bias.add_sums(sums["s2"], self._active)
            # Behind a ReLU, what differs between S there and T here is multiplied by zero.
            if self._before is not None and "s2" in self._before._sums:
                sums["t2"] = self._before._sums["s2"]
            if self._accumulator is not None:
                self._accumulator.add_sums(sums)
        self._sums = {}
        self._turn += 1

    def _sum(self, name: str, *size: int) -> Tensor:
        """A running total (n, ...)."""
        if name not in self._sums:
            found = self._memory(f"{name} {self._turn}", (self._context.samples, *size))
            self._sums[name] = found.zero_()
        return self._sums[name]

    def _memory(self, what: str, shape: Sequence[int]) -> Tensor:
        """Memory that is used again in the next chunk."""
        return self._context.workspace.tensor((what, self.layer.name), shape, self._weight)


class MLPHead:
    """Runs the perceptron at the end of a model, and passes factor vectors back through it."""

    def __init__(
        self, context: ChunkContext, layers: Sequence[HeadLayer], relus: Sequence[fx.Node]
    ) -> None:
        self._context, self._layers, self._relus = context, layers, relus

    def handlers(self) -> dict[fx.Node, Handler]:
        """What computes every op of the head."""
        layers: dict[fx.Node, Handler] = {
            each.layer.node: partial(self._forward, each) for each in self._layers
        }
        pairs = zip(self._relus, self._layers[:-1], strict=True)
        return layers | {relu: each.relu for relu, each in pairs}

    def _forward(self, layer: HeadLayer, *arguments: Any, **keywords: Any) -> Tensor:
        """Compute one layer."""
        output = layer.forward(arguments[layer.layer.position], layer.layer.bias_of(arguments))
        if layer is self._layers[-1]:
            for each in self._layers:
                each.begin()
        return output

    def backward(self, factors: Iterable[Factor]) -> Iterator[Start]:
        """Pass factor vectors from the logits back to the head's input, if the graph goes on."""
        waiting = iter(factors)
        while together := list(islice(waiting, VECTORS_TOGETHER)):
            yield from self._backward_together(together)
        for layer in reversed(self._layers):
            layer.hand_over()

    def _backward_together(self, factors: Sequence[Factor]) -> Iterator[Start]:
        """Pass some vectors back, a few samples at a time."""
        first = self._layers[0]
        like = first.inputs.detach()
        group = self._group(factors, like)
        count, samples, _ = group.values.shape
        front: Tensor | None = None
        if first.inputs.requires_grad:
            front = self._context.workspace.tensor("front", (count, *like.shape), like)
        widest = max(layer.width for layer in self._layers)
        step = max(_BYTES // (widest * count * like.element_size()), 8)
        for start in range(0, samples, step):
            block = slice(start, min(start + step, samples))
            rows = group.values[:, block].flatten(0, 1)
            for layer in reversed(self._layers):
                rows = layer.backward(group, rows, block)
            if front is not None:
                front[:, block] = group.split(rows)
        if front is not None:
            for (_, weights), passed in zip(factors, front, strict=True):
                yield first.inputs, passed, weights

    def _group(self, factors: Sequence[Factor], like: Tensor) -> VectorGroup:
        """Stack factor vectors and their weights."""
        values = torch.stack([values for values, _ in factors]).to(like)
        given = [weights for _, weights in factors]
        if all(weights is None for weights in given):
            return VectorGroup(values, None, None)
        one = like.new_ones(self._context.samples)
        stacked = [one if weights is None else weights.to(like) for weights in given]
        magnitudes = [self._context.magnitudes(weights) for weights in stacked]
        known = [each for each in magnitudes if each is not None]
        return VectorGroup(values, torch.stack(stacked), torch.stack(known) if known else None)
