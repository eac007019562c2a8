"""An orthonormal Krylov basis, grown one product at a time, and what the matrix does to it.

A `Matrix` and a start vector come in; Ritz values with their residuals leave. `unseen_distance`
bounds how far beyond them an eigenvalue may lie that the start has nothing of.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatgauge.estimators.linalg import PIECE, Matrix, SupportsMatmul, to_float64, vector_norm

Array = npt.NDArray[np.float64]

#: Error of a product, in units of the dtype's epsilon times the matrix's norm.
ROUNDING = 8.0

#: Chance with which an eigenvalue may lie further out than `unseen_distance` says.
CHANCE = 1 / 2000

#: Halvings of the interval in which that distance is searched: to the last digits.
_HALVINGS = 60


class Ritz(NamedTuple):
    """Eigenpairs of the matrix as seen from inside a basis."""

    values: Array  # In rising order, ``(m,)``.
    coefficients: Array  # The vectors in terms of the basis, one per column, ``(m, m)``.
    residuals: Array  # Lengths of ``A x - value x``, ``(m,)``: some eigenvalue lies that near.


class KrylovBasis:
    r"""Basis :math:`V`, pending directions :math:`P`, and the matrix's action on the basis.

    Definition:
        .. math:: A V = V H + P C

        holds up to rounding, with all columns of :math:`V` and :math:`P` orthonormal.
        `extend` multiplies one pending direction, moves it into the basis and makes what is
        new in the product pending in its place: with one pending direction this is the
        Lanczos process. Nothing is assumed of :math:`H`: it holds the measured inner
        products, so that a matrix which is not quite symmetric, or which changes between
        products, shows up in the residuals instead of hiding in them.

    Cost:
        One product and ``4 (m + 1) p`` multiplications per extension (orthogonalised twice
        against all). Memory for ``capacity + len(pending)`` vectors.
    """

    def __init__(self, matrix: Matrix, capacity: int) -> None:
        self.matrix = matrix
        self.capacity = capacity  # Most basis vectors held.
        self.size = 0  # Basis vectors held.
        self.pending: list[Tensor] = []  # The columns of P, oldest first.
        self.scale = 0.0  # Longest product seen, a lower estimate of the matrix's norm.
        self.starts = 0  # How many directions were added from outside.
        self.lengths: list[float] = []  # Of what was left of every product outside the basis.
        self.left_out: list[float] = []  # Ritz values whose vectors restarts have dropped.
        self._basis = torch.empty(  # one vector per row
            capacity, matrix.size, dtype=matrix.dtype, device=matrix.device
        )
        self._within = np.zeros((capacity, capacity))  # H
        self._beyond = np.zeros((0, capacity))  # C

    @property
    def rounding(self) -> float:
        """Size below which a number obtained from products is rounding."""
        return ROUNDING * torch.finfo(self.matrix.dtype).eps * self.scale

    @property
    def complete(self) -> bool:
        """Whether basis and pending directions together fill the whole space."""
        return self.size + len(self.pending) >= self.matrix.size

    @property
    def asymmetry(self) -> float:
        """Largest difference between ``u·Av`` and ``v·Au``, relative to the largest value."""
        known = self._within[: self.size, : self.size]
        largest = float(np.abs(self.ritz().values).max(initial=0.0))
        return float(np.abs(known - known.T).max(initial=0.0)) / largest if largest else 0.0

    def add(self, direction: Tensor) -> bool:
        """Make a fresh direction pending, less what is known of it; False if there is no room."""
        if self.complete:
            return False
        size = (self.matrix.size,)
        direction = direction.detach().to(self._basis)
        length = vector_norm(direction) if direction.shape == size else math.nan
        if not 0 < length < math.inf:
            raise ValueError(
                f"a start vector of shape {tuple(direction.shape)} and length {length:.3g} "
                f"gives no direction; a finite vector of shape {size} that is not zero is "
                "needed."
            )
        fresh, _, _ = self._split(direction / length)
        self._append(fresh, vector_norm(fresh), np.zeros(self.capacity))
        self.starts += 1
        return True

    def extend(self, pick: int = -1) -> None:
        """Multiply a pending direction (by default the newest) and take it into the basis."""
        # Where the product brings nothing new, the basis spans an invariant space, and no direction
        # becomes pending in its place.
        last = self.size
        self._basis[last] = direction = self.pending.pop(pick)
        self._within[last, :last] = self._beyond[pick, :last]
        self._beyond = np.delete(self._beyond, pick, axis=0)
        self.size += 1
        image = self.matrix @ direction
        self.scale = max(self.scale, vector_norm(image))
        fresh, within, beyond = self._split(image)
        self._within[: self.size, last] = within
        self._beyond[:, last] = beyond
        length = vector_norm(fresh)
        if length > self.rounding and not self.complete:
            row = np.zeros(self.capacity)
            row[last] = length
            self._append(fresh, length, row)
            self.lengths.append(length)

    def ritz(self, block: slice = slice(None), pending: slice = slice(None)) -> Ritz:
        """Ritz pairs of a block of the basis, by rising value; only `pending` counts as outside."""
        chosen = np.arange(self.size)[block]
        within = self._within[np.ix_(chosen, chosen)]
        symmetric = (within + within.T) / 2
        values, coefficients = _scaled_eigh(symmetric)
        outside = self._beyond[pending][:, chosen] @ coefficients
        inside = (within - symmetric) @ coefficients
        residuals = np.sqrt((outside**2).sum(axis=0) + (inside**2).sum(axis=0))
        return Ritz(values, coefficients, residuals)

    def outside(self, coefficients: Array) -> Array:
        """Components of the products of basis combinations along the pending directions."""
        return self._beyond[:, : self.size] @ coefficients

    def vectors(self, coefficients: Array) -> Tensor:
        """Combine the basis with the columns of ``coefficients``; one vector per row."""
        return self._to_torch(coefficients.T) @ self._basis[: self.size]

    def compress(self, coefficients: Array, left_out: Array) -> None:
        """Replace the basis by orthonormal combinations of it (thick restart); drop Ritz values."""
        kept = coefficients.shape[1]
        self.left_out.extend(left_out)
        mixing = self._to_torch(coefficients.T)
        for first in range(0, self.matrix.size, PIECE):  # Whole, it would be a second basis.
            piece = self._basis[: self.size, first : first + PIECE]
            piece[:kept] = mixing @ piece
        within = coefficients.T @ self._within[: self.size, : self.size] @ coefficients
        beyond = self.outside(coefficients)
        self._within[:] = 0.0
        self._beyond[:] = 0.0
        self._within[:kept, :kept] = within
        self._beyond[:, :kept] = beyond
        self.size = kept

    def _append(self, direction: Tensor, length: float, row: Array) -> None:
        """Make a direction pending, with its row of C."""
        self.pending.append(direction / length)
        self._beyond = np.vstack([self._beyond, row])

    def _split(self, vector: Tensor) -> tuple[Tensor, Array, Array]:
        """Part outside, and components along the basis and along the pending directions."""
        within = np.zeros(self.size)
        beyond = np.zeros(len(self.pending))
        known = self._basis[: self.size]
        for _ in range(2):  # the second pass removes what rounding left after the first
            along = known @ vector
            vector = vector - along @ known
            within += to_float64(along).cpu().numpy()
            for i, direction in enumerate(self.pending):
                part = torch.dot(direction, vector)
                vector = vector - part * direction
                beyond[i] += float(part)
        return vector, within, beyond

    def _to_torch(self, array: Array) -> Tensor:
        """Array in the type and place of the basis."""
        return torch.from_numpy(array.copy()).to(self._basis)


def lanczos(operator: SupportsMatmul | Matrix, start: Tensor, steps: int) -> KrylovBasis:
    """Run the Lanczos process with full reorthogonalisation from one vector ``(p,)``.

    Returns:
        The basis, whose first vector is the start, normalised, after ``steps`` products, or fewer
        if the space closes before.

    Example:
        >>> space = lanczos(np.diag([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.float64), 8)
        >>> space.size, space.ritz().values.round(12).tolist()
        (3, [1.0, 2.0, 3.0])
    """
    matrix = operator if isinstance(operator, Matrix) else Matrix(operator)
    space = KrylovBasis(matrix, min(steps, matrix.size))
    space.add(start)
    while space.pending and space.size < space.capacity:
        space.extend()
    return space


def _scaled_eigh(symmetric: Array) -> tuple[Array, Array]:
    """Eigenvalues and vectors; scaling the input by 2**n scales the values exactly."""
    exponent = math.frexp(float(np.abs(symmetric).max(initial=0.0)))[1]
    values, vectors = np.linalg.eigh(np.ldexp(symmetric, -exponent))
    return np.ldexp(values, exponent), vectors


def unseen_distance(space: KrylovBasis, sign: float, chance: float = CHANCE) -> float:
    r"""Distance beyond the outermost Ritz value within which an eigenvalue may be hidden.

    Definition:
        After :math:`s` products from a unit start :math:`v`, the direction that comes next is

        .. math:: P(A) v, \qquad P(\lambda) = \prod_{i=1}^s (\lambda - \theta_i) / \beta_i,

        with the Ritz values :math:`\theta_i` and the lengths :math:`\beta_i` that were divided
        by. Its component along a unit eigenvector of :math:`\lambda` is that of :math:`v` times
        :math:`P(\lambda)`, and at most one in size. A random :math:`v` has a component below
        :math:`t` with a chance of at most :math:`t \sqrt{2 p / \pi}`, so an eigenvalue beyond
        the point where :math:`P` is :math:`\sqrt{2 p / \pi} / \text{chance}` exists with at most
        this chance over the starts, whatever the matrix.

    Reference:
        [vandorsselaer2000computing]

    Returns:
        The distance above the largest value (sign 1) or below the smallest (sign -1); zero where
        the space has closed, and infinite where it was not grown from one start.
    """
    if not space.pending:
        return 0.0
    if space.starts != 1 or not space.size:
        return math.inf
    exponent = math.frexp(space.scale)[1]  # Powers of two change no digit of the answer.
    roots = np.ldexp(np.append(space.ritz().values, space.left_out), -exponent)
    steps = np.ldexp(space.lengths, -exponent)
    luck = math.sqrt(2 * space.matrix.size / math.pi) / chance
    goal = float(np.log(steps).sum()) + math.log(luck)
    inwards = (sign * roots).max() - sign * roots
    low, high = 0.0, math.exp(goal / len(roots))  # At this distance from all it is reached.
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        reached = float(np.log(inwards + middle).sum()) >= goal
        low, high = (low, middle) if reached else (middle, high)
    return math.ldexp(high, exponent)
