"""The search behind `top_eigenvalues`: where to extend the basis next, and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Generator

from flatgauge.estimators import probes
from flatgauge.estimators.krylov import Array, Krylov, Ritz
from flatgauge.estimators.unseen import unseen

MISS = 0.01
"""Accepted chance that a second look overlooks an eigenvalue."""
NEAR = 0.05
"""How far above the largest value another one may be hidden, relative to it; less where the
tolerance is small."""
_TOLERANCES = 50.0  # ... than this many times


class Pairs(NamedTuple):
    """Ritz pairs ordered from the wanted end, values signed so that larger is wanted.

    Attributes:
        values: Signed values, falling.
        coefficients: The vectors in terms of the basis, one per column.
        residuals: Their residuals.
        bounds: The residuals, or rounding where that is more.
        within: Whether a bound is within the tolerance.
        settled: Whether a bound is within the tolerance or as small as rounding lets it be.
    """

    values: Array
    coefficients: Array
    residuals: Array
    bounds: Array
    within: npt.NDArray[np.bool_]
    settled: npt.NDArray[np.bool_]


@dataclass
class _Look:
    """A sequence from a fresh random direction, in search of what the basis cannot see.

    Attributes:
        first: Where its vectors begin in the basis.
        pending: Where its directions begin among the pending ones.
        steps: Its products so far.
    """

    first: int
    pending: int
    steps: int = 0


class Search:
    """State of one search for the values at one end.

    Attributes:
        space: The basis, with a first direction pending.
        count: How many values are wanted.
        sign: 1 for the largest, -1 for the smallest.
        turned: Whether the wanted values are found, and the other end is searched for.
    """

    def __init__(
        self,
        space: Krylov,
        *,
        count: int,
        sign: float,
        tolerance: float,
        opposite: float | None,
        given: bool,
        generator: Generator,
    ) -> None:
        self.space = space
        self.count = count
        self.sign = sign
        self._tolerance = tolerance
        self._opposite = opposite
        self.turned = False
        self._given = given
        self._generator = generator
        self._doubt = count > 1  # whether one sequence may have missed wanted values
        self._look: _Look | None = None
        self._confirmed: Array | None = None  # wanted values that a look has confirmed

    def advance(self) -> None:
        """Make one product."""
        if self.space.size == self.space.capacity:
            self._restart()
        if not self.space.pending:
            self._add_direction()
        self.space.extend(self._pick())
        if self._look:
            self._look.steps += 1
        if not self.space.pending and self._given:
            self._doubt = True  # the given start lies in a closed space, maybe a small one

    def finished(self) -> bool:
        """Whether no further product is needed; begins a second look where one is due."""
        if self.space.size == self.space.matrix.size:
            return True
        if self.space.size < self.count:
            return False
        pairs = self.pairs()
        if self._look and not self._look_is_over(self._look, pairs):
            return False
        self.turned = False
        if not pairs.settled[: self.count].all():
            return False
        if self.count == 1 and self._may_be_hidden(pairs):
            return False
        if not self._doubt or self._is_confirmed(pairs):
            self.turned = not self._opposite_is_known(pairs)
            return not self.turned
        before = len(self.space.pending)
        if self._add_direction():
            self._look = _Look(first=self.space.size, pending=before)
        return False

    def pairs(self) -> Pairs:
        """What is known of the whole spectrum."""
        return self._ordered(self.space.ritz())

    def unseen(self, sign: float) -> float:
        """How far beyond an end of what is seen an eigenvalue may lie; see `unseen`.

        Args:
            sign: 1 for the wanted end, -1 for the other one.

        Returns:
            The distance; infinite where the start was given: it says nothing of what it lacks.
        """
        if self.space.size == self.space.matrix.size:
            return 0.0
        return math.inf if self._given else unseen(self.space, sign * self.sign)

    def _ordered(self, ritz: Ritz) -> Pairs:
        """Pairs from the wanted end, judged against the tolerance."""
        order = np.argsort(-self.sign * ritz.values, kind="stable")
        values, residuals = self.sign * ritz.values[order], ritz.residuals[order]
        # Not the sharper residual² / gap: it supposes that no unseen eigenvalue lies in the
        # gap, and on 10, 9.5, 8, 4, ... a quarter of all starts then end with a value that is
        # off by up to 5 %, to save two products in ten.
        bounds = np.maximum(residuals, self.space.rounding)
        sizes = np.abs(values)
        zero = sizes + bounds <= self._tolerance * sizes.max(initial=0.0)
        within = (bounds <= self._tolerance * sizes) | zero
        settled = within | (bounds <= self.space.rounding)
        return Pairs(values, ritz.coefficients[:, order], residuals, bounds, within, settled)

    def _add_direction(self) -> bool:
        """Make a random direction pending; False if the space has no room for one."""
        return self.space.add(probes.direction(self.space.matrix, self._generator))

    def _pick(self) -> int:
        """The pending direction to multiply: the one that the wanted pairs lack most."""
        if self._look or len(self.space.pending) == 1 or self.space.size < self.count:
            return -1
        pairs = self.pairs()
        wanted = pairs.coefficients[:, : self.count]
        unsettled = wanted[:, ~pairs.settled[: self.count]]
        lacking = (self.space.outside(unsettled) ** 2).sum(axis=1)
        return int(lacking.argmax()) if lacking.any() else -1

    def _may_be_hidden(self, pairs: Pairs) -> bool:
        """Whether an eigenvalue well above the wanted one may still be hidden from the start."""
        value, bound = abs(pairs.values[0]), pairs.bounds[0]
        if self._given or bound <= self.space.rounding:
            return False
        if bound > self._tolerance * value:  # Zero on the matrix's scale, as far as is seen.
            return self.unseen(1.0) > self._tolerance * float(np.abs(pairs.values).max())
        return self.unseen(1.0) > min(NEAR, _TOLERANCES * self._tolerance) * float(value)

    def _opposite_is_known(self, pairs: Pairs) -> bool:
        """Whether the other end is known as well as was asked for, or not asked for."""
        if self._opposite is None:
            return True
        value, beyond = abs(pairs.values[-1]), self.unseen(-1.0)
        zero = value + beyond <= self._tolerance * np.abs(pairs.values).max()
        return bool(zero or beyond <= max(self._opposite * value, self.space.rounding))

    def _restart(self) -> None:
        """Make room: keep the wanted pairs, the opposite end, and some next to one of them."""
        size, look = self.space.size, self._look
        head = slice(look.first if look else size)
        spare = 0 if look else (self.space.capacity - self.count - 1) // 2
        pairs = self._ordered(self.space.ritz(head))
        count = len(pairs.values)
        first, last = (0, spare + 1) if self.turned else (spare, 1)
        ends = np.unique(np.r_[: self.count + first, count - last : count].clip(0, count - 1))
        kept = pairs.coefficients[:, ends]
        if look:
            tail = self._ordered(self.space.ritz(slice(look.first, size))).coefficients
            tail = tail[:, : max(1, tail.shape[1] // 2)]
            look.first = kept.shape[1]
            from scipy.linalg import block_diag  # slow to import

            kept = block_diag(kept, tail)
        self.space.compress(kept, self.sign * np.delete(pairs.values, ends))

    def _is_confirmed(self, pairs: Pairs) -> bool:
        """Whether a look has confirmed the wanted values as they are now."""
        if self._confirmed is None:
            return False
        values = pairs.values[: self.count]
        allowed = np.maximum(pairs.bounds[: self.count], self._tolerance * np.abs(values))
        return bool((np.abs(values - self._confirmed) <= allowed).all())

    def _look_is_over(self, look: _Look, pairs: Pairs) -> bool:
        """Whether the look has found something, or has looked long enough to find nothing."""
        block = slice(look.first, self.space.size)
        own = self._ordered(self.space.ritz(block, slice(look.pending, None)))
        if not own.values.size:
            return False
        last, best = pairs.values[self.count - 1], own.values[0]
        allowed = max(pairs.bounds[self.count - 1], self._tolerance * abs(last))
        if best > last + allowed:
            self._look = None
            return True
        chance = chance_of_missing(
            last, best, float(pairs.values[-1]), steps=look.steps, size=self.space.matrix.size
        )
        if chance > MISS and not own.settled[0]:
            return False
        self._confirmed = pairs.values[: self.count].copy()
        self._look = None
        return True


def chance_of_missing(last: float, best: float, opposite: float, *, steps: int, size: int) -> float:
    r"""Chance that a Krylov space from a random start shows nothing of an eigenvalue there is.

    Definition:
        If the largest eigenvalue were :math:`\lambda`, the largest Ritz value after :math:`s`
        steps would fall short of it by more than :math:`\varepsilon` of the width of the
        spectrum with chance at most

        .. math:: 1.648 \sqrt{p}\, e^{-\sqrt{\varepsilon}\,(2 s - 1)}.

    Reference:
        [kuczynski1992estimating]

    Args:
        last: The eigenvalue that may have been missed, or one below it.
        best: Largest Ritz value seen.
        opposite: Other end of the spectrum.
        steps: Products made from the random start.
        size: Size of the matrix.

    Returns:
        An upper bound on the chance, at most 1.
    """
    width = last - opposite
    short = max(last - best, 0.0) / width if width > 0 else 0.0
    bound = 1.648 * math.sqrt(size) * math.exp(-math.sqrt(short) * (2 * steps - 1))
    return min(bound, 1.0)
