"""Basis paths: the values of m - H paths, from which all weights follow but for their gauge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flatgauge.arguments import as_tensor
from flatgauge.path_space.edges import Edges
from flatgauge.path_space.folding import Folded
from flatgauge.path_space.mapping import PathMap
from flatgauge.path_space.naming import Names
from flatgauge.path_space.routes import routes_of
from flatgauge.path_space.skeletons import ChosenEdges
from flatgauge.symmetry.pattern import NOTHING, Integers
from flatgauge.symmetry.skeleton import Edge

#: More units than this are counted, not listed.
_MOST_NAMES = 3

#: A path value of a hidden unit that is so much smaller than the largest is worth a word.
_SMALL = 1e-4


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
        dropped: Hidden units on no path of non-zero value; their weights stay as they are.
        tied: Hidden units for which another choice would have done as well.
    """

    def __init__(
        self,
        edges: Edges,
        folded: Folded,
        chosen: ChosenEdges,
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
        routes = routes_of(edges, chosen)
        kept = routes.kept
        places = chosen.leaving[kept[:-1]]
        taking_part = kept[edges.heads] & kept[edges.tails] & ~edges.absorbed
        self.m, self.hidden = int(taking_part.sum()), int(kept[:-1].sum())
        taking_part[places] = False
        self.places: Integers = np.flatnonzero(taking_part)
        heads, tails = edges.heads[self.places], edges.tails[self.places]
        inward, outward = routes.inward[tails], routes.outward[heads]
        values = inward * edges.weights[self.places] * outward
        slopes = 1 / (inward * outward)
        self.values = torch.from_numpy(values)
        coordinate = np.full(edges.weights.size, NOTHING)
        coordinate[self.places] = np.arange(len(self.places))
        self.root_of = routes.roots(edges, chosen, coordinate)
        self.roots = torch.from_numpy(self.root_of[:-1][kept[:-1]])
        self.dropped = tuple(units[u] for u in np.flatnonzero(~kept[:-1]).tolist())
        self.tied = tuple(units[u] for u in chosen.ties if kept[u])
        self.map = PathMap(
            edges,
            folded,
            parameters,
            self.places,
            values,
            slopes,
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
        return Names(self.edges, self.chosen, self.places)

    @cached_property
    def free(self) -> tuple[Edge, ...]:
        """The free weights, one for every hidden unit that takes part."""
        places = self.chosen.leaving[self.root_of[:-1] != NOTHING]
        return tuple(_edge(self.edges, place) for place in places.tolist())

    @cached_property
    def entries(self) -> list[tuple[str, Tensor]]:
        """The parameters with the flat indices of their entries, in the order of `values`."""
        found = []
        for name in self.edges.names:
            span = self.edges.span(name)
            low, high = np.searchsorted(self.places, [span.start, span.stop])
            if high > low:
                found.append((name, torch.from_numpy(self.places[low:high] - span.start)))
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
        return bool((here.sign() == there.sign()).all())

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


def _edge(edges: Edges, place: int) -> Edge:
    name, _ = edges.owner(place)
    return Edge(name, place - edges.starts[name])


def _listed(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
