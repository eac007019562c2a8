"""The trace of a matrix that can only be multiplied, with an error bar.

A matrix and a generator come in, an `Estimate` leaves. The directions along which the matrix is
largest are taken out exactly (Hutch++), and the rest is sampled with random signs; where a product
per column is as cheap, the trace is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Generator, Tensor

from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.lanczos import ROUNDING, Array
from flatgauge.estimators.linalg import (
    Matrix,
    SupportsMatmul,
    random_signs,
    require_generator,
    to_float64,
)

#: Columns multiplied at a time.
BLOCK = 8

#: Directions that ``hutch++`` takes out exactly when the budget is open.
SKETCH = 10

#: Samples before the first look at the error; each later look has half as many again.
FIRST_LOOK = 10

#: Entries of every row that are worked on at a time in double precision.
_PIECE = 2**18

#: Below this share of the largest eigenvalue of their Gram matrix, rows are dependent.
_DEPENDENT = 1e-14

#: Chance with which the true value may lie outside the half-width.
DOUBT = 0.05


def trace(
    operator: SupportsMatmul,
    *,
    probes: int | None = None,
    tolerance: float | None = None,
    max_matvecs: int = 300,
    method: str = "hutch++",
    basis: int | None = None,
    together: int = BLOCK,
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
        Memory for the columns of :math:`Q` and a quarter as much for what they come from, and
        for ``together`` vectors with their products.

    Reference:
        [meyer2021hutchpp]

    Args:
        operator: Symmetric matrix with ``shape`` and ``@``.
        probes: Products to spend, at least 2. A fixed budget.
        tolerance: Error to reach, relative to the value; 0.05 if ``probes`` is not given.
        max_matvecs: Most products to spend on reaching the tolerance.
        method: ``"hutch++"`` or ``"hutchinson"``.
        basis: Most columns of :math:`Q`, where memory is short; the products that are left go to
            samples. None for as many as serve best.
        together: Columns multiplied at a time; the value does not depend on it.
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
    most = (math.inf if basis is None else basis) if method == "hutch++" else 0
    sketch, looks = _schedule(probes, max_matvecs, matrix.size, most)
    options = {"method": method, **({"probes": probes} if probes else {"tolerance": tolerance})}
    if matrix.size <= 2 * sketch + looks[0]:
        return _exact(matrix, options)
    source = require_generator(
        generator,
        caller=f"trace(probes={probes})" if probes else f"trace(tolerance={tolerance})",
        otherwise=f"`probes={matrix.size}` for the exact value",
    )
    captured, shares = _capture_directions(matrix, sketch, together, source)
    looks = [look + sketch - len(captured) for look in looks]
    estimate = _sample_rest(matrix, captured, shares, looks, tolerance, together, source, options)
    if not estimate.converged and matrix.size + matrix.matvecs <= max_matvecs:
        return _exact(matrix, options)
    return estimate


def _schedule(
    probes: int | None, max_matvecs: int, size: int, most: float
) -> tuple[int, list[int]]:
    """How many directions to take out exactly, and after how many samples to look at the error."""
    budget = probes or max_matvecs
    sketch = int(min(budget // 3, (budget - 2) // 2, most))
    if probes:  # One look, at the end of the budget.
        return sketch, [probes - 2 * sketch]
    sketch = min(SKETCH, sketch)
    last = max(min(max_matvecs, size) - 2 * sketch, 2)  # While it costs less than all columns.
    look, looks = FIRST_LOOK, list[int]()
    while look < last:
        looks.append(look)
        look += look // 2
    return sketch, [*looks, last]


def _exact(matrix: Matrix, options: Mapping[str, object]) -> Estimate:
    """Sum of the diagonal, column by column."""
    total = 0.0
    for first in range(0, matrix.size, BLOCK):
        rows = torch.arange(first, min(first + BLOCK, matrix.size), device=matrix.device)
        unit = torch.zeros(matrix.size, len(rows), dtype=matrix.dtype, device=matrix.device)
        unit[rows, rows - first] = 1
        total += float(to_float64((matrix @ unit)[rows, rows - first]).sum())
    return Estimate(total, exact=True, matvecs=matrix.matvecs, options=options)


def _capture_directions(
    matrix: Matrix, count: int, together: int, generator: Generator
) -> tuple[Tensor, Array]:
    """Take out the directions along which the matrix is largest: as rows, with their shares."""
    drawn = random_signs((matrix.size, count), generator)
    rows = torch.empty(count, matrix.size, dtype=matrix.dtype, device=matrix.device)
    for first in range(0, count, together):
        rows[first : first + together] = (matrix @ drawn[:, first : first + together].to(rows)).T
    del drawn
    basis = orthonormal_rows(rows)
    return basis, _quadratic(matrix, basis, together)


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Replace rows (k, p) by an orthonormal basis of their span, in place; return its rows."""
    for _ in range(2):  # The second time removes what rounding left of the first.
        if not len(rows):
            break
        gram = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        for piece in rows.split(_PIECE, dim=1):
            gram += (to_float64(piece) @ to_float64(piece).T).cpu()
        lengths = gram.diagonal().sqrt()
        scale = torch.where(lengths > 0, 1 / lengths, 0.0)
        values, vectors = torch.linalg.eigh(scale[:, None] * gram * scale)
        kept = values > _DEPENDENT * values[-1]
        mixing = (vectors[:, kept] / values[kept].sqrt()).T * scale
        for piece in rows.split(_PIECE, dim=1):
            piece[: len(mixing)] = (mixing @ to_float64(piece).cpu()).to(rows)
        rows = rows[: len(mixing)]
    return rows


def _sample_rest(
    matrix: Matrix,
    captured: Tensor,
    shares: Array,
    looks: Sequence[int],
    tolerance: float | None,
    together: int,
    generator: Generator,
    options: Mapping[str, object],
) -> Estimate:
    """Sample the rest of the trace until the error is small enough or the budget spent."""
    from scipy.special import stdtrit  # Student's t; slow to import

    samples = np.zeros(0)
    for look in looks:
        count = look - len(samples)
        drawn = _samples(matrix, captured, count, together, generator)
        samples = np.append(samples, drawn)
        value = float(shares.sum() + samples.mean())
        stderr = float(samples.std(ddof=1)) / math.sqrt(len(samples))
        quantile = float(stdtrit(len(samples) - 1, 1 - DOUBT / len(looks) / 2))
        sizes = float(np.abs(shares).sum() + np.abs(samples).mean())
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


def _samples(
    matrix: Matrix, basis: Tensor, count: int, together: int, generator: Generator
) -> Array:
    """Samples of the trace outside the span of the basis, ``(count,)``."""
    values = [np.zeros(0)]
    for first in range(0, count, BLOCK):
        drawn = random_signs((matrix.size, min(BLOCK, count - first)), generator)
        for signs in drawn.split(together, dim=1):
            rows = signs.T.to(basis).contiguous()
            rows.addmm_(rows @ basis.T, basis, alpha=-1)
            values.append(_quadratic(matrix, rows, together))
    return np.concatenate(values)


def _quadratic(matrix: Matrix, rows: Tensor, together: int) -> Array:
    """``v · A v`` for every row, ``(k,)``, summed in float64."""
    values = [np.zeros(0)]
    for block in rows.split(together) if len(rows) else ():
        products = (matrix @ block.T).T
        pieces = (part.split(_PIECE, dim=1) for part in (block, products))
        sums = [(to_float64(v) * to_float64(av)).sum(dim=1) for v, av in zip(*pieces, strict=True)]
        values.append(torch.stack(sums).sum(0).cpu().numpy())
    return np.concatenate(values)


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
