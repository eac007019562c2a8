"""Basis paths: the values of m - H paths, from which all weights follow but for their gauge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import torch
from torch import Tensor

from flatgauge.arguments import as_tensor
from flatgauge.path_space.edges import Edges
from flatgauge.path_space.folding import Folded
from flatgauge.path_space.mapping import PathMap
from flatgauge.path_space.skeletons import Skeleton
from flatgauge.symmetry.pattern import NOTHING, Floats, Integers
from flatgauge.symmetry.skeleton import Edge

#: More units than this are counted, not listed.
_MOST_NAMES = 3

#: A path value of a hidden unit that is so much smaller than the largest is worth a word.
_SMALL = 1e-4


@dataclass(frozen=True)
class Routes:
    """What a skeleton makes of a network; one entry per unit.

    Attributes:
        outward: R: the product of the weights from the unit to an output.
        inward: P: the product of the weights from an input or a bias to the unit.
        kept: Whether neither of them is zero, for the unit and for all on its routes.
    """

    outward: Floats
    inward: Floats
    kept: np.ndarray

    @classmethod
    def of(cls, edges: Edges, skeleton: Skeleton) -> Routes:
        """Follow all routes."""
        count = len(skeleton.leaving)
        outward, inward = np.zeros(count + 1), np.zeros(count + 1)
        outward[NOTHING] = inward[NOTHING] = 1.0
        with np.errstate(all="ignore"):  # What leaves the range of numbers is no path.
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
        return cls(outward, inward, _with_their_routes(edges, skeleton, kept))


class BasisPaths:
    """Coordinates of a network that no rescaling changes: the values of its basis paths.

    Every hidden unit has one *free* weight, which keeps its value; every other weight e, from
    unit b to unit a, has a path: in along the skeleton to b, over e, and out along free weights
    from a. The values of these m - H paths and the signs of the free weights say everything about
    the function.

    Attributes:
        skeleton: How the skeleton was chosen.
        values: The values v of the paths, in double precision, on the CPU.
        roots: For every hidden unit b that takes part, the coordinate whose size is
            |u_b| = |P(b) R(b)|. Only these are divided by: where one passes zero, the loss as a
            function of v has a pole.
        m: How many weights take part.
        hidden: How many hidden units H take part.
        free: The free weights.
        entries: The parameters with the flat indices of their entries, in the order of `values`.
        dropped: Hidden units on no path of non-zero value; their weights stay as they are.
        tied: Hidden units for which another choice would have done as well.
    """

    def __init__(
        self,
        edges: Edges,
        folded: Folded,
        chosen: Skeleton,
        parameters: Mapping[str, Tensor],
        units: Sequence[str],
        skeleton: str,
    ) -> None:
        """Follow the routes of a skeleton.

        Args:
            edges: The weights.
            folded: Batch-norms.
            chosen: The edges of the skeleton.
            parameters: The parameters as they are, by name.
            units: The names of the units.
            skeleton: The name of the skeleton.
        """
        self.skeleton = skeleton
        self.edges, self.chosen = edges, chosen
        routes = Routes.of(edges, chosen)
        kept = routes.kept
        places = chosen.leaving[kept[:-1]]
        self.free = tuple(_edge(edges, int(place)) for place in places)
        taking_part = kept[edges.heads] & kept[edges.tails] & ~edges.absorbed
        self.m, self.hidden = int(taking_part.sum()), int(kept[:-1].sum())
        taking_part[places] = False
        self.places: Integers = np.flatnonzero(taking_part)
        heads, tails = edges.heads[self.places], edges.tails[self.places]
        inward, outward = routes.inward[tails], routes.outward[heads]
        values = inward * edges.weights[self.places] * outward
        self.values = torch.from_numpy(values)
        coordinate = np.full(edges.weights.size, NOTHING)
        coordinate[self.places] = np.arange(len(self.places))
        self.root_of = self._roots(coordinate, kept)
        self.roots = torch.from_numpy(self.root_of[:-1][kept[:-1]])
        self.dropped = tuple(units[u] for u in np.flatnonzero(~kept[:-1]).tolist())
        self.tied = tuple(units[u] for u in chosen.ties if kept[u])
        self.map = PathMap(
            edges,
            folded,
            parameters,
            self.places,
            values,
            1 / (inward * outward),
            self.root_of[tails],
        )

    def __len__(self) -> int:
        return len(self.values)

    @property
    def smallest(self) -> float:
        """The smallest |u_b|: how far v may move before it can meet a pole."""
        return float(self.values[self.roots].abs().min()) if len(self.roots) else float("inf")

    @property
    def names(self) -> Names:
        """Readable names: the weights along every path."""
        return Names(self)

    @cached_property
    def entries(self) -> list[tuple[str, Tensor]]:
        """The parameters with the flat indices of their entries, in the order of `values`."""
        found = []
        for number, name in enumerate(self.edges.names):
            start = self.edges.starts[name]
            size = int(np.prod(self.edges.shapes[number]))
            low, high = np.searchsorted(self.places, [start, start + size])
            if high > low:
                found.append((name, torch.from_numpy(self.places[low:high] - start)))
        return found

    @property
    def choices(self) -> Integers:
        """For every hidden unit that takes part, how many edges out and in it could have had."""
        found: Integers = self.chosen.choices[self.root_of[:-1] != NOTHING]
        return found

    def to_weights(self, values: Tensor) -> dict[str, Tensor]:
        """The weights that paths of given values belong to.

        Free weights keep their values, so that the result is written as the model is. At `values`
        itself it is the model's own weights, bit for bit. Differentiable.

        Args:
            values: One per path.

        Returns:
            All parameters, by name, in double precision on the device of `values`.

        Raises:
            ValueError: If their number is wrong, or one is not finite.
        """
        values = as_tensor(values, "values")
        if values.shape != (len(self),):
            raise ValueError(
                f"`values` has shape {tuple(values.shape)}, but there are {len(self)} basis paths; "
                f"give a vector ({len(self)},)."
            )
        if not bool(values.isfinite().all()):
            raise ValueError(
                f"`values` holds {int((~values.isfinite()).sum())} numbers that are not finite; "
                "paths have finite values."
            )
        gone = torch.nonzero(values[self.roots.to(values.device)] == 0)[:, 0]
        if len(gone):
            name = self.names[int(self.roots[gone[0]])]
            raise ValueError(
                f"`values` is zero for the path {name}, which a hidden unit's other weights are "
                "divided by: no weights have these values (a pole of the loss)."
            )
        return self.map.split(self.map(values.double()))

    def reaches(self, values: Tensor) -> bool:
        """Whether values are reached from the model's own without meeting a pole on the way.

        Args:
            values: One per path.

        Returns:
            False if the path value of some hidden unit is zero or has changed its sign.
        """
        here, there = self.values[self.roots], values[self.roots].cpu()
        return bool((here * there > 0).all())

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said with every number that is measured in these coordinates."""
        notes = []
        if self.dropped:
            notes.append(
                f"{len(self.dropped)} hidden units lie on no path of non-zero value and are left "
                f"out with their weights: {_listed(self.dropped)}"
            )
        if self.tied:
            notes.append(
                f"the skeleton is tied at {len(self.tied)} hidden units, where the order of the "
                f"weights decides: {_listed(self.tied)}"
            )
        largest = float(self.values[self.roots].abs().max()) if self.hidden else 0.0
        if self.smallest < _SMALL * largest:
            notes.append(
                f"the path of one hidden unit has a value of {self.smallest:.2g} (of another one "
                f"{largest:.2g}), and values are divided by it: such numbers say more about the "
                f"{self.skeleton} skeleton than about the minimum"
            )
        return tuple(notes)

    def describe(self) -> str:
        """How many paths there are, how large, and how well they say what the weights are."""
        sizes = self.values.abs()
        lines = [
            f"{len(self)} basis paths of {self.m} weights and {self.hidden} hidden units, "
            f"{self.skeleton} skeleton"
        ]
        if len(self):
            lines.append(f"|v| from {float(sizes.min()):.3g} to {float(sizes.max()):.3g}")
        if self.hidden:
            largest = float(self.values[self.roots].abs().max())
            lines.append(
                f"|u_b|, the only divisors, from {self.smallest:.3g} to {largest:.3g}: moves of v "
                "by less than the smallest meet no pole"
            )
        for title, listed in (
            ("on no path of non-zero value, left as they are", self.dropped),
            ("with a tied choice, which the order of the weights decides", self.tied),
        ):
            if listed:
                lines.append(f"{len(listed)} hidden units {title}: {_listed(listed)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"BasisPaths({len(self)} of m={self.m}, hidden={self.hidden}, "
            f"skeleton={self.skeleton!r})"
        )

    def path(self, index: int) -> list[tuple[str, tuple[int, ...]]]:
        """The weights along a path, from input to output.

        Args:
            index: Of the coordinate.

        Returns:
            Parameters with indices.
        """
        edges, place = self.edges, int(self.places[index])
        before: list[int] = []
        after: list[int] = []
        unit = int(edges.tails[place])
        while unit != NOTHING:
            before.insert(0, int(self.chosen.entering[unit]))
            unit = int(edges.tails[before[0]])
        unit = int(edges.heads[place])
        while unit != NOTHING:
            after.append(int(self.chosen.leaving[unit]))
            unit = int(edges.heads[after[-1]])
        return [edges.owner(p) for p in (*before, place, *after)]

    def _roots(self, coordinate: Integers, kept: np.ndarray) -> Integers:
        """For every unit, the coordinate of the last edge on its route in that is not free."""
        chosen, edges = self.chosen, self.edges
        found = np.full(len(kept), NOTHING)
        for unit in chosen.inward.tolist():
            if kept[unit]:
                place = chosen.entering[unit]
                own = coordinate[place]
                found[unit] = found[edges.tails[place]] if own == NOTHING else own
        return found


class Names(Sequence[str]):
    """The names of basis paths, made when they are asked for."""

    def __init__(self, paths: BasisPaths) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """The weights along one path, from input to output."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        found = self._paths.path(range(len(self))[index])
        return " → ".join(f"{name}[{', '.join(map(str, place))}]" for name, place in found)


def _with_their_routes(edges: Edges, skeleton: Skeleton, kept: np.ndarray) -> np.ndarray:
    """Those of some units whose routes run through such units only.

    A unit may be reached through one that itself leads nowhere (its own free weight is zero), whose
    weights have no path then: the route has no first edge to begin with.

    Returns:
        A mask of units.
    """
    ways = (
        (skeleton.outward, skeleton.leaving, edges.heads),
        (skeleton.inward, skeleton.entering, edges.tails),
    )
    while True:
        before = kept.copy()
        for order, chosen, ends in ways:
            for unit in order.tolist():
                kept[unit] &= kept[ends[chosen[unit]]]
        if (kept == before).all():
            return kept


def _edge(edges: Edges, place: int) -> Edge:
    name, _ = edges.owner(place)
    return Edge(name, place - edges.starts[name])


def _listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
