"""Skeletons: for every hidden unit one edge out and one edge in, which its routes are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flatgauge.path_space.edges import Edges
from flatgauge.symmetry import skeleton as symmetric
from flatgauge.symmetry.gauge import GaugeGroup
from flatgauge.symmetry.pattern import NOTHING, Integers, pattern_of


@dataclass(frozen=True)
class ChosenEdges:
    """The edges that routes are made of, as places among all edges; `NOTHING` where there is none.

    Attributes:
        leaving: The first edge of every unit's route to an output: its free skeleton weight.
        entering: The last edge of every unit's route from an input or a bias.
        outward: Units in an order in which the head of a leaving edge comes before its tail.
        inward: Units in an order in which the tail of an entering edge comes before its head.
        ties: Units for which another edge would have done as well.
        choices: For every unit, how many edges it was chosen from: out and in (units, 2).
    """

    leaving: Integers
    entering: Integers
    outward: Integers
    inward: Integers
    ties: tuple[int, ...]
    choices: Integers


def strongest(gauge: GaugeGroup, edges: Edges) -> ChosenEdges:
    """The edges of largest paths: no rescaling and no order of the units changes the choice.

    Args:
        gauge: The network's gauge group.
        edges: Its weights.

    Returns:
        The skeleton.
    """
    state = {
        name: torch.from_numpy(_of(edges, edges.weights, number))
        for number, name in enumerate(edges.names)
        if not edges.absorbed[edges.starts[name]]
    }
    found = symmetric.strongest(gauge, state)

    def places(chosen: list[symmetric.Edge | None]) -> Integers:
        return np.array([NOTHING if e is None else edges.place(e) for e in chosen], dtype=np.int64)

    return _ordered(
        edges,
        _turns(gauge, edges),
        places(found.leaving),
        places(found.entering),
        found.ties,
    )


def diagonal(gauge: GaugeGroup, edges: Edges) -> ChosenEdges:
    """The paper's: unit i to unit i, counting around where widths differ; the middle of a kernel.

    Among several tensors that read a unit (or write it), the first that leads on is taken; a bias
    only where there is nothing else.

    Args:
        gauge: The network's gauge group.
        edges: Its weights.

    Returns:
        The skeleton.
    """
    turns = _turns(gauge, edges)
    leaving = np.full(gauge.dim, NOTHING)
    entering = np.full(gauge.dim, NOTHING)
    # Biases last: a tensor that varies along one axis only, and enters units.
    numbers = sorted(range(len(edges.names)), key=lambda n: len(edges.shapes[n]) < 2)
    for number in numbers:
        name = edges.names[number]
        if edges.absorbed[edges.starts[name]] or name not in gauge.names:
            continue
        start = edges.starts[name]
        rows, columns = _labels(gauge, edges, number)
        heads, tails = (_of(edges, ends, number).reshape(-1) for ends in (edges.heads, edges.tails))
        time = gauge.inference.times[name]
        for unit, place in _middles(tails, rows, allowed=turns.leads_on(tails, time)):
            if leaving[unit] == NOTHING:
                leaving[unit] = start + place
        for unit, place in _middles(heads, columns, allowed=turns.leads_in(heads, time)):
            if entering[unit] == NOTHING:
                entering[unit] = start + place
    return _ordered(edges, turns, leaving, entering, ())


#: How skeletons are chosen, by name.
SKELETONS: dict[str, Callable[[GaugeGroup, Edges], ChosenEdges]] = {
    "strongest": strongest,
    "diagonal": diagonal,
}


def _ordered(
    edges: Edges,
    turns: symmetric.Turns,
    leaving: Integers,
    entering: Integers,
    ties: tuple[int, ...],
) -> ChosenEdges:
    """A skeleton, with the orders in which its routes are followed."""
    counted = [
        np.bincount(ends[(ends != NOTHING) & ~edges.absorbed], minlength=len(leaving))
        for ends in (edges.tails, edges.heads)
    ]
    return ChosenEdges(
        leaving,
        entering,
        np.argsort(-turns.entered, kind="stable"),
        np.argsort(turns.read, kind="stable"),
        ties,
        np.stack(counted, axis=1),
    )


def _turns(gauge: GaugeGroup, edges: Edges) -> symmetric.Turns:
    """When units are entered and read; absorbed biases are no edges."""
    return symmetric.turns(
        gauge.dim,
        [
            (
                _of(edges, edges.heads, number),
                _of(edges, edges.tails, number),
                gauge.inference.times[name],
            )
            for number, name in enumerate(edges.names)
            if not edges.absorbed[edges.starts[name]]
        ],
    )


def _of(edges: Edges, row: NDArray[Any], number: int) -> NDArray[Any]:
    """The part of a row that belongs to one parameter, in its shape."""
    return row[edges.span(edges.names[number])].reshape(edges.shapes[number])


def _labels(gauge: GaugeGroup, edges: Edges, number: int) -> tuple[Integers, Integers]:
    """For every weight of a parameter, which row and which column it is in.

    A row is all that enters one unit, or one output; a column all that leaves one unit, or one
    input.

    Returns:
        Numbers of rows and of columns.
    """
    shape = edges.shapes[number]
    ends = pattern_of(gauge, edges.names[number]).edge()
    assert ends is not None
    axes = [_axis(end) for end in ends]
    known = [axis for axis in axes if axis is not None]
    labels = []
    for end, axis in zip(ends, axes, strict=True):
        if axis is None:  # Inputs or outputs: the other one of the first two axes.
            free = [a for a in range(min(2, len(shape))) if a not in known]
            units = np.arange(shape[free[0]]) if free else np.zeros(1, dtype=np.int64)
            turned = [1] * len(shape)
            if free:
                turned[free[0]] = -1
            end = units.reshape(turned)
        labels.append(np.broadcast_to(end, shape).reshape(-1))
    return labels[0], labels[1]


def _axis(end: Integers) -> int | None:
    """The first axis along which units differ."""
    if (end == NOTHING).all():
        return None
    return next((a for a, size in enumerate(end.shape) if size > 1), 0)


def _middles(
    units: Integers, others: Integers, *, allowed: NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    """For every unit, the middle weight of its i-th neighbour, if it is the i-th unit itself.

    Args:
        units: The unit that every weight belongs to.
        others: The neighbour that it leads to.
        allowed: Which weights may be taken.

    Yields:
        Units with the flat index of a weight.
    """
    order = np.argsort(units, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(units[order]) != 0, True)) + 1
    pieces = [order[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)] if units.size else []
    pieces = [piece for piece in pieces if units[piece[0]] != NOTHING]
    pieces.sort(key=lambda piece: int(piece[0]))
    for rank, piece in enumerate(pieces):
        piece = piece[allowed[piece]]
        neighbours = list(dict.fromkeys(others[piece].tolist()))
        if neighbours:
            taps = piece[others[piece] == neighbours[rank % len(neighbours)]]
            yield int(units[piece[0]]), int(taps[len(taps) // 2])
