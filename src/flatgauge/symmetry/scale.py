"""The log-scale of a tensor: for every entry, a sum of multiples of unknowns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

#: An array of unknowns, of as many axes as the tensor, of size one where it does not vary.
Ids = Tensor
Term = tuple[Fraction, Ids]

#: The unknown that is zero.
ZERO = 0

_ONE = Fraction(1)


@dataclass(frozen=True)
class Scale:
    """How much a tensor's entries grow: ``log scale = Σ coefficient · unknown[entry]``.

    A tensor of scale one everywhere (a pinned one) has no terms.

    Attributes:
        shape: Of the tensor.
        terms: Coefficients with arrays of unknowns, each broadcastable to the shape.
    """

    shape: tuple[int, ...]
    terms: tuple[Term, ...] = ()

    @property
    def single(self) -> Ids | None:
        """The unknowns themselves, where the scale is one array of them."""
        if len(self.terms) == 1 and self.terms[0][0] == _ONE:
            return self.terms[0][1]
        return None

    def varies(self, axis: int) -> bool:
        """Whether the scale may differ along an axis."""
        return any(ids.shape[axis] > 1 for _, ids in self.terms)

    def times(self, factor: Fraction | int) -> Scale:
        """The scale of a power."""
        terms = tuple((factor * c, ids) for c, ids in self.terms if factor)
        return Scale(self.shape, terms)

    def apply(self, shape: Sequence[int], change: Callable[[Ids], Ids]) -> Scale:
        """Change every array of unknowns as it stands, size-one axes included."""
        return Scale(tuple(shape), tuple((c, change(ids)) for c, ids in self.terms))

    def move(self, shape: Sequence[int], change: Callable[[Ids], Ids]) -> Scale:
        """Do to the entries' scales what an op does to the entries.

        Args:
            shape: Of the result.
            change: The op, on a full array.

        Returns:
            The scale of the result.
        """
        return self.apply(shape, lambda ids: squeezed(change(ids.expand(self.shape).contiguous())))

    def take(self, axis: int, index: slice) -> Scale:
        """The part of the entries in a slice along an axis."""
        size = len(range(*index.indices(self.shape[axis])))
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        where = (slice(None),) * axis + (index,)
        return self.apply(shape, lambda ids: ids[where] if ids.shape[axis] > 1 else ids)

    def lifted(self, dims: int) -> Scale:
        """The same with axes of size one in front, up to a number of axes."""
        extra = (1,) * (dims - len(self.shape))
        return self.apply((*extra, *self.shape), lambda ids: ids.reshape((*extra, *ids.shape)))


def constant(shape: Sequence[int]) -> Scale:
    """The scale of a tensor that does not change."""
    return Scale(tuple(shape))


def product(*scales: Scale) -> Scale:
    """The scale of an elementwise product, with broadcasting."""
    shape = torch.broadcast_shapes(*(scale.shape for scale in scales))
    return Scale(tuple(shape), tuple(t for s in scales for t in s.lifted(len(shape)).terms))


def squeezed(ids: Ids) -> Ids:
    """An array of unknowns with size one along every axis on which it does not vary."""
    for axis in range(ids.dim()):
        if ids.shape[axis] > 1:
            first = ids.narrow(axis, 0, 1)
            if bool((ids == first).all()):
                ids = first
    return ids.contiguous()


def slots(scales: Sequence[Scale]) -> list[tuple[Fraction, list[Ids]]]:
    """Line up the terms of several tensors, so that an op can join them term by term.

    Args:
        scales: Of the tensors.

    Returns:
        Coefficients, each with one array of unknowns per tensor; `ZERO` where a tensor has no
        such term.
    """
    joined: list[tuple[Fraction, list[Ids]]] = []
    rest = [list(scale.terms) for scale in scales]
    while any(rest):
        coefficient = next(terms[0][0] for terms in rest if terms)
        row = []
        for scale, terms in zip(scales, rest, strict=True):
            found = next((t for t in terms if t[0] == coefficient), None)
            if found is None:
                row.append(torch.full((1,) * len(scale.shape), ZERO))
            else:
                terms[:] = [t for t in terms if t is not found]
                row.append(found[1])
        joined.append((coefficient, row))
    return joined


def groups(terms: Iterable[Term]) -> list[list[Term]]:
    """Split terms into sets that vary along disjoint axes; constant ones join the first set."""
    sets: list[tuple[set[int], list[Term]]] = []
    constants: list[Term] = []
    for term in terms:
        axes = {axis for axis, size in enumerate(term[1].shape) if size > 1}
        if not axes:
            constants.append(term)
            continue
        members = [term]
        for other in [s for s in sets if s[0] & axes]:
            axes |= other[0]
            members = other[1] + members
            sets.remove(other)
        sets.append((axes, members))
    if not sets:
        return [constants] if constants else []
    sets[0][1].extend(constants)
    return [members for _, members in sets]
