"""One chunk of samples on its way through the sweep, and what adds up its curvature.

What enters a `SweepChunk`: while the graph runs forward, op handlers call `watch` with a tensor and
with what is to receive its gradients. Then come factor vectors u at the logits f, each with a
weight per sample (λ in the formulas; None if all are one). Every receiver is called with the
gradient of ⟨u, f⟩ by its tensor, and the weights. `watch` puts a hook on the tensor, and `backward`
differentiates once per factor vector: a gradient is used while it is in the cache, and freed before
the next. Hooks refer to receivers, and receivers never to the chunk, so that a graph goes with its
chunk. If the model ends in a perceptron, `MLPHead` passes vectors back there without a graph.

Most receivers are accumulators. What leaves them: `SampleParts`, what every sample adds to each
part, and the diagonal of the parameter's Hessian block, summed over the chunk. `ParameterTotals`
then adds up the chunks in double precision. With g the gradient of one sample and one factor vector
by a parameter θ, `VectorAccumulator` has

    trace Σ λ ‖g‖²,    diagonal Σ λ g²,    weighted_diagonal Σ λ θ² g²;

layers, whose gradients g = s aᵀ need not be written out, have accumulators in `linear` and `conv`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatgauge.estimators.linalg import to_float64

if TYPE_CHECKING:
    from flatgauge.curvature.sweep.conv import FactorRecorder
    from flatgauge.curvature.sweep.linear import MLPHead
    from flatgauge.surface.losses import Factor

#: What a sweep can yield for every parameter.
PARAMETER_PARTS = ("trace", "diagonal", "weighted_diagonal")

#: What it can yield for layers alone.
LAYER_PARTS = ("incoming", "outgoing", "relative", "normalized")

#: What it can yield for a layer.
PARTS = (*PARAMETER_PARTS, *LAYER_PARTS)

#: Where the largest number may be below this, or above its inverse, all are scaled before they are
#: squared.
_SMALL = 1e-6

#: Which units of how many.
Units = tuple[Tensor, int]

#: Called with a gradient (shaped like the tensor) and the factor vector's weights (n,) or None.
Receiver = Callable[[Tensor, Tensor | None], None]

#: A tensor of the graph, a factor vector there, and its weights (n,) or None.
Start = tuple[Tensor, Tensor, Tensor | None]


class Workspace:
    """Memory that is used again from chunk to chunk.

    What the C library hands out in large pieces it takes back from the system page by page, and
    the first touch of a page costs as much as several passes over it.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def tensor(self, key: Hashable, shape: Sequence[int], like: Tensor) -> Tensor:
        """A contiguous tensor with arbitrary values; the next one of the same key overwrites it."""
        size = math.prod(shape)
        held = self._buffers.get(key)
        if held is None or held.numel() < size or held.dtype != like.dtype:
            held = self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return held[:size].view(*shape)


@dataclass
class ChunkContext:
    """What all accumulators of a chunk share."""

    samples: int
    parts: frozenset[str]
    input_std: Mapping[str, Tensor] = field(default_factory=dict)  # By layer, of its inputs (in,).
    workspace: Workspace = field(default_factory=Workspace)
    # Where weights have both signs, the size of the terms that cancelled in them, by sample.
    cancelled: Tensor | None = None

    def magnitudes(self, weights: Tensor | None, rows: slice = slice(None)) -> Tensor | None:
        """The weights (n, ...) of some samples if nothing had cancelled; None if nothing does."""
        if self.cancelled is None or weights is None:
            return None
        cancelled = self.cancelled[rows].to(weights)
        return weights.abs() + cancelled.reshape((-1,) + (1,) * (weights.dim() - 1))


class SweepChunk:
    """One chunk of samples, run forward once and differentiated for every factor vector."""

    logits: Tensor
    counts: Tensor  # What every sample adds to the denominator of the loss (n,).
    left_out: int  # Samples that would count, but whose outputs have no loss.
    factors: Iterator[Factor]  # Those of the loss's Hessian that are passed back as they are.
    random_factors: Iterator[Factor]  # Random combinations of the others.

    def __init__(self, context: ChunkContext) -> None:
        self.context = context
        self.accumulators: dict[str, Accumulator] = {}
        self.recorders: dict[str, FactorRecorder] = {}  # By layer, for products with its block.
        self.head: MLPHead | None = None  # Passes vectors back where no graph is needed.
        self._leaves: list[Tensor] = []  # Where differentiation stops.
        self._weights: list[Tensor | None] = [None]  # Of the factor vector on its way.

    def watch(self, tensor: Tensor, receive: Receiver) -> Tensor:
        """Hand every gradient by a tensor to a receiver; go on with what is returned."""
        if not tensor.requires_grad:  # Nothing in front of it is watched.
            tensor = tensor.detach().requires_grad_()
            self._leaves.append(tensor)
        weights = self._weights  # Hooks refer to these, not to the chunk.
        tensor.register_hook(lambda gradient: receive(gradient, weights[0]))
        return tensor

    def backward(self, factors: Iterable[Factor]) -> None:
        """Pass factor vectors back through the model."""
        for start, vector, weights in self._starts(factors):
            self._weights[0] = None if weights is None else weights.to(start)
            torch.autograd.grad(start, self._leaves, vector, retain_graph=True, allow_unused=True)

    def take(self) -> dict[str, SampleParts]:
        """What the factor vectors since the last call have added, by parameter."""
        return {name: each.take() for name, each in self.accumulators.items()}

    def release(self) -> None:
        """Free the graph and all sums, though the caller may still hold the chunk."""
        self._leaves.clear()
        self.accumulators, self.recorders, self.head = {}, {}, None
        del self.logits, self.factors, self.random_factors

    def _starts(self, factors: Iterable[Factor]) -> Iterator[Start]:
        """Where differentiation begins for every factor vector."""
        if self.head is not None:
            yield from self.head.backward(factors)
        elif self.logits.requires_grad:
            for values, weights in factors:
                yield self.logits, values.to(self.logits), weights


