"""An orthonormal Krylov basis, grown one product at a time, and what the matrix does to it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatgauge.estimators.matrix import Matrix, SupportsMatmul
from flatgauge.precision import length_of, wide

Array = npt.NDArray[np.float64]

ROUNDING = 8.0
"""What a product is trusted to, in units of the type's epsilon times the matrix's size."""


#: Entries of long vectors that are worked on at a time, where a copy is needed.
_PIECE = 2**20


class Ritz(NamedTuple):
    """Eigenpairs of the matrix as seen from inside a basis.

    Attributes:
        values: In rising order, ``(m,)``.
        coefficients: The vectors in terms of the basis, one per column, ``(m, m)``.
        residuals: Lengths of ``A x - value x``, ``(m,)``: some eigenvalue lies that near.
    """

    values: Array
    coefficients: Array
    residuals: Array


class Krylov:
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

    Attributes:
        matrix: The matrix.
        capacity: Most basis vectors held.
        size: Basis vectors held.
        pending: The columns of :math:`P`, oldest first.
        scale: Longest product seen, a lower estimate of the matrix's norm.
        starts: How many directions were added from outside.
        lengths: What was left of every product outside the basis, its length: the divisors.
        left_out: Ritz values whose vectors restarts have dropped.
    """

    def __init__(self, matrix: Matrix, capacity: int) -> None:
        self.matrix = matrix
        self.capacity = capacity
        self.size = 0
        self.pending: list[Tensor] = []
        self.scale = 0.0
        self.starts = 0
        self.lengths: list[float] = []
        self.left_out: list[float] = []
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
        """Make a fresh direction pending, less what is known of it.

        Args:
            direction: Any vector ``(p,)`` that is not in the span of what is held.

        Returns:
            False if nothing is new because the whole space is spanned already.

        Raises:
            ValueError: If the direction is no finite vector of the matrix's size, or is zero.
        """
        if self.complete:
            return False
        size = (self.matrix.size,)
        direction = direction.detach().to(self._basis)
        length = length_of(direction) if direction.shape == size else math.nan
        if not 0 < length < math.inf:
            raise ValueError(
                f"a start vector of shape {tuple(direction.shape)} and length {length:.3g} "
                f"gives no direction; a finite vector of shape {size} that is not zero is "
                "needed."
            )
        fresh, _, _ = self._split(direction / length)
        self._append(fresh, length_of(fresh), np.zeros(self.capacity))
        self.starts += 1
        return True

    def extend(self, pick: int = -1) -> None:
        """Multiply a pending direction by the matrix and take it into the basis.

        If the product brings nothing new (the basis spans an invariant space), no direction
        becomes pending in its place.

        Args:
            pick: Which pending direction; the newest by default.
        """
        last = self.size
        self._basis[last] = direction = self.pending.pop(pick)
        self._within[last, :last] = self._beyond[pick, :last]
        self._beyond = np.delete(self._beyond, pick, axis=0)
        self.size += 1
        image = self.matrix @ direction
        self.scale = max(self.scale, length_of(image))
        fresh, within, beyond = self._split(image)
        self._within[: self.size, last] = within
        self._beyond[:, last] = beyond
        length = length_of(fresh)
        if length > self.rounding and not self.complete:
            row = np.zeros(self.capacity)
            row[last] = length
            self._append(fresh, length, row)
            self.lengths.append(length)

    def ritz(self, block: slice = slice(None), pending: slice = slice(None)) -> Ritz:
        """Eigenpairs seen from the basis, or from a block of its vectors alone.

        Args:
            block: Which basis vectors to use; the matrix is compressed to their span.
            pending: Which pending directions count as outside, for the residuals.

        Returns:
            The pairs, by rising value.
        """
        chosen = np.arange(self.size)[block]
        within = self._within[np.ix_(chosen, chosen)]
        symmetric = (within + within.T) / 2
        values, coefficients = _eigh(symmetric)
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
        """Replace the basis by orthonormal combinations of it (thick restart).

        Args:
            coefficients: The combinations, one per column.
            left_out: The Ritz values whose vectors are not among them.
        """
        kept = coefficients.shape[1]
        self.left_out.extend(left_out)
        mixing = self._to_torch(coefficients.T)
        for first in range(0, self.matrix.size, _PIECE):  # Whole, it would be a second basis.
            piece = self._basis[: self.size, first : first + _PIECE]
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
            within += wide(along).cpu().numpy()
            for i, direction in enumerate(self.pending):
                part = torch.dot(direction, vector)
                vector = vector - part * direction
                beyond[i] += float(part)
        return vector, within, beyond

    def _to_torch(self, array: Array) -> Tensor:
        """Array in the type and place of the basis."""
        return torch.from_numpy(array.copy()).to(self._basis)


def lanczos(operator: SupportsMatmul | Matrix, start: Tensor, steps: int) -> Krylov:
    """Run the Lanczos process with full reorthogonalisation from one vector.

    Args:
        operator: Symmetric matrix with ``shape`` and ``@``.
        start: First direction, ``(p,)``; the first basis vector is this one, normalised.
        steps: Most products to make; fewer are made if the space closes before.

    Returns:
        The basis and the action of the matrix on it.

    Example:
        >>> space = lanczos(np.diag([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.float64), 8)
        >>> space.size, space.ritz().values.round(12).tolist()
        (3, [1.0, 2.0, 3.0])
    """
    matrix = operator if isinstance(operator, Matrix) else Matrix(operator)
    space = Krylov(matrix, min(steps, matrix.size))
    space.add(start)
    while space.pending and space.size < space.capacity:
        space.extend()
    return space


def _eigh(symmetric: Array) -> tuple[Array, Array]:
    """Eigenvalues and vectors; scaling the input by 2**n scales the values exactly."""
    exponent = math.frexp(float(np.abs(symmetric).max(initial=0.0)))[1]
    values, vectors = np.linalg.eigh(np.ldexp(symmetric, -exponent))
    return np.ldexp(values, exponent), vectors
