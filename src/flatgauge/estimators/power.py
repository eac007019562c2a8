"""The power method, as it is used in the literature: the eigenvalue of largest size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, Tensor

from flatgauge.estimators import probes
from flatgauge.estimators.matrix import Matrix, SupportsMatmul
from flatgauge.precision import wide


@dataclass(frozen=True)
class PowerRun:
    """How a power method ended.

    Attributes:
        value: The Rayleigh quotient of the last vector.
        vector: The last unit vector ``(p,)``.
        residual: Length of ``A v - value v``: an eigenvalue lies that near.
        change: How far the unit vector moved in the last step; near 2 if it changes sign.
        converged: Whether that was within the tolerance.
        negative: Whether the eigenvalue of largest size is negative, so that the vector changes
            its sign at every step and never settles.
        matvecs: Matrix-vector products spent.
    """

    value: float
    vector: Tensor
    residual: float
    change: float
    converged: bool
    negative: bool
    matvecs: int


def power_method(
    operator: SupportsMatmul,
    *,
    tolerance: float = 1e-6,
    max_matvecs: int = 1000,
    generator: Generator | None = None,
) -> PowerRun:
    """Multiply a random vector again and again, until its direction settles.

    Stopping:
        When the unit vector moves by no more than ``tolerance`` in a step: the rule of the
        literature, no bound on the error (the residual is one). Where the eigenvalue of largest
        size is negative, the vector changes its sign at every step; that is detected, and the run
        ends without having converged.

    Reference:
        [rangamani2019scale], Algorithm 1.

    Args:
        operator: Symmetric matrix with ``shape`` and ``@``.
        tolerance: Change of the unit vector at which to stop.
        max_matvecs: Most products to spend.
        generator: Source of randomness for the start, required.

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
    source = probes.required(
        generator, caller="power_method(operator)", otherwise="use `top_eigenvalues(start=...)`"
    )
    vector = _unit(probes.direction(matrix, source))
    while True:
        image = (matrix @ vector[:, None])[:, 0]
        value = float((wide(vector) * wide(image)).sum())
        residual = float((wide(image) - value * wide(vector)).norm())
        following = _unit(image)
        change, flip = (float((wide(following) + s * wide(vector)).norm()) for s in (-1.0, 1.0))
        negative = flip <= tolerance and value < 0
        converged = change <= tolerance or not float(image.norm()) > 0
        if converged or negative or matrix.matvecs >= max_matvecs:
            return PowerRun(value, vector, residual, change, converged, negative, matrix.matvecs)
        vector = following


def _unit(vector: Tensor) -> Tensor:
    """The vector divided by its length; zeros stay zeros."""
    length = wide(vector).norm()
    return vector if not float(length) > 0 else (wide(vector) / length).to(vector.dtype)
