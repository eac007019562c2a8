"""Terms that hang on the scales of units, one of each kind: what can vanish, where to start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.symmetry.minimum import Edges
from flatgauge.symmetry.pattern import NOTHING, Floats, Integers, Pattern

#: What an exponent must exceed not to be rounding.
_SMALL = 1e-6

#: Most steps of the least squares that bring terms to one size.
_MOST_STEPS = 200


@dataclass(frozen=True)
class Links:
    """Terms that are not zero, one of every tensor for each way to hang on the units.

    Attributes:
        rows: Their exponents, a scipy array (terms, units).
        mantissas: Of the terms, between a half and one.
        powers: Of two: whole numbers, which alone change when units are scaled by powers of two.
    """

    rows: Any
    mantissas: Floats
    powers: Floats

    def among(self, chosen: NDArray[np.bool_]) -> Links:
        """Some of them."""
        return Links(self.rows[chosen], self.mantissas[chosen], self.powers[chosen])


def links_of(layers: Sequence[Edges], count: int) -> Links:
    """Take one term of each kind.

    Args:
        layers: All terms.
        count: How many units there are.

    Returns:
        The links.
    """
    from scipy.sparse import csr_array, vstack

    rows: list[Any] = [csr_array((0, count))]
    terms = [np.zeros(0)]
    for layer in layers:
        places = np.flatnonzero(layer.terms.reshape(-1) > 0)
        ends = layer.pattern.edge()
        if ends is not None:
            heads, tails = (np.broadcast_to(end, layer.terms.shape).reshape(-1) for end in ends)
            keys = (heads[places] + 1) * (count + 1) + tails[places] + 1
            places = np.sort(places[np.unique(keys, return_index=True)[1]])
        rows.append(_rows(layer.pattern, places, count))
        terms.append(layer.terms.reshape(-1)[places])
    mantissas, powers = np.frexp(np.concatenate(terms))
    return Links(vstack(rows).tocsr(), mantissas, powers.astype(float))


def _rows(pattern: Pattern, places: Integers, count: int) -> Any:
    """The exponents of some entries of a pattern."""
    from scipy.sparse import csr_array

    indices = np.unravel_index(places, pattern.shape) if pattern.shape else ()
    total: Any = csr_array((len(places), count))
    for part in pattern.parts:
        where = [i if n > 1 else np.zeros_like(i) for i, n in zip(indices, part.shape, strict=True)]
        inner = np.ravel_multi_index(where, part.shape) if where else np.zeros_like(places)
        for units, powers in zip(part.units, part.powers, strict=True):
            full = np.flatnonzero(units[inner] != NOTHING)
            chosen = inner[full]
            total = total + csr_array(
                (powers[chosen], (full, units[chosen])), shape=(len(places), count)
            )
    return _clean(total.tocsr())


def _clean(rows: Any) -> Any:
    """Without entries that are zero."""
    rows.data[np.abs(rows.data) < _SMALL] = 0
    rows.eliminate_zeros()
    rows.sort_indices()
    return rows


def _differences(rows: Any) -> bool:
    """Whether every row is one unit, or the difference of two, times a factor."""
    lengths = np.diff(rows.indptr)
    starts = rows.indptr[:-1][lengths == 2]
    opposite = np.abs(rows.data[starts] + rows.data[starts + 1]) < _SMALL
    return bool((lengths <= 2).all() and opposite.all())


# -- what can be made to vanish ------------------------------------------------------------------


def vanishing(links: Links) -> Floats:
    """A direction along which every term that can be driven to zero alone goes there.

    A term a · exp(e · t) can vanish at no cost to the others if some direction t has e · t < 0
    for it and e · t ≤ 0 for all. Where terms lead from unit to unit, that is
    so for those between different strongly connected components of the units, inputs and outputs
    taken as one; for any other exponents a linear program tells.

    Args:
        links: The terms.

    Returns:
        One number per unit: e · t is zero for the terms that stay, and for no others; its sign
        says nothing.
    """
    count = links.rows.shape[1]
    if not links.rows.shape[0]:
        return np.zeros(count)
    return _components(links.rows) if _differences(links.rows) else _program(links.rows)


def _components(rows: Any) -> Floats:
    """By the strongly connected components of the units."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = rows.shape[1]
    ends = np.full((2, rows.shape[0]), count)  # The last node stands for inputs and outputs.
    owners = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
    for side, chosen in ((0, rows.data > 0), (1, rows.data < 0)):
        ends[side, owners[chosen]] = rows.indices[chosen]
    graph = coo_array((np.ones(rows.shape[0]), (ends[0], ends[1])), shape=(count + 1, count + 1))
    labels = connected_components(graph.tocsr(), connection="strong")[1]
    pieces = connected_components(graph.tocsr(), connection="weak")[1]
    # A piece apart from inputs and outputs moves relative to one of its own units.
    origins = np.full(pieces.max() + 1, count + 1)
    np.minimum.at(origins, pieces, labels)
    origins[pieces[count]] = labels[count]
    direction: Floats = (labels - origins[pieces])[:count].astype(float)
    return direction


