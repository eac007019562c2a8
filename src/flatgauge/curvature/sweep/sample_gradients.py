"""Gradients of a layer's weight by single samples, where it is applied at many positions.

What enters: for one chunk the layer's inputs a, then factor vectors s at its output. What leaves:
G = Σ_p s_p a_pᵀ over the positions p, for some samples and several factor vectors at a time.

How it works: what every position sees is cut out of the inputs once (`cut_patches`); vectors wait
in a buffer until there are enough for one large matrix product with them. What a unit reads is one
row of G: input units and kernel taps, in the order in which they lie in memory (taps first where
images have their channels last). `FactorRecorder` keeps either G or (a, s) for later products with
the layer's block.

Shapes: n samples, f folds (positions merged with the samples, mostly 1), g groups, o and i units
per group, k kernel taps, p positions, c factor vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from flatgauge.surface.double_backward import SubmatrixIndex

if TYPE_CHECKING:
    from flatgauge.curvature.sweep.accumulate import ChunkContext
    from flatgauge.graph.layers import Layer

#: Gradients are computed for this many vectors at once, as larger products are faster, but only for
#: as many samples as fit into these bytes with their vectors: else what is computed has left the
#: cache before it is squared.
_STACKED, _BLOCK = 9, 16 * 2**20

#: From a shape to memory of that shape; None for a new tensor.
Allocate = Callable[[Sequence[int]], Tensor] | None


def vectors_per_product(layer: Layer) -> int:
    """Number of factor vectors whose gradients are computed at once."""
    return max(min(_STACKED, _BLOCK // (4 * math.prod(layer.shape))), 1)


class SampleGradients:
    """G = Σ_p s_p a_pᵀ by sample and factor vector.

    `purpose` names the memory that is used again in the next chunk.

    Attributes:
        weight: The layer's weight (g, o, i, k).
        patches: What every position sees (n, g, i * k, p); of transposed convolutions, the inputs.
    """

    patches: Tensor

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
        """Cut the inputs a (n, f, ...) into patches; vectors will be multiplied by `scale` (o,).

        Vectors behind a max-pooling (n, 1, o, windows) need `winners` (n, o, windows), the position
        of every window's largest value.
        """
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
            self.patches = cut_patches_by_position(
                *(inputs[:, 0], self._kernel, layer.stride, layer.padding, layer.dilation),
                allocate=partial(self._memory, "patches"),
            ).mT[:, None]
        else:
            self.patches = self._cut(inputs, partial(self._memory, "patches"))

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
        cut = self._cut(torch.cat(vectors)).unflatten(0, (count, -1))
        found = cut.movedim(0, 2).flatten(2, 3) @ seen.mT  # (n, g, c * o * k, i)
        turned: Tensor = found.unflatten(2, (count, out, taps)).mT
        return turned.flatten(4)

    def _memory(self, what: str, shape: Sequence[int]) -> Tensor:
        """Memory that is used again in the next chunk."""
        key = (self._purpose, what, self._layer.name)
        return self._context.workspace.tensor(key, shape, self.weight)

    def _cut(self, images: Tensor, allocate: Allocate = None) -> Tensor:
        """The patches of images (n, f, ...): (n, g, units / g * k, p)."""
        layer = self._layer
        n, folds = images.shape[:2]
        cut = cut_patches(
            *(images.flatten(0, 1), self._kernel, layer.stride, layer.padding, layer.dilation),
            allocate=allocate,
        )  # (n * f, units, k, p)
        if folds > 1:
            cut = cut.unflatten(0, (n, folds)).movedim(1, -2).flatten(-2)
        grouped: Tensor = cut.unflatten(1, (layer.groups, -1)).flatten(2, 3)
        return grouped


@dataclass(frozen=True)
class LayerFactors:
    """What the products with a layer's block are made of, for one chunk.

    Attributes:
        inputs: The layer's inputs (n, f, ...); None if gradients were recorded.
        vectors: Factor vectors at its output (n, c, f, ...), or gradients (n, c, weights).
        weights: The weights of the vectors (n, c).
        units: Which units of a linear layer these are, where some are left out.
    """

    inputs: Tensor | None
    vectors: Tensor
    weights: Tensor
    units: SubmatrixIndex = field(default_factory=SubmatrixIndex)


class FactorRecorder:
    """Records a layer's inputs and factor vectors, or the gradients they make.

    Gradients are recorded where they take no more memory: products with them are far cheaper.
    """

    def __init__(self, context: ChunkContext, layer: Layer, weight: Tensor) -> None:
        self._context, self._layer, self._weight = context, layer, weight
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
        if records_gradients(self._layer, self._outputs[0].numel()):
            gradients = SampleGradients(self._context, self._layer, self._weight, "recorded")
            gradients.begin(self._inputs)
            found = gradients.gradients_of(vectors).transpose(1, 2)  # (n, c, g, ...)
            return LayerFactors(None, self._layer.original(found).flatten(2), weights)
        return LayerFactors(self._inputs, vectors, weights, self._units)


def records_gradients(layer: Layer, outputs: int) -> bool:
    """Whether gradients take no more memory than vectors, with `outputs` numbers per sample."""
    units = layer.shape[layer.out_axis] * (layer.groups if layer.kind == "transposed" else 1)
    weights = torch.Size(layer.shape).numel()
    return outputs > units and weights <= 2 * outputs


def cut_patches(
    images: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    allocate: Allocate = None,
) -> Tensor:
    """Cut images (n, channels, *space) into the patches that a convolution multiplies.

    Returns:
        The patches (n, channels, k, p).

    Example:
        >>> import torch
        >>> row = torch.tensor([[[1.0, 2.0, 3.0]]])
        >>> cut_patches(row, (2,), (1,), ((0, 0),), (1,))[0, 0]
        tensor([[1., 2.],
                [2., 3.]])
    """
    images = _pad(images, padding).contiguous()
    counts, within, between = _steps(images, kernel, stride, dilation)
    view = images.as_strided(
        (*images.shape[:2], *kernel, *counts), (*images.stride()[:2], *within, *between)
    )
    return _copy(view, allocate).view(*images.shape[:2], math.prod(kernel), math.prod(counts))


def cut_patches_by_position(
    images: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    allocate: Allocate = None,
) -> Tensor:
    """The same patches with positions first and channels last: (n, p, k * channels)."""
    images = _pad(images, padding).contiguous(memory_format=torch.channels_last)
    counts, within, between = _steps(images, kernel, stride, dilation)
    n, channels = images.shape[:2]
    view = images.as_strided(
        (n, *counts, *kernel, channels), (images.stride(0), *between, *within, 1)
    )
    return _copy(view, allocate).view(n, math.prod(counts), math.prod(kernel) * channels)


def _copy(view: Tensor, allocate: Allocate) -> Tensor:
    """A view, written to memory."""
    return view.contiguous() if allocate is None else allocate(view.shape).copy_(view)


def _pad(images: Tensor, padding: tuple[tuple[int, int], ...]) -> Tensor:
    """Images with zeros around them."""
    if not any(chain.from_iterable(padding)):
        return images
    return F.pad(images, [side for pair in reversed(padding) for side in pair])


def _steps(
    images: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Number of patches along every axis, and the steps in memory within and between them."""
    sizes = zip(images.shape[2:], images.stride()[2:], kernel, stride, dilation, strict=True)
    found = [
        ((size - d * (k - 1) - 1) // s + 1, step * d, step * s) for size, step, k, s, d in sizes
    ]
    counts, within, between = zip(*found, strict=True)
    return counts, within, between


def _has_channels_last(images: Tensor) -> bool:
    """Whether the channels of images (n, channels, height, width) lie next to each other."""
    return (
        images.dim() == 4
        and not images.is_contiguous()
        and images.is_contiguous(memory_format=torch.channels_last)
    )
