"""How curvature is gathered of linear layers with one position per sample."""

from __future__ import annotations

import torch
from torch import Tensor

from flatgauge.curvature.gathers import Gather
from flatgauge.curvature.relative import inverse
from flatgauge.curvature.taps import Chunk, Parts
from flatgauge.layers import Layer
from flatgauge.silent_units import Choice

#: The parts for which columns are heard at the layer's input.
_OF_INPUTS = frozenset({"outgoing", "relative", "normalized"})


class Rows(Gather):
    """Sums s² and (Wᵀs)² over columns; products come at the end.

    Args:
        chunk: The chunk that is swept.
        layer: The layer.
        weight: Its weight.
        activations: How many numbers go in and come out for one sample.
    """

    def __init__(self, chunk: Chunk, layer: Layer, weight: Tensor, activations: int) -> None:
        super().__init__(chunk, layer, weight, activations)
        self.reads_back = bool(_OF_INPUTS & chunk.wanted)
        self._weight = layer.canonical(weight)[0, :, :, 0]  # (out, in)
        self._s2: Tensor | None = None  # Σ λ s² (n, out), of the columns since the last time
        self._t2: Tensor | None = None  # Σ λ (Wᵀs)² (n, in)
        self._lengths: Tensor | None = None  # Σ λ ‖Wᵀs‖² (n,)
        self._scaled: Tensor | None = None  # Σ λ ‖σWᵀs‖² (n,)
        self._all_s2: Tensor | None = None
        self._turn = 0
        self._size: Tensor | None = None  # Σ |λ| s², where columns are signed

    def open(self, inputs: Tensor, outputs: Tensor, choice: Choice | None = None) -> None:
        """Keep a² and Wa.

        Args:
            inputs: What goes in (n, ...).
            outputs: What comes out, without bias (n, ...).
            choice: Which units these are, where some are left out.
        """
        self._choice = choice or Choice()
        inputs = inputs.reshape(self.chunk.samples, -1)
        self._squares = self._workspace("squares", inputs)  # (n, in)
        torch.mul(inputs, inputs, out=self._squares)
        self._outputs = outputs.reshape(self.chunk.samples, -1)  # (n, out)

    def hear(self, column: Tensor) -> None:
        """Add λ s²."""
        column, factor = column.reshape(self._outputs.shape), self.chunk.factor
        self._s2 = self.chunk.squared(column, self._s2, factor)
        size = self.chunk.size(factor)
        if size is not None:
            self._size = self.chunk.squared(column, self._size, size)

    def hear_back(self, column: Tensor) -> None:
        """Add λ (Wᵀs)²."""
        self._t2 = self.chunk.squared(
            column.reshape(self._squares.shape), self._t2, self.chunk.factor
        )

    def fill(
        self,
        s2: Tensor,
        t2: Tensor | None,
        lengths: Tensor | None,
        scaled: Tensor | None,
        size: Tensor | None,
    ) -> None:
        """Take sums over columns that were heard elsewhere.

        Args:
            s2: Σ λ s² (n, out).
            t2: Σ λ (Wᵀs)² (n, in), needed only where a is not zero.
            lengths: Σ λ ‖Wᵀs‖² (n,), where that is asked for.
            scaled: Σ λ ‖σWᵀs‖² (n,), where that is asked for.
            size: Σ |λ| s² (n, out), where columns are signed.
        """
        self._s2, self._t2, self._lengths, self._scaled = s2, t2, lengths, scaled
        if size is not None:
            self._size = size if self._size is None else self._size + size

    @property
    def s2(self) -> Tensor | None:
        """Σ λ s² of the columns since the last time (n, out)."""
        return self._s2

    def take(self) -> Parts:
        """‖a‖² Σs², s² W² a², s² (Wa)², a² (Wᵀs)² and ‖a‖² Σ(Wᵀs)², also for a/σ and σWᵀs."""
        wanted, parts = self.chunk.wanted, Parts()
        s2 = torch.zeros_like(self._outputs) if self._s2 is None else self._s2
        norms = self._squares.sum(1)
        if "trace" in wanted:
            parts.trace = norms * s2.sum(1)
        if "own" in wanted:
            weights = self._choice.taken(self._weight).square()
            parts.own = (s2 @ weights).mul_(self._squares).sum(1)
        if "incoming" in wanted:
            parts.incoming = self._workspace("incoming", s2)
            torch.mul(s2, self._outputs, out=parts.incoming).mul_(self._outputs)
            if self._choice.rows is not None:
                parts.places["incoming"] = self._choice.rows, len(self._weight)
        if _OF_INPUTS & wanted:
            t2 = torch.zeros_like(self._squares) if self._t2 is None else self._t2
            if "relative" in wanted:
                parts.relative = norms * (t2.sum(1) if self._lengths is None else self._lengths)
            if self.scales is not None:
                parts.normalized = self._normalized(t2, self.scales.square())
            if "outgoing" in wanted:
                parts.outgoing = self._workspace("outgoing", t2)
                torch.mul(t2, self._squares, out=parts.outgoing)
                if self._choice.columns is not None:
                    parts.places["outgoing"] = self._choice.columns, self._weight.shape[1]
        if "diagonal" in wanted:
            self._all_s2 = s2 if self._all_s2 is None else self._all_s2 + s2
        self._s2 = self._t2 = self._lengths = self._scaled = None
        self._turn += 1
        return parts

    def diagonal(self) -> Tensor | None:
        """(Σ s²)ᵀ a²."""
        return self._summed(self._all_s2)

    def size(self) -> Tensor | None:
        """(Σ |λ| s²)ᵀ a²."""
        return self._summed(self._size)

    def _summed(self, squares: Tensor | None) -> Tensor | None:
        """Squares at the outputs (n, out) times a², summed over samples (1, out, in, 1)."""
        if squares is None:
            return None
        products = squares.T @ self._squares
        return self._choice.spread(products, self._weight.shape)[None, :, :, None]

    def _normalized(self, t2: Tensor, scales: Tensor) -> Tensor:
        """‖a/σ‖² Σ λ ‖σWᵀs‖², with σ² of all input units."""
        chosen = scales if self._choice.columns is None else scales[self._choice.columns]
        lengths = t2 @ chosen if self._scaled is None else self._scaled
        return (self._squares @ inverse(chosen)) * lengths

    def _workspace(self, what: str, like: Tensor) -> Tensor:
        """Memory for this layer, shaped like a tensor; what is taken stays till the next chunk."""
        key = (what, self.layer.name, self._turn)
        return self.chunk.workspace.tensor(key, like.shape, like)
