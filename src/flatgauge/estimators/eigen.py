"""The eigenvalues at one end of the spectrum, each with a bound on its error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from flatgauge.estimators import probes
from flatgauge.estimators.krylov import Array, Krylov
from flatgauge.estimators.matrix import Matrix, SupportsMatmul
from flatgauge.estimators.search import Search


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
            not symmetric or changes between products (dropout, batches drawn anew), and
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
    _check(matrix.size, count, tolerance, max_matvecs)
    if opposite is not None and (not 0 < opposite < 1 or count > 1 or start is not None):
        raise ValueError(
            f"`opposite={opposite!r}` is a relative error at the other end: pass a number between "
            "0 and 1 such as 0.1, with `count=1` and without `start`."
        )
    capacity = _capacity(matrix.size, count, basis)
    first = start
    if first is None:
        generator = probes.required(
            generator, caller="top_eigenvalues()", otherwise="`start=` a vector of your own"
        )
        first = probes.direction(matrix, generator)
    space = Krylov(matrix, capacity)
    space.add(first)
    search = Search(
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
        finished = search.finished()
    return _result(search, finished or search.turned)


def _result(search: Search, finished: bool) -> Eigenpairs:
    """What the search knows at its end."""
    space, wanted = search.space, slice(search.count)
    pairs = search.pairs()
    return Eigenpairs(
        values=_tensor(search.sign * pairs.values[wanted]),
        vectors=space.vectors(pairs.coefficients[:, wanted]).T,
        residuals=_tensor(pairs.residuals[wanted]),
        bounds=_tensor(pairs.bounds[wanted]),
        converged=finished and bool(pairs.within[wanted].all()),
        matvecs=space.matrix.matvecs,
        opposite=float(search.sign * pairs.values[-1]),
        opposite_residual=float(pairs.residuals[-1]),
        opposite_bound=max(search.unseen(-1.0), space.rounding),
        asymmetry=space.asymmetry,
    )


def _tensor(array: Array) -> Tensor:
    """A copy as a float64 tensor."""
    return torch.from_numpy(np.array(array))


def _check(size: int, count: int, tolerance: float, max_matvecs: int) -> None:
    """Refuse arguments out of their range."""
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


def _capacity(size: int, count: int, basis: int | None) -> int:
    """How many basis vectors to keep."""
    if basis is None:
        basis = max(2 * count + 20, 40)
    elif basis < min(size, count + 3):
        raise ValueError(
            f"`basis` is {basis!r}; a search for {count} eigenvalue(s) has to keep at least "
            f"{min(size, count + 3)} vectors."
        )
    return min(size, basis)
