"""The weights of a network as edges between its hidden units, flat and in one row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flatgauge.graph import UnsupportedGraphError
from flatgauge.path_space.folding import Folded
from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.pattern import NOTHING, Floats, Integers, pattern_of
from flatgauge.symmetry.skeleton import Edge


@dataclass(frozen=True)
class Edges:
    """Every weight of a network: where it comes from, where it leads, what it is.

    Inputs, constants and outputs are no units: such an end is `NOTHING`.

    Attributes:
        names: The parameters, in the order of the model.
        shapes: Theirs.
        starts: Where in the row the weights of each begin.
        heads: The unit that every weight enters.
        tails: The unit that it leaves.
        weights: The weights, with batch-norms folded, in double precision.
        absorbed: Which of them are biases that a batch-norm's own stands for.
        folded: The parameters of folded batch-norms.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: dict[str, int]
    heads: Integers
    tails: Integers
    weights: Floats
    absorbed: NDArray[np.bool_]
    folded: frozenset[str]

    def place(self, edge: Edge) -> int:
        """Where in the row an edge is."""
        return self.starts[edge.name] + edge.index

    def span(self, name: str) -> slice:
        """Where in the row the weights of a parameter are."""
        start = self.starts[name]
        return slice(start, start + math.prod(self.shapes[self.names.index(name)]))

    def owner(self, place: int) -> tuple[str, tuple[int, ...]]:
        """The parameter that a weight belongs to, and its index there."""
        starts = list(self.starts.values())
        number = int(np.searchsorted(starts, place, side="right")) - 1
        index = np.unravel_index(place - starts[number], self.shapes[number])
        return self.names[number], tuple(int(i) for i in index)


def edges_of(gauge: GaugeGroup, state: Mapping[str, Tensor], folded: Folded) -> Edges:
    """Read the weights of a network as edges.

    Args:
        gauge: The network's gauge group.
        state: Its parameters, by name, in the order of the model.
        folded: What is folded into what.

    Returns:
        The edges.

    Raises:
        UnsupportedGraphError: If a weight is no edge from unit to unit.
    """
    names = [name for name in state if name in gauge.inference.scales]
    heads: list[Integers] = []
    tails: list[Integers] = []
    weights: list[Floats] = []
    absorbed: list[NDArray[np.bool_]] = []
    starts: dict[str, int] = {}
    place = 0
    for name in names:
        shape = tuple(state[name].shape)
        ends = (np.array(NOTHING), np.array(NOTHING))
        if name in gauge.names:
            found = pattern_of(gauge, name).edge()
            if found is None:
                raise UnsupportedGraphError(
                    f"the scale of `{name}` hangs on several units at once (products of "
                    "activations, or one weight used in several places), so that it is no edge "
                    "from one unit to another and paths through it have no value; basis paths are "
                    "there for chains and branches of layers."
                )
            ends = found
        for row, end in zip((heads, tails), ends, strict=True):
            row.append(np.broadcast_to(end, shape).reshape(-1))
        weights.append(folded.weights[name].reshape(-1))
        absorbed.append(np.full(weights[-1].size, name in folded.absorbed))
        starts[name] = place
        place += weights[-1].size
    return Edges(
        tuple(names),
        tuple(tuple(state[name].shape) for name in names),
        starts,
        np.concatenate([np.zeros(0, np.int64), *heads]),
        np.concatenate([np.zeros(0, np.int64), *tails]),
        np.concatenate([np.zeros(0), *weights]),
        np.concatenate([np.zeros(0, bool), *absorbed]),
        frozenset(name for one in folded.couplings for name in (one.weight, one.bias)),
    )
