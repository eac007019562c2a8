"""How a layer's curvature is gathered from columns at its output.

With a the layer's input, s a column at its output and G = s aᵀ the weight's gradient, summed over
a sample's positions, every sample adds λ Σ G² to the trace, and so on (see each class).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from flatgauge.curvature.patches import patches, patches_in_rows
from flatgauge.curvature.relative import Relative, inverse
from flatgauge.curvature.taps import Chunk, Parts
from flatgauge.layers import Layer

#: Gradients are computed for this many columns at once, as larger products are faster, but only of
#: so many samples that they and their columns take no more than these bytes: beyond, what is
#: computed has left the cache before it is squared.
_STACKED, _BLOCK = 9, 16 * 2**20

#: The parts for which columns are heard at the layer's input.
_OF_INPUTS = frozenset({"outgoing", "relative", "normalized"})

#: The parts for which every sample's gradient is computed.
_OF_GRADIENTS = frozenset({"trace", "diagonal", "own", "relative", "normalized"})


def columns_together(layer: Layer) -> int:
    """For how many columns at once a layer's gradients are computed."""
    return max(min(_STACKED, _BLOCK // (4 * math.prod(layer.shape))), 1)


class Gather(ABC):
    """Hears columns at a layer's output, and what they become at its input.

    Attributes:
        reads_back: Whether it wants to hear columns at the layer's input.

    Args:
        chunk: The chunk that is swept.
        layer: The layer.
        weight: Its weight.
        activations: How many numbers go in and come out for one sample.
    """

    def __init__(self, chunk: Chunk, layer: Layer, weight: Tensor, activations: int) -> None:
        self.chunk, self.layer = chunk, layer
        self.reads_back = False
        spread = chunk.scales.get(layer.name) if "normalized" in chunk.wanted else None
        self.scales = None if spread is None else spread.to(weight)  # of the input units (in,)

    @abstractmethod
    def open(self, inputs: Tensor, outputs: Tensor) -> None:
        """Take what goes in and what comes out, without bias (n, folds, ...)."""

    @abstractmethod
    def hear(self, column: Tensor) -> None:
        """A column at the output (n, folds, ...)."""

    def hear_back(self, column: Tensor) -> None:  # noqa: B027
        """The same column at the input (n, folds, ...); heard only if `reads_back`."""

    @abstractmethod
    def take(self) -> Parts:
        """Every sample's parts from the columns since the last time, but for the diagonal."""

    @abstractmethod
    def diagonal(self) -> Tensor | None:
        """The diagonal (groups, out, in, taps), summed over samples and all columns so far."""

    def size(self) -> Tensor | None:
        """The diagonal if no columns had cancelled; None where none are signed."""
        return None


class Rows(Gather):
    """Linear layers with one position per sample: s² and (Wᵀs)² first, products at the end."""

    def __init__(self, chunk: Chunk, layer: Layer, weight: Tensor, activations: int) -> None:
        super().__init__(chunk, layer, weight, activations)
        self.reads_back = bool(_OF_INPUTS & chunk.wanted)
        self.s2: Tensor | None = None  # Σ λ s², of the columns since the last time
        self._t2: Tensor | None = None  # Σ λ (Wᵀs)²
        self._all_s2: Tensor | None = None
        self._weight = layer.canonical(weight)[0, :, :, 0]
        self._size: Tensor | None = None  # Σ |λ| s², where columns are signed

    def open(self, inputs: Tensor, outputs: Tensor) -> None:
        """Keep a² and Wa."""
        inputs = inputs.reshape(self.chunk.samples, -1)
        self._squares = inputs * inputs  # (n, in)
        self._outputs = outputs.reshape(self.chunk.samples, -1)  # (n, out)

    def hear(self, column: Tensor) -> None:
        """Add λ s²."""
        column, factor = column.reshape(self._outputs.shape), self.chunk.factor
        self.s2 = self.chunk.squared(column, self.s2, factor)
        size = self.chunk.size(factor)
        if size is not None:
            self._size = self.chunk.squared(column, self._size, size)

    def hear_back(self, column: Tensor) -> None:
        """Add λ (Wᵀs)²."""
        self._t2 = self.chunk.squared(
            column.reshape(self._squares.shape), self._t2, self.chunk.factor
        )

    def take(self) -> Parts:
        """‖a‖² Σs², s² W² a², s² (Wa)², a² (Wᵀs)² and ‖a‖² Σ(Wᵀs)², also for a/σ and σWᵀs."""
        wanted, parts = self.chunk.wanted, Parts()
        s2 = torch.zeros_like(self._outputs) if self.s2 is None else self.s2
        norms = self._squares.sum(1)
        if "trace" in wanted:
            parts.trace = norms * s2.sum(1)
        if "own" in wanted:
            parts.own = (s2 @ self._weight.square()).mul_(self._squares).sum(1)
        if "incoming" in wanted:
            parts.incoming = (s2 * self._outputs).mul_(self._outputs)
        if _OF_INPUTS & wanted:
            t2 = torch.zeros_like(self._squares) if self._t2 is None else self._t2
            if "relative" in wanted:
                parts.relative = norms * t2.sum(1)
            if self.scales is not None:
                squares = self.scales.square()
                parts.normalized = (self._squares @ inverse(squares)) * (t2 @ squares)
            if "outgoing" in wanted:
                parts.outgoing = t2.mul_(self._squares)
        if "diagonal" in wanted:
            self._all_s2 = s2 if self._all_s2 is None else self._all_s2.add_(s2)
        self.s2 = self._t2 = None
        return parts

    def diagonal(self) -> Tensor | None:
        """(Σ s²)ᵀ a²."""
        if self._all_s2 is None:
            return None
        return (self._all_s2.T @ self._squares)[None, :, :, None]

    def size(self) -> Tensor | None:
        """(Σ |λ| s²)ᵀ a²."""
        return None if self._size is None else (self._size.T @ self._squares)[None, :, :, None]


class Positions(Gather):
    """Layers with many positions per sample: sums over positions before squaring.

    Forms of units are sums of W ⊙ G over what enters or leaves; where G is larger than the
    activations, or not asked for, they are summed over positions of s · Wa and a · Wᵀs instead.

    What a unit reads is one row of weights: input units and taps, in the order in which they lie
    in memory (taps first where images have their channels last).
    """

    def __init__(self, chunk: Chunk, layer: Layer, weight: Tensor, activations: int) -> None:
        super().__init__(chunk, layer, weight, activations)
        self._weight = layer.canonical(weight)
        self._kernel = tuple(weight.shape[2:])
        self._pending: list[tuple[Tensor, Tensor | None]] = []
        self._by_gradient = bool(_OF_GRADIENTS & chunk.wanted)
        self._forms_by_gradient = self._by_gradient and weight.numel() <= activations
        groups, out, inner, _ = self._weight.shape
        self._single_input = inner == 1
        self.reads_back = "outgoing" in chunk.wanted and not (
            self._forms_by_gradient or self._single_input
        )
        n, zeros = chunk.samples, weight.new_zeros
        self._incoming, self._outgoing = zeros(n, groups * out), zeros(n, groups * inner)
        self._trace, self._own = zeros(n), zeros(n)
        self._diagonal: Tensor | None = None
        self._size: Tensor | None = None
        self._taps_first = False
        self._relatives = []
        if "relative" in chunk.wanted:
            self._relatives.append(Relative("relative", self._weight, n, None))
        if self.scales is not None:
            self._relatives.append(Relative("normalized", self._weight, n, self.scales))

    def open(self, inputs: Tensor, outputs: Tensor) -> None:
        """Keep both, and what every position sees."""
        self._inputs, self._outputs = inputs, outputs
        if self._by_gradient:
            self.see(inputs)
        _, out, inner, taps = self._weight.shape
        positions = outputs[0].numel() // (out * self.layer.groups)
        few = positions * (positions + out) < out * inner * taps
        self._by_positions = few and self.layer.kind != "transposed"
        for relative in self._relatives if self._by_positions else ():
            relative.see(self._seen, self._rows)

    def see(self, inputs: Tensor) -> None:
        """Take from the inputs (n, folds, ...) what gradients are computed from."""
        layer = self.layer
        plain = layer.kind == "linear" or (
            {*self._kernel, *layer.stride} == {1} and not any(map(any, layer.padding))
        )
        if layer.kind == "transposed" or plain:
            self._seen = self._flat(inputs)
        elif layer.groups == inputs.shape[1] == 1 and _channels_last(inputs[:, 0]):
            self._taps_first = True
            self._seen = patches_in_rows(
                inputs[:, 0], self._kernel, layer.stride, layer.padding, layer.dilation
            ).mT[:, None]
        else:
            self._seen = self._patched(inputs)

    def hear(self, column: Tensor) -> None:
        """Sum s · Wa over positions, and put the column by for its gradient."""
        wanted = self.chunk.wanted
        alone = self._single_input and "outgoing" in wanted
        if not self._forms_by_gradient and ("incoming" in wanted or alone):
            forms = self._summed(column * self._outputs)
            self.chunk.squared(forms, self._incoming, self.chunk.factor)
            if alone:  # All that enters a group's units leaves its one input.
                leaving = forms.unflatten(1, (self.layer.groups, -1)).sum(2)
                self.chunk.squared(leaving, self._outgoing, self.chunk.factor)
        for relative in self._relatives if self._by_positions else ():
            relative.hear(self._flat(column), self.chunk.factor)
        if self._by_gradient:
            self._pending.append((column, self.chunk.factor))
            if len(self._pending) >= columns_together(self.layer):
                self._use_gradients()

    def hear_back(self, column: Tensor) -> None:
        """Sum a · Wᵀs over positions."""
        forms = self._summed(column * self._inputs)
        self.chunk.squared(forms, self._outgoing, self.chunk.factor)

    def take(self) -> Parts:
        """The sums over columns of squares of the sums over positions."""
        self._use_gradients()
        parts = Parts()
        for relative in self._relatives:
            setattr(parts, relative.part, relative.take())
        for name in ("trace", "own", "incoming", "outgoing"):
            if name in self.chunk.wanted:
                gathered = getattr(self, f"_{name}")
                setattr(parts, name, gathered.clone())
                gathered.zero_()
        return parts

    def diagonal(self) -> Tensor | None:
        """The squares of G, summed."""
        if "diagonal" not in self.chunk.wanted or self._diagonal is None:
            return None
        return self._apart(self._diagonal)

    def size(self) -> Tensor | None:
        """The squares of G, all weighted positively."""
        return None if self._size is None else self._apart(self._size)

    def gradients(self, columns: Tensor) -> Tensor:
        """The weight's gradient by every sample and column.

        Args:
            columns: Columns at the output (n, c, folds, ...).

        Returns:
            The gradients (n, groups, c, out, in, taps).
        """
        return self._apart(self._products(columns.unbind(1), slice(None)))

    def _products(self, columns: Sequence[Tensor], block: slice) -> Tensor:
        """The gradients (n, groups, c, out, in * taps) by some samples' columns (n, folds, ...)."""
        count, out, seen = len(columns), self._weight.shape[1], self._seen[block]
        if self.layer.kind == "transposed":
            cut = self._patched(torch.cat([*columns])).unflatten(0, (count, -1))
            found = cut.movedim(0, 2).flatten(2, 3) @ seen.mT  # (n, groups, c * out * taps, in)
            taps = self._weight.shape[3]
            turned: Tensor = found.unflatten(2, (count, out, taps)).mT
            return turned.flatten(4)
        flat = [self._flat(column) for column in columns]  # (n, groups, out, positions)
        if flat[0].stride(-1) == 1:
            rows = torch.stack(flat, 2).flatten(2, 3)
        else:  # Channels come last: positions stay in front of them.
            rows = torch.stack([part.mT for part in flat], 3).flatten(3).mT
        products: Tensor = (rows @ seen.mT).unflatten(2, (count, out))
        return products

    def _use_gradients(self) -> None:
        """Turn the columns that were put by into squares and forms, a few samples at a time."""
        if not self._pending:
            return
        columns = [column for column, _ in self._pending]
        factors = self._factors()
        self._pending.clear()
        each = len(columns) * (columns[0][0].numel() + 2 * self._weight.numel())
        step = max(_BLOCK // (each * columns[0].element_size()), 1)
        for start in range(0, self.chunk.samples, step):
            block = slice(start, start + step)
            found = self._products([column[block] for column in columns], block)
            self._gather(found, None if factors is None else factors[block], block)

    def _factors(self) -> Tensor | None:
        """The weights of the columns that were put by (n, c); None if all are one."""
        factors = [factor for _, factor in self._pending]
        if all(factor is None for factor in factors):
            return None
        one = self._weight.new_ones(self.chunk.samples)
        return torch.stack([one if factor is None else factor for factor in factors], 1)

    def _gather(self, found: Tensor, factors: Tensor | None, block: slice) -> None:
        """Add what the gradients (n, groups, c, out, in * taps) of some samples give."""
        wanted = self.chunk.wanted
        for relative in self._relatives if not self._by_positions else ():
            relative.use(found, factors, block, self._rows)
        if self._forms_by_gradient and {"incoming", "outgoing"} & wanted:
            forms = found * self._rows(self._weight)[:, None]
            self._incoming[block] += _weighted(forms.sum(-1), factors)
            if "outgoing" in wanted:
                self._outgoing[block] += _weighted(self._apart(forms).sum((3, 5)), factors)
        squares = found.square_()
        if factors is not None:
            sizes = self.chunk.size(factors, block)
            if sizes is not None:
                size = (squares * sizes[:, None, :, None, None]).sum((0, 2))
                self._size = size if self._size is None else self._size + size
            squares = squares.mul_(factors[:, None, :, None, None])
        sums = squares.sum(2) if squares.shape[2] > 1 else squares[:, :, 0]  # (n, groups, out, row)
        if "trace" in wanted:
            self._trace[block] += sums.flatten(1).sum(1)
        if "own" in wanted:
            self._own[block] += sums.flatten(1) @ self._rows(self._weight).square().flatten()
        if "diagonal" in wanted:
            total = sums.sum(0)
            self._diagonal = total if self._diagonal is None else self._diagonal.add_(total)

    def _rows(self, weights: Tensor) -> Tensor:
        """Weights (..., in, taps) as rows (..., in * taps), in the order of this layer."""
        return (weights.mT if self._taps_first else weights).flatten(-2)

    def _apart(self, rows: Tensor) -> Tensor:
        """Rows (..., in * taps) as (..., in, taps)."""
        inner, taps = self._weight.shape[2:]
        order = (taps, inner) if self._taps_first else (inner, taps)
        parts: Tensor = rows.unflatten(-1, order)
        return parts.mT if self._taps_first else parts

    def _summed(self, values: Tensor) -> Tensor:
        """Sum (n, folds, ...) over everything but samples and units."""
        units = -1 if self.layer.kind == "linear" else 2
        return values.movedim(units, 1).flatten(2).sum(2)

    def _flat(self, tensor: Tensor) -> Tensor:
        """Units and positions (n, groups, units / groups, positions) of a tensor."""
        units = -1 if self.layer.kind == "linear" else 2
        flat: Tensor = tensor.movedim(units, 1).flatten(2).unflatten(1, (self.layer.groups, -1))
        return flat

    def _patched(self, images: Tensor) -> Tensor:
        """What every position sees (n, groups, units / groups * taps, positions)."""
        layer = self.layer
        n, folds = images.shape[:2]
        cut = patches(
            images.flatten(0, 1), self._kernel, layer.stride, layer.padding, layer.dilation
        )  # (n * folds, units, taps, positions)
        if folds > 1:
            cut = cut.unflatten(0, (n, folds)).movedim(1, -2).flatten(-2)
        grouped: Tensor = cut.unflatten(1, (layer.groups, -1)).flatten(2, 3)
        return grouped


def _weighted(forms: Tensor, factors: Tensor | None) -> Tensor:
    """Square forms (n, groups, c, units) and add them up over columns (n, groups * units)."""
    squares = forms.square()
    if factors is not None:
        squares *= factors[:, None, :, None]
    return squares.sum(2).flatten(1)


def _channels_last(images: Tensor) -> bool:
    """Whether the channels of images (n, channels, height, width) lie next to each other."""
    return (
        images.dim() == 4
        and not images.is_contiguous()
        and images.is_contiguous(memory_format=torch.channels_last)
    )
