"""The unknown scales of a network and the equations between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction

import torch

from flatgauge.symmetry.scale import Ids, Scale, Term, groups

_ONE = Fraction(1)

#: Most unknowns in the equations that one op adds, and in those of all ops together.
MOST_AT_ONCE, MOST = 2**19, 2**24


class TooManyScalesError(Exception):
    """An op relates more scales than are tracked.

    Attributes:
        count: How many.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


@dataclass
class System:
    """Unknowns, numbered from one, and what is known of them; unknown zero is zero.

    Besides their scales, unknowns stand for *units* (channels): a weight's row, its bias and the
    activation they give belong to one unit although a batch-norm between them changes the scale.

    Attributes:
        count: How many unknowns there are, with the zero.
        held: How many unknowns the equations hold.
        sites: Where unknowns came from, in order.
        parameters: Whether a site's unknowns belong to a parameter rather than an activation.
        starts: The first unknown of every site.
        equalities: Pairs of arrays of unknowns that are equal.
        zeros: Arrays of unknowns that are zero.
        sums: Arrays (equations, terms) of unknowns with coefficients, whose sums are zero.
        links: Pairs of arrays of unknowns that belong to the same units.
        seen: Arrays of unknowns that an op reads without asking anything of them.
    """

    count: int = 1
    held: int = 0
    sites: list[str] = field(default_factory=lambda: [""])
    parameters: list[bool] = field(default_factory=lambda: [True])
    starts: list[int] = field(default_factory=lambda: [0])
    equalities: list[tuple[Ids, Ids]] = field(default_factory=list)
    zeros: list[Ids] = field(default_factory=list)
    sums: list[tuple[Ids, tuple[Fraction, ...]]] = field(default_factory=list)
    links: list[tuple[Ids, Ids]] = field(default_factory=list)
    seen: list[Ids] = field(default_factory=list)

    def copy(self) -> System:
        """The same unknowns and equations, to add others to."""
        lists = (list(getattr(self, f.name)) for f in fields(self)[2:])
        return System(self.count, self.held, *lists)

    def fresh(self, shape: Sequence[int], site: str, *, parameter: bool = False) -> Ids:
        """New unknowns.

        Args:
            shape: Of the array.
            site: What they are called in descriptions.
            parameter: Whether they belong to a parameter: these are solved for first.

        Returns:
            The array.
        """
        size = torch.Size(shape).numel()
        ids = torch.arange(self.count, self.count + size).reshape(tuple(shape))
        self.sites.append(site)
        self.parameters.append(parameter)
        self.starts.append(self.count)
        self.count += size
        return ids

    def zero(self, terms: Sequence[Term]) -> None:
        """State that a sum of terms is zero at every entry."""
        sets = groups(terms)
        if len(sets) == 1:
            self._rows(sets[0])
            return
        # Terms of different axes can only cancel if each set is constant.
        constants = [self.fresh((), "", parameter=True) for _ in sets]
        for members, value in zip(sets, constants, strict=True):
            dims = members[0][1].dim()
            self._rows([*members, (-_ONE, value.reshape((1,) * dims))])
        if constants:
            self._rows([(_ONE, value) for value in constants])

    def pin(self, scale: Scale) -> None:
        """State that a tensor cannot be scaled."""
        try:
            self.zero(scale.terms)
        except TooManyScalesError:  # No unknown of it moves then, which takes no equations.
            self.zeros += [ids.reshape(-1) for _, ids in scale.terms]

    def see(self, scale: Scale) -> None:
        """State that a tensor is read by an op that no positive scale changes."""
        self.seen += [ids for _, ids in scale.terms]

    def equal(self, left: Scale, right: Scale) -> None:
        """State that two tensors scale alike, entry by entry, and are of the same units."""
        dims = max(len(left.shape), len(right.shape))
        left, right = left.lifted(dims), right.lifted(dims)
        self.zero([*left.terms, *right.times(-1).terms])
        self.link(left, right)

    def link(self, left: Scale, right: Scale) -> None:
        """State that entries of two tensors belong to the same units."""
        for _, one in left.terms:
            for _, other in right.terms:
                if _axes(one) == _axes(other):
                    self.links.append((one, other))

    def tied(self, scale: Scale, axes: Sequence[int]) -> Scale:
        """State that a scale is constant along some axes.

        Args:
            scale: Of a tensor.
            axes: The axes.

        Returns:
            The scale with these axes of size one.
        """
        for axis in sorted(a % len(scale.shape) for a in axes):
            varying = [t for t in scale.terms if t[1].shape[axis] > 1]
            first = [(c, ids.narrow(axis, 0, 1)) for c, ids in varying]
            if varying:
                self.zero([*varying, *((-c, ids) for c, ids in first)])
            rest = [t for t in scale.terms if t[1].shape[axis] == 1]
            shape = (*scale.shape[:axis], 1, *scale.shape[axis + 1 :])
            scale = Scale(shape, (*rest, *first))
        return scale

    def settled(self, scale: Scale, site: str) -> Scale:
        """Name the sums in a scale: one new unknown for each, so that terms do not pile up.

        Args:
            scale: Of an activation.
            site: What the new unknowns are called.

        Returns:
            A scale with one term for every independent set of axes, in unknowns of activations.
        """
        lone = scale.single
        if not scale.terms or (lone is not None and not self._of_parameters(lone)):
            return scale
        terms: list[Term] = []
        for members in groups(scale.terms):
            shape = torch.broadcast_shapes(*(ids.shape for _, ids in members))
            named = self.fresh(shape, site)
            self._rows([*members, (-_ONE, named)])
            if lone is not None:
                self.links.append((lone, named))
            terms.append((_ONE, named))
        return Scale(scale.shape, tuple(terms))

    def shadow(self, scale: Scale, site: str) -> Scale:
        """The scale of an op's output that cannot be scaled but keeps the units of its input."""
        ids = scale.single
        if ids is None:
            return Scale(scale.shape)
        mine = self.fresh(ids.shape, site)
        self.zeros.append(mine)
        self.links.append((mine, ids))
        return Scale(scale.shape, ((_ONE, mine),))

    def _of_parameters(self, ids: Ids) -> bool:
        """Whether any of some unknowns belongs to a parameter."""
        places = torch.searchsorted(torch.tensor(self.starts), ids.unique(), right=True) - 1
        return any(self.parameters[place] for place in places.unique().tolist())

    def _rows(self, terms: Sequence[Term]) -> None:
        """State that terms, broadcast together, add up to zero entry by entry."""
        shape = torch.broadcast_shapes(*(ids.shape for _, ids in terms))
        if len(terms) > 1:
            self._demand_room(shape.numel() * len(terms))
        arrays = torch.broadcast_tensors(*(ids for _, ids in terms))
        coefficients = tuple(c for c, _ in terms)
        if len(terms) == 1:
            self.zeros.append(arrays[0].reshape(-1))
        elif len(terms) == 2 and sum(coefficients) == 0:
            self.equalities.append((arrays[0].reshape(-1), arrays[1].reshape(-1)))
        else:
            rows = torch.stack([ids.reshape(-1) for ids in arrays], 1)
            self.sums.append((rows, coefficients))

    def _demand_room(self, count: int) -> None:
        """Refuse equations that would take too much memory."""
        if count > MOST_AT_ONCE or self.held + count > MOST:
            raise TooManyScalesError(count)
        self.held += count


def _axes(ids: Ids) -> list[int]:
    """The axes on which an array varies."""
    return [axis for axis, size in enumerate(ids.shape) if size > 1]