def _program(rows: Any) -> Floats:
    """By the linear program: as many terms as possible fall by at least one, none rises."""
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, hstack

    terms, count = rows.shape
    found = linprog(
        np.append(np.zeros(count), -np.ones(terms)),
        A_ub=hstack([rows, eye_array(terms)]).tocsr(),
        b_ub=np.zeros(terms),
        bounds=[(None, None)] * count + [(0, 1)] * terms,
    )
    if found.x is None or not found.success:
        raise RuntimeError(
            f"which second derivatives rescaling drives to zero was not found: {found.message}"
        )
    direction: Floats = np.where(np.abs(found.x[:count]) < _SMALL, 0.0, found.x[:count])
    return direction


# -- where to start ------------------------------------------------------------------------------


def level(links: Links) -> tuple[Floats, NDArray[np.bool_]]:
    """Scales that bring the terms to about one size, the same whatever scales they come with.

    As many terms as there are units, always the same ones, are first brought to the same
    power of two. This is exact: units that were scaled by powers of two before are
    scaled back, and from here on every bit is the same. Least squares on logarithms then
    bring all terms to one size, as nearly as whole powers of two do.

    Args:
        links: The terms that stay.

    Returns:
        Logarithms to base two, one per unit, and the units whose scale changes no term once the
        others are given.
    """
    from scipy.sparse.linalg import lsqr

    logs, fixed = _solved(links)
    if links.rows.shape[0]:
        sizes = links.powers + 2 * (links.rows @ logs) + np.log2(links.mantissas)
        logs = logs + np.rint(lsqr(2 * links.rows, -sizes, iter_lim=_MOST_STEPS)[0])
    return logs, fixed


def _solved(links: Links) -> tuple[Floats, NDArray[np.bool_]]:
    """Logarithms at which as many terms as possible have the power zero."""
    rows, count = links.rows, links.rows.shape[1]
    logs, known, fixed = np.zeros(count), np.zeros(count, bool), np.zeros(count, bool)
    while True:
        open_ = _clean((rows * (~known)[None, :].astype(float)).tocsr())
        lengths = np.diff(open_.indptr)
        ready = np.flatnonzero(lengths == 1)
        if len(ready):
            units, first = np.unique(open_.indices[open_.indptr[ready]], return_index=True)
            chosen = ready[first]
            rest = links.powers[chosen] / 2 + rows[chosen] @ logs
            logs[units] = -rest / open_.data[open_.indptr[chosen]]
            known[units] = True
            continue
        left = np.flatnonzero(lengths)
        if not len(left):
            return logs, fixed
        if _differences(open_):  # A group of units that only hang on each other.
            fixed[open_.indices[0]] = known[open_.indices[0]] = True
            continue
        right = -(links.powers[left] / 2 + rows[left] @ logs)
        fixed[open_.indices] = True
        for unit, value in _eliminated(open_[left], right).items():
            fixed[unit], logs[unit] = False, value
        return logs, fixed


def _eliminated(rows: Any, right: Floats) -> dict[int, float]:
    """Solve equations in fractions: the units solved for, and their values if others are zero."""
    solved: dict[int, tuple[dict[int, Fraction], Fraction]] = {}
    unknown = len(np.unique(rows.indices))
    for start, end, value in zip(rows.indptr[:-1], rows.indptr[1:], right, strict=True):
        equation: dict[int, Fraction] = {}
        rest = Fraction(float(value))
        for index, power in zip(rows.indices[start:end], rows.data[start:end], strict=True):
            coefficient = Fraction(float(power)).limit_denominator(10**6)
            others, shift = solved.get(int(index), ({int(index): Fraction(1)}, Fraction(0)))
            rest -= coefficient * shift
            _add(equation, others, coefficient)
        if not equation:
            continue
        pivot = min(equation)
        scale = equation.pop(pivot)
        expression, shift = {i: -c / scale for i, c in equation.items()}, rest / scale
        for unit, (others, before) in solved.items():
            share = others.pop(pivot, Fraction(0))
            _add(others, expression, share)
            solved[unit] = others, before + share * shift
        solved[pivot] = expression, shift
        if len(solved) == unknown:
            break  # All others follow.
    return {unit: float(shift) for unit, (_, shift) in solved.items()}


def _add(total: dict[int, Fraction], others: dict[int, Fraction], factor: Fraction) -> None:
    """Add a multiple of one expression to another."""
    for index, coefficient in others.items():
        new = total.get(index, Fraction(0)) + factor * coefficient
        if new:
            total[index] = new
        else:
            total.pop(index, None)
