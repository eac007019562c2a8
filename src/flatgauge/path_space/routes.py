"""Routes: what the edges of a skeleton make of every hidden unit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatgauge.path_space.edges import Edges
from flatgauge.path_space.skeletons import ChosenEdges
from flatgauge.symmetry.pattern import NOTHING, Floats, Integers


@dataclass(frozen=True)
class Routes:
    """The routes into and out of every unit; the last entry is that of inputs and outputs.

    Attributes:
        outward: R: the product of the weights from the unit to an output.
        inward: P: the product of the weights from an input or a bias to the unit.
        kept: Whether neither of them is zero, for this unit and all others on its routes.
    """

    outward: Floats
    inward: Floats
    kept: NDArray[np.bool_]

    def roots(self, edges: Edges, skeleton: ChosenEdges, coordinate: Integers) -> Integers:
        """For every unit, the coordinate of the last edge on its route in that is not free.

        Args:
            edges: The weights.
            skeleton: Their skeleton.
            coordinate: The coordinate of every edge, or `NOTHING`.

        Returns:
            The coordinates; `NOTHING` for units that are not kept.
        """
        found = np.full(len(self.kept), NOTHING)
        for unit in skeleton.inward.tolist():
            if self.kept[unit]:
                place = skeleton.entering[unit]
                own = coordinate[place]
                found[unit] = found[edges.tails[place]] if own == NOTHING else own
        return found


def routes_of(edges: Edges, skeleton: ChosenEdges) -> Routes:
    """Follow all routes of a skeleton.

    Args:
        edges: The weights.
        skeleton: Their skeleton.

    Returns:
        The routes. What leaves the range of numbers counts as zero.
    """
    count = len(skeleton.leaving)
    outward, inward = np.zeros(count + 1), np.zeros(count + 1)
    outward[NOTHING] = inward[NOTHING] = 1.0
    with np.errstate(all="ignore"):
        for unit in skeleton.outward.tolist():
            place = skeleton.leaving[unit]
            if place != NOTHING:
                outward[unit] = edges.weights[place] * outward[edges.heads[place]]
        for unit in skeleton.inward.tolist():
            place = skeleton.entering[unit]
            if place != NOTHING:
                inward[unit] = inward[edges.tails[place]] * edges.weights[place]
        through = outward * inward
    kept = np.isfinite(through) & (through != 0)
    ahead, behind = edges.heads[skeleton.leaving], edges.tails[skeleton.entering]
    while True:
        lost = kept[:-1] & ~(kept[ahead] & kept[behind])
        if not lost.any():
            return Routes(outward, inward, kept)
        kept[:-1] &= ~lost
