"""How the eigenvalues are spread, from a few Lanczos runs with random starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from flatgauge.estimators import probes as random_vectors
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.krylov import lanczos
from flatgauge.estimators.matrix import Matrix, SupportsMatmul


@dataclass(frozen=True)
class Curve:
    """A function of the eigenvalue, on a grid, with its error.

    Attributes:
        grid: Where, ``(g,)``, float64.
        values: The function, ``(g,)``.
        stderr: Standard error from the choice of probes, ``(g,)``.
    """

    grid: Tensor
    values: Tensor
    stderr: Tensor


@dataclass(frozen=True)
class SpectralDensity:
    r"""The spectrum as weighted nodes, one set per probe.

    Definition:
        For probe :math:`i`, the nodes :math:`\theta_{ij}` and weights :math:`w_{ij}`, which sum
        to 1, integrate like the eigenvalues weighted by the squared components of the probe,

        .. math:: \sum_j w_{ij} f(\theta_{ij}) \approx v_i^\top f(A) v_i, \qquad
                  \mathbb{E}\, v_i^\top f(A) v_i = \tfrac{1}{p} \operatorname{tr} f(A),

        without error for polynomials of degree below twice the steps.

    Attributes:
        nodes: Ritz values in rising order, ``(probes, steps)``, float64.
        weights: Their weights, ``(probes, steps)``; 0 where a run closed early.
        residuals: How far from each node an eigenvalue lies at most, ``(probes, steps)``.
        size: Size of the matrix.
        matvecs: Matrix-vector products spent.
        rounding: What is smaller in size cannot be told from 0 in the matrix's precision.
    """

    nodes: Tensor
    weights: Tensor
    residuals: Tensor
    size: int
    matvecs: int
    rounding: float

    @property
    def extremes(self) -> tuple[float, float]:
        """Smallest and largest node: inner estimates, the spectrum reaches at least so far."""
        return self.nodes.min().item(), self.nodes.max().item()

    @property
    def width(self) -> float:
        """Default smoothing: a hundredth of the spectrum's extent.

        The extent counts as no less than a thousandth of the largest value in size, so that
        rounding is not mistaken for it, and as 1 if all values are 0.
        """
        low, high = self.extremes
        return 0.01 * (max(high - low, 1e-3 * abs(low), 1e-3 * abs(high)) or 1.0)

    @property
    def mean(self) -> Estimate:
        """Mean eigenvalue, which is the trace divided by the size."""
        return self.moment(1)

    def moment(self, order: int) -> Estimate:
        """Mean of the eigenvalues raised to a power.

        Args:
            order: The power, at least 1; ``p`` times the second moment is the squared
                Frobenius norm.

        Returns:
            The mean over the probes and its standard error.

        Raises:
            ValueError: If the power is below 1.
        """
        if order < 1:
            raise ValueError(f"`order` is {order!r}; pass a power of 1 or more.")
        values, stderr = mean_over_probes((self.weights * self.nodes**order).sum(dim=1))
        return Estimate(values.item(), stderr=stderr.item(), matvecs=self.matvecs)

    def grid(self, points: int = 1001, *, width: float | None = None) -> Tensor:
        """Evenly spaced places that cover the spectrum and the tails of its smoothing.

        Args:
            points: How many.
            width: Smoothing that has to find room; see `density`.

        Returns:
            The places, ``(points,)``, float64.
        """
        low, high = self.extremes
        room = 6 * (self.width if width is None else width)
        return torch.linspace(low - room, high + room, points, dtype=torch.float64)

    def density(self, grid: Tensor | None = None, *, width: float | None = None) -> Curve:
        """Share of eigenvalues per unit of length, each spread out as a Gaussian bell.

        Args:
            grid: Where to evaluate it, ``(g,)``; by default `grid`.
            width: Standard deviation of the bells; a hundredth of the spectrum by default.

        Returns:
            The curve; it integrates to 1.

        Raises:
            ValueError: If the width is not positive.
        """
        width = self.width if width is None else width
        if not 0 < width < math.inf:
            raise ValueError(
                f"`width` is {width!r}; the bells need a positive standard deviation, in units "
                "of the eigenvalues."
            )
        grid = self.grid(width=width) if grid is None else grid.to(self.nodes)
        rows = []
        for nodes, weights in zip(self.nodes, self.weights, strict=True):
            bells = torch.exp(-(((grid[:, None] - nodes) / width) ** 2) / 2)  # (g, steps)
            rows.append(bells @ weights / (width * math.sqrt(2 * math.pi)))
        return Curve(grid, *mean_over_probes(torch.stack(rows)))

    def cumulative(self, grid: Tensor | None = None) -> Curve:
        """Share of eigenvalues at or below each place.

        Args:
            grid: Where to evaluate it, ``(g,)``; by default `grid`.

        Returns:
            The curve, rising from 0 to 1.
        """
        grid = self.grid() if grid is None else grid.to(self.nodes)
        rows = [
            (nodes <= grid[:, None]).double() @ weights
            for nodes, weights in zip(self.nodes, self.weights, strict=True)
        ]
        return Curve(grid, *mean_over_probes(torch.stack(rows)))


def spectral_density(
    operator: SupportsMatmul,
    *,
    probes: int = 8,
    steps: int = 64,
    generator: Generator | None = None,
) -> SpectralDensity:
    """Distribution of the eigenvalues of a symmetric matrix, by stochastic Lanczos quadrature.

    Cost:
        ``probes * steps`` products, fewer where a run closes early (low rank). Memory for
        ``steps`` vectors.

    Reference:
        [ubaru2017fast]

    Args:
        operator: Symmetric matrix with ``shape`` and ``@``.
        probes: Random starts, uniform on the sphere; at least 2, for the error.
        steps: Products per start, which is the number of nodes.
        generator: Source of randomness, required.

    Returns:
        Nodes and weights, with curves and moments.

    Raises:
        ValueError: If an argument is out of its range, or the generator is missing.

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 1.0, 1.0, 5.0]))
        >>> spectrum = spectral_density(matrix, generator=Generator().manual_seed(0))
        >>> [round(end, 4) for end in spectrum.extremes], spectrum.matvecs  # two per start
        ([1.0, 5.0], 16)
    """
    matrix = Matrix(operator)
    if probes < 2:
        raise ValueError(f"`probes` is {probes!r}; an error bar needs `probes=2` or more.")
    if steps < 1:
        raise ValueError(f"`steps` is {steps!r}; each start needs 1 product or more.")
    source = random_vectors.required(
        generator,
        caller="spectral_density()",
        otherwise="for a small matrix use `torch.linalg.eigvalsh`",
    )
    runs = [_quadrature(matrix, steps, source) for _ in range(probes)]
    longest = max(len(run.nodes) for run in runs)
    return SpectralDensity(
        nodes=torch.stack([_padded(run.nodes, longest, run.nodes[-1].item()) for run in runs]),
        weights=torch.stack([_padded(run.weights, longest, 0.0) for run in runs]),
        residuals=torch.stack([_padded(run.residuals, longest, 0.0) for run in runs]),
        size=matrix.size,
        matvecs=matrix.matvecs,
        rounding=max(run.rounding for run in runs),
    )


class _Run(NamedTuple):
    """What one random start gives."""

    nodes: Tensor
    weights: Tensor
    residuals: Tensor
    rounding: float


def _quadrature(matrix: Matrix, steps: int, generator: Generator) -> _Run:
    """Nodes and weights from one random start."""
    space = lanczos(matrix, random_vectors.direction(matrix, generator), steps)
    ritz = space.ritz()
    weights = torch.from_numpy(ritz.coefficients[0] ** 2)  # the start is the first basis vector
    nodes, residuals = torch.from_numpy(ritz.values), torch.from_numpy(ritz.residuals)
    return _Run(nodes, weights / weights.sum(), residuals, space.rounding)


def _padded(row: Tensor, length: int, value: float) -> Tensor:
    """The row, filled up at its end."""
    return torch.nn.functional.pad(row, (0, length - len(row)), value=value)


def mean_over_probes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the probes (first dimension) and its standard error.

    Args:
        rows: One per probe.

    Returns:
        Both, without the first dimension.
    """
    return rows.mean(dim=0), rows.std(dim=0) / math.sqrt(len(rows))
