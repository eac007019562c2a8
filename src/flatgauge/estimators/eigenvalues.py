"""The eigenvalues at one end of the spectrum, each with a bound on its error.

`top_eigenvalues` takes a matrix and returns `Eigenpairs`. An `EigenvalueSearch` extends a Krylov
basis until the wanted values are known and a random start is unlikely to have missed another one.
`power_method` is the search that the literature uses, for comparison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor

from flatgauge.estimators.lanczos import Array, KrylovBasis, Ritz, unseen_distance
from flatgauge.estimators.linalg import (
    Matrix,
    SupportsMatmul,
    random_direction,
    require_generator,
    to_float64,
)

#: Accepted chance that a second look overlooks an eigenvalue.
MISS = 0.01

#: How far above the largest value another one may be hidden, relative to it; less where that is
#: more than this many tolerances.
NEAR, _TOLERANCES = 0.05, 50.0


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues from one end of the spectrum, how far off they may be, and their cost.

    Attributes:
        values: From the asked end inwards, ``(k,)``, float64.
        vectors: One unit eigenvector per column, ``(p, k)``.
        residuals: Lengths of ``A x - value x``, ``(k,)``: an eigenvalue lies that near.
        bounds: Bounds on the errors of the values, ``(k,)``; see `top_eigenvalues`.
        converged: Whether every bound met the tolerance.
        matvecs: Matrix-vector products spent.
        opposite: Value at the other end of the spectrum, as far as it was seen on the way: the
            true end lies at or beyond it.
        opposite_residual: Length of the residual at the other end: an eigenvalue lies that near.
        opposite_bound: How far beyond ``opposite`` the true end lies at most; further with a
            chance of 1 in 2,000 over random starts, or less. Infinite if that is not known.
        asymmetry: Largest difference seen between ``u·Av`` and ``v·Au`` for unit vectors,
            relative to the largest value. Well above rounding, it says that the operator is
            not symmetric or changes between products (dropout, batches drawn again), and
            the values mean little.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    bounds: Tensor
    converged: bool
    matvecs: int
    opposite: float
    opposite_residual: float
    opposite_bound: float
    asymmetry: float = 0.0


def top_eigenvalues(
    operator: SupportsMatmul,
    *,
    count: int = 1,
    which: str = "largest",
    tolerance: float = 1e-3,
    max_matvecs: int = 300,
    basis: int | None = None,
    opposite: float | None = None,
    start: Tensor | None = None,
    generator: Generator | None = None,
) -> Eigenpairs:
    r"""Largest (or smallest) eigenvalues of a symmetric matrix, by sign, not by size.

    Definition:
        Values are Ritz values of a Krylov space (Lanczos, fully reorthogonalised, thick
        restart), checked after every product. The bound on the error of a value is its
        residual :math:`\|A x - \theta x\|`, or rounding where that is more. Search stops when
        every bound is within ``tolerance`` of its value; also where value and bound together
        are within ``tolerance`` of the largest value in size (zero, on the matrix's scale),
        and where rounding lets nothing more be gained (then ``converged`` is False). The
        true error is mostly far smaller, about the squared residual over the gap.

    Limits:
        Some eigenvalue lies within each bound, for sure. That it is the one asked for is a
        matter of chance, as a random start may have next to nothing of an eigenvector. One
        value from a random start: search goes on until an eigenvalue more than 5 % further out
        (50 tolerances, if that is less) would have been missed by 1 start in 2,000 at most,
        whatever the matrix. Nearer ones are missed more often: the bound then holds for
        another eigenvalue, and the value is off by less than 5 %. What is
        orthogonal to ``start`` cannot be seen from it; once the space spanned from ``start``
        closes, search goes on from a random direction. One start shows each repeated
        eigenvalue once, so with ``count > 1`` a further random direction looks for more,
        until it has settled itself or missing one has a chance below 1 %.

    Cost:
        6 to 10 products for one value that stands out, at the default tolerance; about ten
        more for ``count > 1``; with ``opposite``, five to ten times as many near a minimum,
        where the other end of the spectrum is close to zero. Memory for ``basis`` vectors and
        a few more.

    Reference:
        [wu2000thick] [kuczynski1992estimating] [vandorsselaer2000computing]

    Args:
        operator: Symmetric matrix with ``shape`` and ``@``.
        count: How many values.
        which: ``"largest"`` or ``"smallest"``: the most positive or the most negative end.
        tolerance: Error allowed, relative to each value.
        max_matvecs: Most products to spend.
        basis: Most basis vectors to keep; by default 40, or ``2 * count + 20`` if that is more.
        opposite: Error allowed at the other end, relative to the value there; None not to
            search for it: ``opposite_bound`` then says how far it was seen on the way. Only for
            ``count=1`` and a random start.
        start: First direction, ``(p,)``; random by default.
        generator: Source of randomness, required without ``start``. With ``start`` alone, a
            direction needed later comes from a generator seeded with 0.

    Returns:
        Values, vectors and error bounds.

    Raises:
        ValueError: If an argument is out of its range, or neither ``start`` nor ``generator``
            is given.

    Example:
        >>> matrix = torch.diag(torch.tensor([-9.0, 1.0, 2.0, 5.0]))
        >>> pairs = top_eigenvalues(matrix, generator=Generator().manual_seed(0))
        >>> round(pairs.values.item(), 4), round(pairs.opposite, 4), pairs.converged
        (5.0, -9.0, True)
    """
    matrix = Matrix(operator)
    if which not in ("largest", "smallest"):
        raise ValueError(f'`which` is {which!r}; pass "largest" or "smallest".')
    capacity = _capacity(matrix.size, count, basis, tolerance, max_matvecs)
    if opposite is not None and (not 0 < opposite < 1 or count > 1 or start is not None):
        raise ValueError(
            f"`opposite={opposite!r}` is a relative error at the other end: pass a number between "
            "0 and 1 such as 0.1, with `count=1` and without `start`."
        )
    first = start
    if first is None:
        generator = require_generator(
            generator, caller="top_eigenvalues()", otherwise="`start=` a vector of your own"
        )
        first = random_direction(matrix, generator)
    space = KrylovBasis(matrix, capacity)
    space.add(first)
    search = EigenvalueSearch(
        space,
        count=count,
        sign=1.0 if which == "largest" else -1.0,
        tolerance=tolerance,
        opposite=opposite,
        given=start is not None,
        generator=generator or Generator().manual_seed(0),
    )
    finished = False
    while not finished and matrix.matvecs < max_matvecs:
        search.advance()
        finished = search.is_finished()
    wanted, pairs = slice(count), search.pairs()
    converged = (finished or search.turned) and bool(pairs.within[wanted].all())
    return Eigenpairs(
        values=torch.tensor(search.sign * pairs.values[wanted]),
        vectors=space.vectors(pairs.coefficients[:, wanted]).T,
        residuals=torch.tensor(pairs.residuals[wanted]),
        bounds=torch.tensor(pairs.bounds[wanted]),
        converged=converged,
        matvecs=matrix.matvecs,
        opposite=float(search.sign * pairs.values[-1]),
        opposite_residual=float(pairs.residuals[-1]),
        opposite_bound=max(search.unseen_reach(-1.0), space.rounding),
        asymmetry=space.asymmetry,
    )


def _capacity(size: int, count: int, basis: int | None, tolerance: float, max_matvecs: int) -> int:
    """How many basis vectors to keep; refuse arguments out of their range."""
    if not 1 <= count <= size:
        raise ValueError(
            f"`count` is {count!r}; the matrix has {size} eigenvalues, ask for 1 to {size}."
        )
    if not 0 < tolerance < 1:
        raise ValueError(
            f"`tolerance` is {tolerance!r}; it is a relative error, pass a number between 0 "
            "and 1 such as 1e-3."
        )
    if max_matvecs < count:
        raise ValueError(
            f"`max_matvecs` is {max_matvecs!r}; {count} eigenvalue(s) need at least as many "
            f"products, pass `max_matvecs={count}` or more."
        )
    least = min(size, count + 3)
    if basis is not None and basis < least:
        raise ValueError(
            f"`basis` is {basis!r}; a search for {count} eigenvalue(s) has to keep at least "
            f"{least} vectors."
        )
    return min(size, max(2 * count + 20, 40) if basis is None else basis)


class SearchPairs(NamedTuple):
    """Ritz pairs ordered from the wanted end, values signed so that larger is wanted."""

    values: Array  # Signed values, falling.
    coefficients: Array  # The vectors in terms of the basis, one per column.
    residuals: Array  # Their residuals.
    bounds: Array  # The residuals, or rounding where that is more.
    within: npt.NDArray[np.bool_]  # Whether a bound is within the tolerance.
    # Whether a bound is within the tolerance or as small as rounding lets it be.
    settled: npt.NDArray[np.bool_]


@dataclass
class _Look:
    """A sequence from a fresh random direction, in search of what the basis cannot see."""

    first: int  # Where its vectors begin in the basis.
    pending: int  # Where its directions begin among the pending ones.
    steps: int = 0  # Its products up to now.


@dataclass
class EigenvalueSearch:
    """State of one search for the values at one end."""

    space: KrylovBasis  # The basis, with a first direction pending.
    count: int  # How many values are wanted.
    sign: float  # 1 for the largest, -1 for the smallest.
    tolerance: float  # Error allowed, relative to each value.
    # Error allowed at the other end, relative to the value there; None for any.
    opposite: float | None
    given: bool  # Whether the start was given, not random.
    generator: Generator
    turned: bool = False  # Whether the wanted values are found, and the other end is searched for.
    _doubt: bool = False  # Whether one sequence may have missed wanted values.
    _look: _Look | None = None
    _confirmed: Array | None = None  # Wanted values that a look has confirmed.

    def advance(self) -> None:
        """Make one product."""
        if self.space.size == self.space.capacity:
            self._restart()
        if not self.space.pending:
            self.space.add(random_direction(self.space.matrix, self.generator))
        self.space.extend(self._pick())
        if self._look:
            self._look.steps += 1
        if not self.space.pending and self.given:
            self._doubt = True  # the given start lies in a closed space, maybe a small one

    def is_finished(self) -> bool:
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
        if not (self._doubt or self.count > 1) or self._is_confirmed(pairs):
            self.turned = not self._opposite_is_known(pairs)
            return not self.turned
        before = len(self.space.pending)
        if self.space.add(random_direction(self.space.matrix, self.generator)):
            self._look = _Look(first=self.space.size, pending=before)
        return False

    def pairs(self) -> SearchPairs:
        """What is known of the whole spectrum."""
        return self._order_pairs(self.space.ritz())

    def unseen_reach(self, sign: float) -> float:
        """How far beyond the wanted end (1) or the other (-1) an eigenvalue may lie unseen."""
        # Infinite where the start was given: that says nothing of what it lacks.
        if self.space.size == self.space.matrix.size:
            return 0.0
        return math.inf if self.given else unseen_distance(self.space, sign * self.sign)

    def _order_pairs(self, ritz: Ritz) -> SearchPairs:
        """Pairs from the wanted end, judged against the tolerance."""
        order = np.argsort(-self.sign * ritz.values, kind="stable")
        values, residuals = self.sign * ritz.values[order], ritz.residuals[order]
        # Not the sharper residual² / gap: it supposes that no unseen eigenvalue lies in the
        # gap, and on 10, 9.5, 8, 4, ... a quarter of all starts then end with a value that is
        # off by up to 5 %, to save two products in ten.
        bounds = np.maximum(residuals, self.space.rounding)
        sizes = np.abs(values)
        zero = sizes + bounds <= self.tolerance * sizes.max(initial=0.0)
        within = (bounds <= self.tolerance * sizes) | zero
        settled = within | (bounds <= self.space.rounding)
        return SearchPairs(values, ritz.coefficients[:, order], residuals, bounds, within, settled)

    def _pick(self) -> int:
        """The pending direction to multiply: the one that the wanted pairs lack most."""
        if self._look or len(self.space.pending) == 1 or self.space.size < self.count:
            return -1
        pairs = self.pairs()
        wanted = pairs.coefficients[:, : self.count]
        unsettled = wanted[:, ~pairs.settled[: self.count]]
        lacking = (self.space.outside(unsettled) ** 2).sum(axis=1)
        return int(lacking.argmax()) if lacking.any() else -1

    def _may_be_hidden(self, pairs: SearchPairs) -> bool:
        """Whether an eigenvalue well above the wanted one may still be hidden from the start."""
        value, bound = abs(pairs.values[0]), pairs.bounds[0]
        if self.given or bound <= self.space.rounding:
            return False
        if bound > self.tolerance * value:  # Zero on the matrix's scale, as far as is seen.
            return self.unseen_reach(1.0) > self.tolerance * float(np.abs(pairs.values).max())
        return self.unseen_reach(1.0) > min(NEAR, _TOLERANCES * self.tolerance) * float(value)

    def _opposite_is_known(self, pairs: SearchPairs) -> bool:
        """Whether the other end is known as well as was asked for, or not asked for."""
        if self.opposite is None:
            return True
        value, beyond = abs(pairs.values[-1]), self.unseen_reach(-1.0)
        zero = value + beyond <= self.tolerance * np.abs(pairs.values).max()
        return bool(zero or beyond <= max(self.opposite * value, self.space.rounding))

    def _restart(self) -> None:
        """Make room: keep the wanted pairs, the opposite end, and some next to one of them."""
        size, look = self.space.size, self._look
        head = slice(look.first if look else size)
        spare = 0 if look else (self.space.capacity - self.count - 1) // 2
        pairs = self._order_pairs(self.space.ritz(head))
        count = len(pairs.values)
        first, last = (0, spare + 1) if self.turned else (spare, 1)
        ends = np.unique(np.r_[: self.count + first, count - last : count].clip(0, count - 1))
        kept = pairs.coefficients[:, ends]
        if look:
            tail = self._order_pairs(self.space.ritz(slice(look.first, size))).coefficients
            tail = tail[:, : max(1, tail.shape[1] // 2)]
            look.first = kept.shape[1]
            from scipy.linalg import block_diag  # slow to import

            kept = block_diag(kept, tail)
        self.space.compress(kept, self.sign * np.delete(pairs.values, ends))

    def _is_confirmed(self, pairs: SearchPairs) -> bool:
        """Whether a look has confirmed the wanted values as they are now."""
        if self._confirmed is None:
            return False
        values = pairs.values[: self.count]
        allowed = np.maximum(pairs.bounds[: self.count], self.tolerance * np.abs(values))
        return bool((np.abs(values - self._confirmed) <= allowed).all())

    def _look_is_over(self, look: _Look, pairs: SearchPairs) -> bool:
        """Whether the look has found something, or has looked long enough to find nothing."""
        block = slice(look.first, self.space.size)
        own = self._order_pairs(self.space.ritz(block, slice(look.pending, None)))
        if not own.values.size:
            return False
        last, best = pairs.values[self.count - 1], own.values[0]
        allowed = max(pairs.bounds[self.count - 1], self.tolerance * abs(last))
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

        The spectrum reaches from ``opposite`` to ``last``, the eigenvalue that may have been
        missed or one below it; ``best`` is the largest Ritz value seen.

    Reference:
        [kuczynski1992estimating]

    Returns:
        An upper bound on the chance, at most 1.
    """
    width = last - opposite
    short = max(last - best, 0.0) / width if width > 0 else 0.0
    bound = 1.648 * math.sqrt(size) * math.exp(-math.sqrt(short) * (2 * steps - 1))
    return min(bound, 1.0)


@dataclass(frozen=True)
class PowerResult:
    """How a power method ended."""

    value: float  # The Rayleigh quotient of the last vector.
    vector: Tensor
    residual: float  # Length of ``A v - value v``: an eigenvalue lies that near.
    change: float  # How far the unit vector moved in the last step; near 2 if it changes sign.
    converged: bool  # Whether that was within the tolerance.
    # Whether the eigenvalue of largest size is negative, so that the vector changes its sign at
    # every step and never settles.
    negative: bool
    matvecs: int


def power_method(
    operator: SupportsMatmul,
    *,
    tolerance: float = 1e-6,
    max_matvecs: int = 1000,
    generator: Generator | None = None,
) -> PowerResult:
    """Multiply a random vector again and again, until its direction settles.

    Stopping:
        When the unit vector moves by no more than ``tolerance`` in a step: the rule of the
        literature, no bound on the error (the residual is one). Where the eigenvalue of largest
        size is negative, the vector changes its sign at every step; that is detected, and the run
        ends without having converged.

    Reference:
        [rangamani2019scale], Algorithm 1.

    Returns:
        How it ended.

    Raises:
        ValueError: If an argument is out of its range, or the generator is missing.

    Example:
        >>> import torch
        >>> source = Generator().manual_seed(0)
        >>> run = power_method(torch.diag(torch.tensor([1.0, 3.0])), generator=source)
        >>> round(run.value, 6), run.converged
        (3.0, True)
    """
    matrix = Matrix(operator)
    if not 0 < tolerance < 1 or max_matvecs < 1:
        raise ValueError(
            f"`tolerance={tolerance!r}` must lie between 0 and 1 and `max_matvecs={max_matvecs!r}` "
            "must be at least 1."
        )
    source = require_generator(
        generator, caller="power_method(operator)", otherwise="use `top_eigenvalues(start=...)`"
    )
    vector = _unit(random_direction(matrix, source))
    while True:
        image = (matrix @ vector[:, None])[:, 0]
        value = float((to_float64(vector) * to_float64(image)).sum())
        residual = float((to_float64(image) - value * to_float64(vector)).norm())
        following = _unit(image)
        change, flip = (
            float((to_float64(following) + s * to_float64(vector)).norm()) for s in (-1.0, 1.0)
        )
        negative = flip <= tolerance and value < 0
        converged = change <= tolerance or not float(image.norm()) > 0
        if converged or negative or matrix.matvecs >= max_matvecs:
            return PowerResult(value, vector, residual, change, converged, negative, matrix.matvecs)
        vector = following


def _unit(vector: Tensor) -> Tensor:
    """The vector divided by its length; zeros stay zeros."""
    length = to_float64(vector).norm()
    return vector if not float(length) > 0 else (to_float64(vector) / length).to(vector.dtype)