def add_weighted_squares(total: Tensor | None, values: Tensor, weights: Tensor | None) -> Tensor:
    """Add λ · values² (n, ...) to a total, in place; None stands for a total of zero."""
    weighted = values
    if weights is not None:
        weighted = values * weights.reshape((-1,) + (1,) * (values.dim() - 1))
    return weighted * values if total is None else total.addcmul_(weighted, values)


def reciprocal_or_zero(values: Tensor) -> Tensor:
    """One over every value; zero for zero."""
    return values.reciprocal().where(values != 0, 0.0)


@dataclass
class SampleParts:
    """What every sample adds to each requested part of one parameter's block."""

    values: dict[str, Tensor] = field(default_factory=dict)  # (n,) or (n, units)
    units: dict[str, Units] = field(default_factory=dict)  # Which these are; all others are zero.


class Accumulator(ABC):
    """Adds up one parameter's curvature over one chunk, factor vector by factor vector."""

    @abstractmethod
    def add(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Add one factor vector per sample (n, ...), with its weights (n,)."""

    @abstractmethod
    def take(self) -> SampleParts:
        """The parts of every sample from the vectors since the last call."""

    @abstractmethod
    def diagonal(self) -> Tensor | None:
        """The block's diagonal over the whole chunk, in the parameter's shape."""

    def magnitude(self) -> Tensor | None:
        """The diagonal if nothing had cancelled; None where no weights are negative."""
        return None


class LayerAccumulator(Accumulator):
    """Adds up a layer's curvature from its inputs and the factor vectors s at its output."""

    needs_input_vectors = False  # Whether `add_at_input` is called with every factor vector, too.

    @abstractmethod
    def begin(self, inputs: Tensor, outputs: Tensor) -> None:
        """Take inputs a and outputs Wa without bias (n, folds, ...), before the first vector."""

    @abstractmethod
    def add_at_input(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Add the same factor vector at the input, t = Wᵀs (n, folds, ...)."""


class VectorAccumulator(Accumulator):
    """Adds up a parameter whose gradients by single samples are at hand."""

    def __init__(self, context: ChunkContext, value: Tensor) -> None:
        self._context, self._value = context, value.detach()
        self._squares: Tensor | None = None  # Σ λ g² (n, size), of the vectors since `take`.
        self._units: Tensor | None = None
        self._diagonal = torch.zeros_like(self._value).flatten()

    def add(self, vectors: Tensor, weights: Tensor | None) -> None:
        """Add the gradients (n, size) of one factor vector."""
        self._squares = add_weighted_squares(self._squares, vectors, weights)

    def add_sums(self, squares: Tensor, units: Tensor | None) -> None:
        """Take Σ λ g² (n, units) from elsewhere; all other entries have zeros."""
        self._squares, self._units = squares, units

    def take(self) -> SampleParts:
        """The parts of every sample from the vectors since the last call."""
        squares = self._squares
        if squares is None:
            squares = self._diagonal.new_zeros(self._context.samples, len(self._diagonal))
        units = slice(None) if self._units is None else self._units
        requested, parts = self._context.parts, dict[str, Tensor]()
        if "trace" in requested:
            parts["trace"] = squares.sum(1)
        if "weighted_diagonal" in requested:
            parts["weighted_diagonal"] = squares @ self._value.flatten().square()[units]
        if "diagonal" in requested:
            self._diagonal[units] += squares.sum(0)
        self._squares = self._units = None
        return SampleParts(parts)

    def diagonal(self) -> Tensor:
        """The diagonal over the whole chunk."""
        return self._diagonal.reshape(self._value.shape)


@dataclass(frozen=True)
class Moments:
    """Mean and spread of numbers that come in pieces, by column, in double precision.

    Every piece is centred by itself, and pieces are joined by the difference of their means: no
    difference of large sums, and factors of two pass through exactly.
    """

    count: int
    mean: Tensor
    squares: Tensor  # of the differences from the mean, added up
    low: Tensor
    high: Tensor

    @classmethod
    def of_rows(cls, rows: Tensor) -> Moments:
        """The moments of one piece (rows, columns)."""
        rows = to_float64(rows)
        mean = rows.mean(0)
        return cls(len(rows), mean, (rows - mean).square().sum(0), *rows.aminmax(dim=0))

    def join(self, known: Moments | None) -> Moments:
        """The moments of all pieces, of which some were known before."""
        if known is None:
            return self
        shift, count = self.mean - known.mean, known.count + self.count
        return Moments(
            count,
            known.mean + shift * (self.count / count),
            known.squares + self.squares + shift.square() * (known.count * self.count / count),
            torch.minimum(self.low, known.low),
            torch.maximum(self.high, known.high),
        )

    def std(self, rounding: float) -> Tensor:
        """The standard deviation of every column; its size where it varies by rounding only."""
        deviation = (self.squares / self.count).sqrt()
        size = torch.maximum(self.low.abs(), self.high.abs())
        return deviation.where(deviation > rounding * size, size)


class ParameterTotals:
    """What one parameter has gathered over all chunks so far, in double precision.

    Attributes:
        sums: By kind and part. Kinds: ``"total"`` over the samples, one number or one per unit;
            ``"squares"`` of the samples' shares; ``"products"`` of these with the samples' counts;
            ``"variance"``, what random factors leave uncertain of the total, and ``"variance of
            sum"`` of its sum over the units; ``"magnitude"`` of the diagonal if nothing had
            cancelled.
        samples: Every sample's share in a part, units added up, chunk by chunk.
        sampled: Whether random factors stood for some of the factors.
    """

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str], Tensor] = {}
        self.samples: dict[str, list[Tensor]] = {}
        self.sampled = False

    def add(self, parts: SampleParts, drawn: Sequence[SampleParts], counts: Tensor) -> None:
        """Add a chunk: `parts`, which are overwritten, and the share of every random factor."""
        self.sampled |= bool(drawn)
        even = bool((counts == counts[0]).all())
        for part, values in parts.values.items():
            units = parts.units.get(part)
            if drawn:
                draws = torch.stack([one.values[part] for one in drawn])
                values = values + draws.sum(0)
                # m times each random factor estimates the rest; their mean is the sum.
                variance = draws.var(0) * len(draws)
                self._add("variance", part, to_float64(variance.sum(0)), units)
                whole = draws.flatten(2).sum(2) if draws.dim() > 2 else draws
                self._add("variance of sum", part, to_float64((whole.var(0) * len(draws)).sum(0)))
            shares = to_float64(values.sum(1) if values.dim() > 1 else values)
            self.samples.setdefault(part, []).append(shares)
            total = to_float64(values.sum(0))
            product = counts[0] * total if even else counts @ to_float64(values)
            self._add("total", part, total, units)
            self._add("products", part, product, units)
            spare = values if values.dim() > 1 else values.clone()  # `shares` may be the same.
            self._add("squares", part, _sum_of_squares(spare, total), units)

    def add_diagonal(self, diagonal: Tensor | None, magnitude: Tensor | None) -> None:
        """Add a chunk's diagonal, and its size, of which few digits are needed; in place."""
        for kind, values in (("total", diagonal), ("magnitude", magnitude)):
            if values is not None:
                known = self.sums.get((kind, "diagonal"))
                if known is not None:
                    known.add_(values.to(known.device))
                else:
                    first = to_float64(values) if kind == "total" else values
                    self.sums[kind, "diagonal"] = first.clone()

    def data_error(self, part: str, counts: Tensor) -> Tensor:
        """The standard error of Σ share / Σ count, from the residuals share − mean · count."""
        found = self.sums.get(("total", part))
        if found is None or len(counts) < 2:
            known = counts.new_zeros(()) if found is None else found
            return torch.full_like(known, float("nan") if len(counts) < 2 else 0.0)
        total, samples = counts.sum(), len(counts)
        mean = found / total
        if mean.dim() == 0 and not self.sampled:  # Every share is known: no difference of squares.
            residuals = (torch.cat(self.samples[part]) - mean * counts).square().sum()
            return (residuals * samples / (samples - 1)).sqrt() / total
        residuals = (
            self.sums["squares", part]
            - 2 * mean * self.sums["products", part]
            + mean.square() * counts.square().sum()
        )
        return (residuals.clamp_min(0) * samples / (samples - 1)).sqrt() / total

    def _add(self, kind: str, part: str, values: Tensor, units: Units | None = None) -> None:
        """Add to a sum; with `units`, only to some of its units."""
        if units is not None:
            index, count = units
            values = values.new_zeros(count).index_copy_(0, index, values)
        known = self.sums.get((kind, part))
        self.sums[kind, part] = values if known is None else known + values


def _sum_of_squares(values: Tensor, total: Tensor) -> Tensor:
    """Σ values² over the samples (n, ...) in double precision, given Σ values; overwrites them."""
    reached = float(total.abs().max())  # The largest value is no smaller than this over n.
    if len(values) * _SMALL < reached < 1 / _SMALL:
        return to_float64(values.square_().sum(0))
    lowest, highest = torch.aminmax(values)
    scale = max(-float(lowest), float(highest)) or 1.0  # Squares of small numbers vanish.
    return to_float64(values.div_(scale).square_().sum(0)) * scale * scale
