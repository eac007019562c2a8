"""Ways through the graph: whether what leaves a hidden unit comes back to it, or to another."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import fx

from flatgauge.curvature.plan import Plan
from flatgauge.graph import ModelGraph
from flatgauge.meetings import meetings
from flatgauge.path_space.basis import BasisPaths
from flatgauge.symmetry.pattern import NOTHING


class Ways:
    """Which ops write into hidden units and read them, and which ops come after which.

    By ops, not by units: a way may lead through layers that no unit can be scaled in.

    Args:
        paths: The basis paths.
        plan: How the model is swept.
        through: The units that only pass on what a batch-norm reads.
    """

    def __init__(self, paths: BasisPaths, plan: Plan, through: NDArray[np.bool_]) -> None:
        self._after = _after(plan.graph)
        met = meetings(plan.graph)
        edges, count = paths.edges, len(through)
        self._writers: list[set[fx.Node]] = [set() for _ in range(count)]
        self._readers: list[set[fx.Node]] = [set() for _ in range(count)]
        for name in edges.names:
            span = edges.span(name)
            site = plan.sites.get(name)
            added = site is not None and site.role in ("bias", "norm")
            for unit in _units(edges.tails[span]):
                self._readers[unit] |= set(met[name])
            # No way leads in over what is only added; a batch-norm is entered where it is read.
            for unit in () if added else _units(edges.heads[span]):
                self._writers[unit] |= set(met[name])
        for unit in paths.chosen.outward.tolist()[::-1]:  # What comes before it comes first.
            if through[unit]:
                self._writers[int(edges.heads[paths.chosen.leaving[unit]])] |= self._writers[unit]
        self._back: dict[tuple[frozenset[fx.Node], frozenset[fx.Node]], bool] = {}

    def back(self, unit: int) -> bool:
        """Whether what leaves a unit comes back to it."""
        return self._leads(self._readers[unit], self._writers[unit], at_once=True)

    def around(self, first: int, second: int) -> bool:
        """Whether a way leads from one unit to another that is not a single layer."""
        return self._leads(self._readers[first], self._writers[second], at_once=False)

    def _leads(self, readers: set[fx.Node], writers: set[fx.Node], *, at_once: bool) -> bool:
        """Whether some op that reads is, or comes before, one that writes."""
        if at_once and readers & writers:
            return True
        key = frozenset(readers), frozenset(writers)
        if key not in self._back:
            self._back[key] = any(self._after[r] & {*writers} for r in readers)
        return self._back[key]


def _units(ends: NDArray[np.int64]) -> Iterable[int]:
    """The units among some ends."""
    found = np.unique(ends)
    return [unit for unit in found.tolist() if unit != NOTHING]


def _after(graph: ModelGraph) -> dict[fx.Node, set[fx.Node]]:
    """For every op, all that depend on it."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in reversed(graph.nodes):
        users = set(node.users)
        found[node] = users.union(*(found[user] for user in users))
    return found
