"""Readable names of basis paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from flatgauge.path_space.edges import Edges
from flatgauge.path_space.skeletons import ChosenEdges
from flatgauge.symmetry.pattern import NOTHING, Integers


class Names(Sequence[str]):
    """The weights along every basis path, from input to output, written when they are asked for.

    Args:
        edges: The weights.
        skeleton: Their skeleton.
        places: Which of the weights have a basis path.
    """

    def __init__(self, edges: Edges, skeleton: ChosenEdges, places: Integers) -> None:
        self._edges, self._skeleton, self._places = edges, skeleton, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """The name of one path, or of several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        owners = [self._edges.owner(p) for p in self._path(int(self._places[index]))]
        return " → ".join(f"{name}[{', '.join(map(str, place))}]" for name, place in owners)

    def _path(self, place: int) -> list[int]:
        """The weights along the path over a weight."""
        edges, before, after = self._edges, [], []
        unit = int(edges.tails[place])
        while unit != NOTHING:
            before.append(int(self._skeleton.entering[unit]))
            unit = int(edges.tails[before[-1]])
        unit = int(edges.heads[place])
        while unit != NOTHING:
            after.append(int(self._skeleton.leaving[unit]))
            unit = int(edges.heads[after[-1]])
        return [*before[::-1], place, *after]
