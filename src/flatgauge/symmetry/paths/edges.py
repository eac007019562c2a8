"""The weights of a network as edges between its hidden units, all in one row.

In: a gauge group, parameters and buffers. Out: `WeightEdges`, which say for every weight the unit
that it enters (its head), the unit that it leaves (its tail) and its value. A batch-norm with
stored statistics is folded: y = γ (x - mean) / √(variance + ε) + β is the weight
γ / √(variance + ε) and the bias β - γ mean / √(variance + ε) of every channel. One whose parameters
another one reads too, or that has no scale and shift, is left as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.symmetry.incidence import NO_UNIT, Floats, Integers, Mask, incidence

if TYPE_CHECKING:
    from flatgauge.symmetry.gauge import GaugeGroup
    from flatgauge.symmetry.inference.walk import StoredNorm


@dataclass(frozen=True)
class Edge:
    """One weight among all: the tensor and the flat index of an entry of it."""

    name: str
    index: int


@dataclass(frozen=True)
class FoldedNorm:
    """A folded batch-norm: β moves by `slope` times what γ moves; `spread` is √(variance + ε)."""

    weight: str
    bias: str
    slope: Floats
    spread: Floats


@dataclass(frozen=True)
class WeightEdges:
    """Every weight of a network: where it comes from, where it leads, what it is.

    Inputs, constants and outputs are not units: such an end is `NO_UNIT`.

    Attributes:
        shapes: The shapes of the parameters, in the order of the model.
        starts: Where in the row the weights of each begin.
        heads: The unit that every weight enters.
        tails: The unit that it leaves.
        weights: The weights, with batch-norms folded, in double precision.
        norms: The folded batch-norms.
        absorbed: Biases in front of a folded batch-norm, whose own bias stands for them.
    """

    shapes: dict[str, tuple[int, ...]]
    starts: dict[str, int]
    heads: Integers
    tails: Integers
    weights: Floats
    norms: tuple[FoldedNorm, ...]
    absorbed: frozenset[str]

    @cached_property
    def norm_parameters(self) -> frozenset[str]:
        """The parameters of folded batch-norms."""
        return frozenset(name for norm in self.norms for name in (norm.weight, norm.bias))

    @cached_property
    def in_use(self) -> Mask:
        """All weights but absorbed biases."""
        found = np.ones(self.weights.size, bool)
        for name in self.absorbed:
            found[self.span(name)] = False
        return found

    def span(self, name: str) -> slice:
        """Where in the row the weights of a parameter are."""
        start = self.starts[name]
        return slice(start, start + math.prod(self.shapes[name]))

    def part(self, row: NDArray[Any], name: str) -> NDArray[Any]:
        """The part of a row that belongs to a parameter, in its shape."""
        return row[self.span(name)].reshape(self.shapes[name])

    def place(self, edge: Edge) -> int:
        """Where in the row an edge is."""
        return self.starts[edge.name] + edge.index

    def edge(self, place: int) -> Edge:
        """The parameter that a place in the row belongs to, and the flat index there."""
        names, starts = list(self.starts), list(self.starts.values())
        name = names[int(np.searchsorted(starts, place, side="right")) - 1]
        return Edge(name, place - self.starts[name])

    def entry_name(self, place: int) -> str:
        """A weight as a reader would write it, such as ``0.weight[1, 2]``."""
        edge = self.edge(place)
        index = np.unravel_index(edge.index, self.shapes[edge.name])
        return f"{edge.name}[{', '.join(map(str, index))}]"


def weight_edges(
    gauge: GaugeGroup, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> WeightEdges:
    """Read a network's weights as edges; raise `UnsupportedGraphError` if one is not an edge."""
    values = {n: _double(p) for n, p in parameters.items() if n in gauge.inference.scales}
    norms, absorbed = _fold_norms(gauge, values, buffers)
    starts, size = {}, 0
    for name, value in values.items():
        starts[name], size = size, size + value.size
    edges = WeightEdges(
        {name: tuple(value.shape) for name, value in values.items()},
        starts,
        np.full(size, NO_UNIT),
        np.full(size, NO_UNIT),
        np.concatenate([np.zeros(0), *(value.reshape(-1) for value in values.values())]),
        norms,
        absorbed,
    )
    for name in (name for name in values if name in gauge.names):
        ends = incidence(gauge, name).edge_ends()
        if ends is None:
            raise UnsupportedGraphError(
                f"the scale of `{name}` depends on several units at once (products of "
                "activations, or one weight used in several places), so that it is not an edge "
                "from one unit to another and paths through it have no value; basis paths exist "
                "for chains and branches of layers."
            )
        for row, end in zip((edges.heads, edges.tails), ends, strict=True):
            edges.part(row, name)[...] = end
    return edges


def _fold_norms(
    gauge: GaugeGroup, values: dict[str, Floats], buffers: Mapping[str, Tensor]
) -> tuple[tuple[FoldedNorm, ...], frozenset[str]]:
    """Replace the weights and biases of batch-norms by those of every channel, in place."""
    norms, absorbed = [], set()
    for norm in _unshared_norms(gauge.inference.norms):
        spread = np.sqrt(_double(buffers[norm.variance]) + norm.epsilon)
        shift = _double(buffers[norm.mean])
        if norm.before is not None:
            shift = shift - values[norm.before]
            absorbed.add(norm.before)
        values[norm.weight] = values[norm.weight] / spread
        values[norm.bias] = values[norm.bias] - values[norm.weight] * shift
        norms.append(FoldedNorm(norm.weight, norm.bias, shift / spread, spread))
    return tuple(norms), frozenset(absorbed)


def _unshared_norms(norms: tuple[StoredNorm, ...]) -> list[StoredNorm]:
    """The norms whose parameters no other norm reads."""
    parts = {norm: {norm.weight, norm.bias, norm.before} - {None} for norm in norms}
    seen = Counter(name for names in parts.values() for name in names)
    return [norm for norm, names in parts.items() if all(seen[name] == 1 for name in names)]


def _double(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().double().cpu().numpy()
    return array
