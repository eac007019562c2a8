"""The trace of a matrix that can only be multiplied, with an error bar that can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from flatgauge.estimators import probes as random_vectors
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.krylov import ROUNDING, Array
from flatgauge.estimators.matrix import Matrix, SupportsMatmul
from flatgauge.precision import wide

BLOCK = 8
"""Columns multiplied at a time."""
SKETCH = 10
"""Directions that ``hutch++`` takes out exactly when the budget is open."""
FIRST_LOOK = 10
"""Samples before the first look at the error; each later look has half as many again."""
DOUBT = 0.05
"""Chance with which the true value may lie outside the half-width."""


def trace(
    operator: SupportsMatmul,
    *,
    probes: int | None = None,
    tolerance: float | None = None,
    max_matvecs: int = 300,
    method: str = "hutch++",
    generator: Generator | None = None,
) -> Estimate:
    r"""Trace of a symmetric matrix, from products with random sign vectors.

    Definition:
        With independent sign vectors :math:`z_i` and an orthonormal basis :math:`Q` of
        :math:`A S`, for a block :math:`S` of other sign vectors,

        .. math:: \operatorname{tr} A \approx \operatorname{tr}(Q^\top A Q)
                  + \frac{1}{n} \sum_{i=1}^n z_i^\top P A P z_i, \qquad P = I - Q Q^\top.

        ``"hutchinson"`` leaves :math:`Q` empty. Both are free of bias. The standard error is
        that of the mean of the :math:`n` samples.

    Stopping:
        With ``tolerance``, looks at the error at 10, 15, 22, ... samples and stops at the first
        where the half-width of the 95 % confidence interval (Student's t, the 5 % shared
        out evenly over all looks) is within ``tolerance`` of the value. A trace near zero
        never gets there; then ``converged`` is False after ``max_matvecs``.

    Cost:
        ``probes`` products, a third each for :math:`A S`, :math:`A Q` and the samples; with
        ``tolerance``, 20 products for :math:`Q` and one per sample. The exact trace, with
        one product per column, is returned instead wherever it is as cheap; also when p
        products were spent on samples in vain and the budget allows p more.
        Memory for 8 vectors, and twice the columns of :math:`Q`.

    Reference:
        [meyer2021hutchpp]

    Args:
        operator: Symmetric matrix with ``shape`` and ``@``.
        probes: Products to spend, at least 2. A fixed budget.
        tolerance: Error to reach, relative to the value; 0.05 if ``probes`` is not given.
        max_matvecs: Most products to spend on reaching the tolerance.
        method: ``"hutch++"`` or ``"hutchinson"``.
        generator: Source of randomness, required unless the budget covers the exact trace.

    Returns:
        The estimate. ``details["half_width"]`` is the half-width of the 95 % interval,
        rounding included.

    Raises:
        ValueError: If an argument is out of its range, ``probes`` and ``tolerance`` are both
            given, or the generator is missing.

    Example:
        >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> print(trace(matrix, probes=2))  # as many as columns: exact
        5
        >>> ones = torch.ones(500, 500)
        >>> estimate = trace(ones, probes=30, generator=Generator().manual_seed(0))
        >>> round(estimate.value, 2), estimate.matvecs
        (500.0, 30)
    """
    matrix = Matrix(operator)
    if probes is not None and tolerance is not None:
        raise ValueError(
            f"`probes={probes!r}` fixes the budget and `tolerance={tolerance!r}` the error; "
            "only one can be met, pass one of them."
        )
    if probes is None and tolerance is None:
        tolerance = 0.05
    _check(probes, tolerance, max_matvecs, method)
    plan = _Plan.fixed(probes, method) if probes else _Plan.open(max_matvecs, matrix.size, method)
    options = {"method": method, **({"probes": probes} if probes else {"tolerance": tolerance})}
    if matrix.size <= plan.least:
        return _exact(matrix, options)
    source = random_vectors.required(
        generator,
        caller=f"trace(probes={probes})" if probes else f"trace(tolerance={tolerance})",
        otherwise=f"`probes={matrix.size}` for the exact value",
    )
    captured = _captured(matrix, plan.sketch, source)
    estimate = _sampled(matrix, captured, plan, tolerance, source, options)
    if not estimate.converged and matrix.size + matrix.matvecs <= max_matvecs:
        return _exact(matrix, options)
    return estimate


@dataclass(frozen=True)
class _Plan:
    """How many directions to take out exactly, and after how many samples to look."""

    sketch: int
    looks: tuple[int, ...]

    @property
    def least(self) -> int:
        """Products spent at the first look."""
        return 2 * self.sketch + self.looks[0]

    @classmethod
    def fixed(cls, probes: int, method: str) -> _Plan:
        """One look, at the end of the budget."""
        sketch = 0 if method == "hutchinson" else min(probes // 3, (probes - 2) // 2)
        return cls(sketch, (probes - 2 * sketch,))

    @classmethod
    def open(cls, max_matvecs: int, size: int, method: str) -> _Plan:
        """Looks at rising numbers of samples, while sampling costs less than all columns."""
        sketch = min(SKETCH, cls.fixed(max_matvecs, method).sketch)
        most = max(min(max_matvecs, size) - 2 * sketch, 2)
        return cls(sketch, tuple(_rising(min(FIRST_LOOK, most), most)))


def _rising(first: int, most: int) -> Iterator[int]:
    """Numbers of samples to look at, half as many again each time, ending with ``most``."""
    while first < most:
        yield first
        first += first // 2
    yield most


def _exact(matrix: Matrix, options: Mapping[str, object]) -> Estimate:
    """Sum of the diagonal, column by column."""
    total = 0.0
    for first in range(0, matrix.size, BLOCK):
        rows = torch.arange(first, min(first + BLOCK, matrix.size), device=matrix.device)
        unit = torch.zeros(matrix.size, len(rows), dtype=matrix.dtype, device=matrix.device)
        unit[rows, rows - first] = 1
        total += float(wide((matrix @ unit)[rows, rows - first]).sum())
    return Estimate(total, exact=True, matvecs=matrix.matvecs, options=options)


@dataclass(frozen=True)
class _Captured:
    """An orthonormal basis ``(p, k)`` and the share of each of its vectors in the trace."""

    basis: Tensor
    shares: Array


def _captured(matrix: Matrix, count: int, generator: Generator) -> _Captured:
    """Take out the directions along which the matrix is largest."""
    sketch = _products(matrix, random_vectors.signs(matrix, count, generator))
    basis = torch.linalg.qr(sketch).Q if count else sketch
    return _Captured(basis, _quadratic(matrix, basis))


def _sampled(
    matrix: Matrix,
    captured: _Captured,
    plan: _Plan,
    tolerance: float | None,
    generator: Generator,
    options: Mapping[str, object],
) -> Estimate:
    """Sample the rest of the trace until the error is small enough or the budget spent."""
    from scipy.special import stdtrit  # Student's t; slow to import

    samples = np.zeros(0)
    for look in plan.looks:
        samples = np.append(
            samples, _samples(matrix, captured.basis, look - len(samples), generator)
        )
        value = float(captured.shares.sum() + samples.mean())
        stderr = float(samples.std(ddof=1)) / math.sqrt(len(samples))
        quantile = float(stdtrit(len(samples) - 1, 1 - DOUBT / len(plan.looks) / 2))
        sizes = float(np.abs(captured.shares).sum() + np.abs(samples).mean())
        half_width = quantile * stderr + ROUNDING * torch.finfo(matrix.dtype).eps * sizes
        converged = tolerance is None or half_width <= tolerance * abs(value)
        if converged:
            break
    missed = (
        f"stopped after {matrix.matvecs} products with the value known to ± {half_width:.2g}; "
        "pass a larger `max_matvecs` or a larger `tolerance`",
    )
    return Estimate(
        value,
        stderr=stderr,
        converged=converged,
        matvecs=matrix.matvecs,
        details={"half_width": half_width},
        options=options,
        notes=() if converged else missed,
    )


def _samples(matrix: Matrix, basis: Tensor, count: int, generator: Generator) -> Array:
    """Samples of the trace outside the span of the basis, ``(count,)``."""
    values = [np.zeros(0)]
    for first in range(0, count, BLOCK):
        block = random_vectors.signs(matrix, min(BLOCK, count - first), generator)
        block = block - basis @ (basis.T @ block)
        values.append(_quadratic(matrix, block))
    return np.concatenate(values)


def _quadratic(matrix: Matrix, vectors: Tensor) -> Array:
    """``v · A v`` for every column, ``(k,)``, summed in float64."""
    return (wide(vectors) * wide(_products(matrix, vectors))).sum(dim=0).cpu().numpy()


def _products(matrix: Matrix, vectors: Tensor) -> Tensor:
    """The matrix times columns ``(p, k)``, a block at a time."""
    blocks = [vectors[:, i : i + BLOCK] for i in range(0, vectors.shape[1], BLOCK)]
    return torch.cat([vectors[:, :0], *(matrix @ block.contiguous() for block in blocks)], dim=1)


def _check(probes: int | None, tolerance: float | None, max_matvecs: int, method: str) -> None:
    """Refuse arguments out of their range."""
    if method not in ("hutch++", "hutchinson"):
        raise ValueError(f'`method` is {method!r}; pass "hutch++" or "hutchinson".')
    if probes is not None and probes < 2:
        raise ValueError(f"`probes` is {probes!r}; an error bar needs `probes=2` or more.")
    if tolerance is not None and not 0 < tolerance < 1:
        raise ValueError(
            f"`tolerance` is {tolerance!r}; it is a relative error, pass a number between 0 "
            "and 1 such as 0.05."
        )
    if max_matvecs < 2:
        raise ValueError(
            f"`max_matvecs` is {max_matvecs!r}; a standard error needs at least 2 products, "
            "pass 2 or more."
        )
