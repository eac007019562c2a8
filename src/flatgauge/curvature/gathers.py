"""How a layer's curvature is gathered from columns at its output.

With a the layer's input, s a column at its output and G = s aᵀ the weight's gradient, summed over
a sample's positions, every sample adds λ Σ G² to the trace, and so on (see each class).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from flatgauge.curvature.relative import Relative
from flatgauge.curvature.sample_gradients import SampleGradients
from flatgauge.curvature.taps import Chunk, Parts
from flatgauge.layers import Layer

#: The parts for which every sample's gradient is computed.
_OF_GRADIENTS = frozenset({"trace", "diagonal", "own", "relative", "normalized"})


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
        """Hand over the diagonal (groups, out, in, taps), summed over samples and all columns."""

    def size(self) -> Tensor | None:
        """Hand over the diagonal if no columns had cancelled; None where none are signed."""
        return None


class Positions(Gather):
    """Layers with many positions per sample: sums over positions before squaring.

    Forms of units are sums of W ⊙ G over what enters or leaves; where G is larger than the
    activations, or not asked for, they are summed over positions of s · Wa and a · Wᵀs instead.

    Attributes:
        by_gradient: Whether every sample's gradient is computed.
    """

    def __init__(self, chunk: Chunk, layer: Layer, weight: Tensor, activations: int) -> None:
        super().__init__(chunk, layer, weight, activations)
        self._gradients = SampleGradients(chunk, layer, weight)
        self.by_gradient = bool(_OF_GRADIENTS & chunk.wanted)
        self._forms_by_gradient = self.by_gradient and weight.numel() <= activations
        self._weight = self._gradients.weight
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
        self._relatives = []
        if "relative" in chunk.wanted:
            self._relatives.append(Relative("relative", self._weight, n, None))
        if self.scales is not None:
            self._relatives.append(Relative("normalized", self._weight, n, self.scales))

    def open(
        self,
        inputs: Tensor,
        outputs: Tensor,
        winners: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """Keep both, and what every position sees.

        Args:
            inputs: What goes in (n, folds, ...).
            outputs: What comes out, without bias (n, folds, ...).
            winners: If columns will be heard behind a pooling, as (n, 1, out, windows): at which
                position every window has its largest value (n, out, windows).
            scale: If columns will be heard behind a scale of every channel, which is also in
                the outputs given here: the scale (out,).
        """
        if winners is not None:
            outputs = outputs.flatten(3).gather(3, winners[:, None])
        self._inputs, self._outputs = inputs, outputs
        if self.by_gradient:
            self._gradients.see(inputs, winners, scale)
        _, out, inner, taps = self._weight.shape
        positions = outputs[0].numel() // (out * self.layer.groups)
        few = positions * (positions + out) < out * inner * taps
        self._by_positions = few and winners is None and self.layer.kind != "transposed"
        for relative in self._relatives if self._by_positions else ():
            relative.see(self._gradients.seen, self._gradients.rows)

    def hear(self, column: Tensor) -> None:
        """Sum s · Wa over positions, and put the column by for its gradient."""
        wanted, factor = self.chunk.wanted, self.chunk.factor
        alone = self._single_input and "outgoing" in wanted
        if not self._forms_by_gradient and ("incoming" in wanted or alone):
            forms = self._summed(column * self._outputs)
            self.chunk.squared(forms, self._incoming, factor)
            if alone:  # All that enters a group's units leaves its one input.
                leaving = forms.unflatten(1, (self.layer.groups, -1)).sum(2)
                self.chunk.squared(leaving, self._outgoing, factor)
        for relative in self._relatives if self._by_positions else ():
            relative.hear(self._gradients.scaled(self._gradients.flat(column)), factor)
        if self.by_gradient and self._gradients.put(column, factor):
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
        found, self._diagonal = self._diagonal, None
        return None if found is None else self._gradients.apart(found)

    def size(self) -> Tensor | None:
        """The squares of G, all weighted positively."""
        found, self._size = self._size, None
        return None if found is None else self._gradients.apart(found)

    def _use_gradients(self) -> None:
        """Turn the columns that were put by into squares and forms."""
        for block, found, factors in self._gradients.blocks():
            for relative in self._relatives if not self._by_positions else ():
                relative.use(found, factors, block, self._gradients.rows)
            if self._forms_by_gradient and {"incoming", "outgoing"} & self.chunk.wanted:
                self._add_forms(found, factors, block)
            self._add_squares(found.square_(), factors, block)

    def _add_forms(self, found: Tensor, factors: Tensor | None, block: slice) -> None:
        """Add the forms of units, from gradients (n, groups, c, out, in * taps)."""
        weights = self._gradients.rows(self._weight)[:, None]
        forms = self.chunk.workspace.tensor("forms", found.shape, found)
        torch.mul(found, weights, out=forms)
        entering = forms.sum(-1)  # (n, groups, c, out)
        if "incoming" in self.chunk.wanted:
            self._incoming[block] += _weighted(entering, factors)
        if "outgoing" in self.chunk.wanted:
            if self._single_input:
                leaving = entering.sum(-1, keepdim=True)
            else:
                leaving = self._gradients.apart(forms).sum((3, 5))
            self._outgoing[block] += _weighted(leaving, factors)

    def _add_squares(self, squares: Tensor, factors: Tensor | None, block: slice) -> None:
        """Add trace and diagonal, from squared gradients (n, groups, c, out, in * taps)."""
        wanted = self.chunk.wanted
        if factors is not None:
            sizes = self.chunk.size(factors, block)
            if sizes is not None:
                size = (squares * sizes[:, None, :, None, None]).sum((0, 2))
                self._size = size if self._size is None else self._size.add_(size)
            squares = squares.mul_(factors[:, None, :, None, None])
        sums = squares.sum(2) if squares.shape[2] > 1 else squares[:, :, 0]  # (n, groups, out, row)
        if "trace" in wanted:
            self._trace[block] += sums.flatten(1).sum(1)
        if "own" in wanted:
            rows = self._gradients.rows(self._weight)
            self._own[block] += sums.flatten(1) @ rows.square().flatten()
        if "diagonal" in wanted:
            total = sums.sum(0)
            self._diagonal = total if self._diagonal is None else self._diagonal.add_(total)

    def _summed(self, values: Tensor) -> Tensor:
        """Sum (n, folds, ...) over everything but samples and units."""
        units = -1 if self.layer.kind == "linear" else 2
        return values.movedim(units, 1).flatten(2).sum(2)


def _weighted(forms: Tensor, factors: Tensor | None) -> Tensor:
    """Square forms (n, groups, c, units) and add them up over columns (n, groups * units)."""
    squares = forms.square()
    if factors is not None:
        squares *= factors[:, None, :, None]
    return squares.sum(2).flatten(1)
