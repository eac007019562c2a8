"""The gradients of a layer's weight by single samples and columns, where it has many positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from flatgauge.curvature.patches import patches, patches_in_rows
from flatgauge.curvature.taps import Chunk
from flatgauge.layers import Layer

#: Gradients are computed for this many columns at once, as larger products are faster, but only of
#: so many samples that they and their columns take no more than these bytes: beyond, what is
#: computed has left the cache before it is squared.
_STACKED, _BLOCK = 9, 16 * 2**20


def columns_together(layer: Layer) -> int:
    """For how many columns at once a layer's gradients are computed."""
    return max(min(_STACKED, _BLOCK // (4 * math.prod(layer.shape))), 1)


class SampleGradients:
    """G = s aᵀ, summed over a sample's positions.

    What a unit reads is one row of weights: input units and taps, in the order in which they lie
    in memory (taps first where images have their channels last).

    Attributes:
        weight: The layer's weight (groups, out, in, taps).
        seen: What every position sees (n, groups, in * taps, positions); of transposed
            convolutions, the inputs. Gone with the next chunk.

    Args:
        chunk: The chunk that is swept.
        layer: The layer.
        weight: Its weight.
        purpose: What they are for; for every purpose there is memory that is used again.
    """

    def __init__(self, chunk: Chunk, layer: Layer, weight: Tensor, purpose: str = "") -> None:
        self._chunk, self._layer, self._purpose = chunk, layer, purpose
        self.weight = layer.canonical(weight)
        self._kernel = tuple(weight.shape[2:])
        self._most = columns_together(layer)
        self._taps_first = False
        self._waiting: list[Tensor] = []  # (n, groups, out, positions), or whole if transposed
        self._factors: list[Tensor | None] = []
        self._held: Tensor | None = None  # (n, groups, columns, out, positions), in any order
        self._winners: Tensor | None = None
        self._scale: Tensor | None = None

    def see(
        self, inputs: Tensor, winners: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """Take from the inputs what gradients are computed from.

        Args:
            inputs: The inputs (n, folds, ...).
            winners: If columns will be given for the windows of a pooling, (n, 1, out, windows): at
                which position every one of them has its largest value (n, out, windows).
            scale: What columns are to be multiplied by, channel by channel (out,); None for one.
        """
        layer, self._winners = self._layer, winners
        self._scale = None if scale is None else scale.view(layer.groups, -1, 1)
        plain = layer.kind == "linear" or (
            {*self._kernel, *layer.stride} == {1} and not any(map(any, layer.padding))
        )
        if layer.kind == "transposed" or plain:
            self.seen = self.flat(inputs)
        elif layer.groups == inputs.shape[1] == 1 and (
            winners is not None or _channels_last(inputs[:, 0])
        ):
            self._taps_first = True
            self.seen = patches_in_rows(
                *(inputs[:, 0], self._kernel, layer.stride, layer.padding, layer.dilation),
                memory=partial(self._memory, "patches"),
            ).mT[:, None]
        else:
            self.seen = self._patched(inputs, partial(self._memory, "patches"))

    def put(self, column: Tensor, factor: Tensor | None) -> bool:
        """Put a column at the output (n, folds, ...) by, with its weights.

        Args:
            column: The column.
            factor: Its weight for every sample; None if all are one.

        Returns:
            Whether there are so many now that their gradients should be taken.
        """
        if self._layer.kind == "transposed":
            self._waiting.append(column)
        else:
            flat = self.flat(column)
            place = self._place(flat, len(self._waiting))
            if self._scale is None:
                place.copy_(flat)
            else:
                torch.mul(flat, self._scale, out=place)
            self._waiting.append(place)
        self._factors.append(factor)
        return len(self._waiting) >= self._most

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """The gradients by the columns that were put by, a few samples at a time.

        Yields:
            Which samples, their gradients (n, groups, c, out, in * taps), which may be written to
            and are gone with the next, and the columns' weights (n, c), None if all are one.
        """
        if not self._waiting:
            return
        samples, count = self._chunk.samples, len(self._waiting)
        factors = self._weights()
        each = count * (self._waiting[0][0].numel() + 2 * self.weight.numel())
        if self._winners is not None:
            each += self._winners[0].numel() * self.seen.shape[2]
        step = max(_BLOCK // (each * self.weight.element_size()), 1)
        for start in range(0, samples, step):
            block = slice(start, start + step)
            yield block, self._products(block), None if factors is None else factors[block]
        self._waiting.clear()
        self._factors.clear()

    def by(self, columns: Tensor) -> Tensor:
        """The gradients by columns at hand, all at once.

        Args:
            columns: Columns at the output (n, c, folds, ...).

        Returns:
            The gradients (n, groups, c, out, in, taps).
        """
        if self._layer.kind == "transposed":
            return self.apart(self._transposed(list(columns.unbind(1)), self.seen))
        units = -1 if self._layer.kind == "linear" else 3
        flat = columns.movedim(units, 2).flatten(3).unflatten(2, (self._layer.groups, -1))
        found = flat.movedim(2, 1).flatten(2, 3) @ self.seen.mT  # (n, groups, c * out, in * taps)
        return self.apart(found.unflatten(2, (columns.shape[1], -1)))

    def rows(self, weights: Tensor) -> Tensor:
        """Weights (..., in, taps) as rows (..., in * taps), in the order of this layer."""
        return (weights.mT if self._taps_first else weights).flatten(-2)

    def apart(self, rows: Tensor) -> Tensor:
        """Rows (..., in * taps) as (..., in, taps)."""
        inner, taps = self.weight.shape[2:]
        order = (taps, inner) if self._taps_first else (inner, taps)
        parts: Tensor = rows.unflatten(-1, order)
        return parts.mT if self._taps_first else parts

    def scaled(self, flat: Tensor) -> Tensor:
        """Columns (n, groups, out, positions), times the scale that they are to be taken by."""
        return flat if self._scale is None else flat * self._scale

    def flat(self, tensor: Tensor) -> Tensor:
        """Units and positions (n, groups, units / groups, positions) of (n, folds, ...)."""
        units = -1 if self._layer.kind == "linear" else 2
        flat: Tensor = tensor.movedim(units, 1).flatten(2).unflatten(1, (self._layer.groups, -1))
        return flat

    def _place(self, flat: Tensor, number: int) -> Tensor:
        """Where a column goes, beside those that are multiplied together with it."""
        if self._held is None:
            n, groups, out, positions = flat.shape
            shape, order = (n, groups, self._most, out, positions), (2, 2)
            if self._winners is not None:  # Every channel has patches of its own.
                shape, order = (n, groups, out, self._most, positions), (2, 3)
            elif flat.stride(-1) != 1:  # Channels come last: positions stay in front of them.
                shape, order = (n, groups, positions, self._most, out), (2, 4)
            self._held = self._memory("columns", shape).movedim(*order)
        return self._held[:, :, number]

    def _weights(self) -> Tensor | None:
        """The weights of the columns that were put by (n, c); None if all are one."""
        if all(factor is None for factor in self._factors):
            return None
        one = self.weight.new_ones(self._chunk.samples)
        return torch.stack([one if factor is None else factor for factor in self._factors], 1)

    def _products(self, block: slice) -> Tensor:
        """The gradients (n, groups, c, out, in * taps) of some samples by all columns put by."""
        count, seen = len(self._waiting), self.seen[block]
        if self._held is None:
            return self._transposed([column[block] for column in self._waiting], seen)
        if self._winners is not None:
            return self._by_windows(self._held[block, 0, :count], seen, self._winners[block])
        columns = self._held[block, :, :count].flatten(2, 3)  # (n, groups, c * out, positions)
        shape = (*columns.shape[:3], seen.shape[2])
        found = self._chunk.workspace.tensor("gradients", shape, seen)
        torch.matmul(columns, seen.mT, out=found)
        gradients: Tensor = found.unflatten(2, (count, -1))
        return gradients

    def _by_windows(self, columns: Tensor, seen: Tensor, winners: Tensor) -> Tensor:
        """The same by columns (n, c, out, windows) of a pooling: each sees one patch."""
        workspace, (n, out, windows), row = self._chunk.workspace, winners.shape, seen.shape[2]
        first = torch.arange(n, device=winners.device)[:, None, None] * seen.shape[3]
        cut = workspace.tensor("windows", (n * out * windows, row), seen)
        torch.index_select(seen[:, 0].mT.flatten(0, 1), 0, (winners + first).flatten(), out=cut)
        found = workspace.tensor("gradients", (n, out, columns.shape[1], row), seen)
        torch.matmul(columns.movedim(1, 2), cut.view(n, out, windows, row), out=found)
        return found.movedim(2, 1)[:, None]

    def _transposed(self, columns: list[Tensor], seen: Tensor) -> Tensor:
        """The same for a transposed convolution: it is the columns that are cut into patches."""
        count, (_, out, _, taps) = len(columns), self.weight.shape
        cut = self._patched(torch.cat(columns)).unflatten(0, (count, -1))
        found = cut.movedim(0, 2).flatten(2, 3) @ seen.mT  # (n, groups, c * out * taps, in)
        turned: Tensor = found.unflatten(2, (count, out, taps)).mT
        return turned.flatten(4)

    def _memory(self, what: str, shape: Sequence[int]) -> Tensor:
        """Memory that is used again in the next chunk."""
        key = (self._purpose, what, self._layer.name)
        return self._chunk.workspace.tensor(key, shape, self.weight)

    def _patched(
        self, images: Tensor, memory: Callable[[Sequence[int]], Tensor] | None = None
    ) -> Tensor:
        """What every position sees (n, groups, units / groups * taps, positions)."""
        layer = self._layer
        n, folds = images.shape[:2]
        cut = patches(
            *(images.flatten(0, 1), self._kernel, layer.stride, layer.padding, layer.dilation),
            memory=memory,
        )  # (n * folds, units, taps, positions)
        if folds > 1:
            cut = cut.unflatten(0, (n, folds)).movedim(1, -2).flatten(-2)
        grouped: Tensor = cut.unflatten(1, (layer.groups, -1)).flatten(2, 3)
        return grouped


def _channels_last(images: Tensor) -> bool:
    """Whether the channels of images (n, channels, height, width) lie next to each other."""
    return (
        images.dim() == 4
        and not images.is_contiguous()
        and images.is_contiguous(memory_format=torch.channels_last)
    )
