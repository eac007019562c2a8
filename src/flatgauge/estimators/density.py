"""How the eigenvalues are spread, from a few Lanczos runs with random starts.

`spectral_density` takes a matrix and returns a `SpectralDensity`: nodes and weights for each start.
`share_between` reads from it the share of eigenvalues in an interval, and `log_density` the density
along a `SymlogAxis`, where zero and both signs have room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Generator, Tensor
from torch.nn.functional import pad

from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.lanczos import lanczos
from flatgauge.estimators.linalg import Matrix, SupportsMatmul, random_direction, require_generator

Array = NDArray[np.float64]

#: Error of the quadrature up to which a share counts as known.
_KNOWN = 0.1

#: Most labels on one axis.
_LABELS = 9

#: How far the smoothing reaches, in units of its width.
_TAIL = 5.0

#: What a node may be below a power of ten, in decades, and still count as that.
_SLACK = 1e-6

#: Points of the grid per width.
_FINENESS = 4

#: Half the foot of the sharpest hat, in units of the width; anything smaller looks the same.
_SHARPEST = 0.1


@dataclass(frozen=True)
class Curve:
    """A function of the eigenvalue, on a grid, with its error."""

    grid: Tensor  # Its points, ``(g,)``, float64.
    values: Tensor  # The function, ``(g,)``.
    stderr: Tensor  # Standard error from the choice of probes, ``(g,)``.


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
        rounding: What is smaller in size is 0 in the matrix's precision.
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
    def mean(self) -> Estimate:
        """Mean eigenvalue, which is the trace divided by the size."""
        return self.moment(1)

    def moment(self, order: int) -> Estimate:
        """Mean of the eigenvalues raised to a power of at least 1, with its standard error."""
        if order < 1:
            raise ValueError(f"`order` is {order!r}; pass a power of 1 or more.")
        values, stderr = mean_over_probes((self.weights * self.nodes**order).sum(dim=1))
        return Estimate(values.item(), stderr=stderr.item(), matvecs=self.matvecs)


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
        Nodes and weights, with moments.

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
    source = require_generator(
        generator,
        caller="spectral_density()",
        otherwise="for a small matrix use `torch.linalg.eigvalsh`",
    )
    runs = [_quadrature(matrix, steps, source) for _ in range(probes)]
    longest = max(len(run.nodes) for run in runs)

    def pad_rows(rows: list[Tensor], value: float) -> Tensor:
        return torch.stack([pad(row, (0, longest - len(row)), value=value) for row in rows])

    last = [
        pad(run.nodes, (0, longest - len(run.nodes)), value=float(run.nodes[-1])) for run in runs
    ]
    return SpectralDensity(
        nodes=torch.stack(last),
        weights=pad_rows([run.weights for run in runs], 0.0),
        residuals=pad_rows([run.residuals for run in runs], 0.0),
        size=matrix.size,
        matvecs=matrix.matvecs,
        rounding=max(run.rounding for run in runs),
    )


class _Quadrature(NamedTuple):
    """What one random start gives."""

    nodes: Tensor
    weights: Tensor
    residuals: Tensor
    rounding: float


def _quadrature(matrix: Matrix, steps: int, generator: Generator) -> _Quadrature:
    """Nodes and weights from one random start."""
    space = lanczos(matrix, random_direction(matrix, generator), steps)
    ritz = space.ritz()
    weights = torch.from_numpy(ritz.coefficients[0] ** 2)  # the start is the first basis vector
    nodes, residuals = torch.from_numpy(ritz.values), torch.from_numpy(ritz.residuals)
    return _Quadrature(nodes, weights / weights.sum(), residuals, space.rounding)


def mean_over_probes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the probes (first dimension) and its standard error."""
    return rows.mean(dim=0), rows.std(dim=0) / math.sqrt(len(rows))


def resolution(density: SpectralDensity) -> float:
    """The distance from zero within which the runs do not resolve eigenvalues.

    Networks have most of their eigenvalues there, and a run of some steps puts one or two nodes
    for all of them: their signs, and which of them are zero, cannot be read from those nodes.

    Returns:
        The least of rounding and 1, 2, 5, 10, ... times powers of ten for which the share of
        eigenvalues within this distance of zero is off by no more than 10 % of all.
    """
    largest = float(density.nodes.abs().max())
    candidates = [density.rounding]
    if largest > density.rounding:
        first = math.floor(math.log10(density.rounding))
        decades = range(first, math.ceil(math.log10(largest)) + 1)
        candidates += [digit * 10.0**k for k in decades for digit in (1, 2, 5)]
    known = (
        size
        for size in candidates
        if density.rounding <= size and (share_between(density, -size, size).bound or 0.0) <= _KNOWN
    )
    return next(known, largest)


def share_between(density: SpectralDensity, low: float, high: float) -> Estimate:
    r"""The share of eigenvalues from low to high, both included; infinite where there is no end.

    Definition:
        The weights of the nodes in the interval, averaged over the probes. The bound is on what
        the quadrature may be off, which the standard error does not show: at each end, for
        every probe, the less of

        - the weight of the nearest node on either side (Chebyshev, Markov and Stieltjes: the
          quadrature's distribution function and the true one cross between any two nodes);
        - what nodes on one side can have on the other: a node :math:`\theta` with residual r and
          weight w has at most :math:`\sqrt w\, r / d` beyond distance d.

    Returns:
        The share, with its standard error and bound.

    Raises:
        ValueError: If the ends are in the wrong order.

    Example:
        >>> from torch import Generator
        >>> from flatgauge.estimators import spectral_density
        >>> matrix = torch.diag(torch.tensor([-1.0] * 2 + [0.0] * 5 + [3.0] * 3).double())
        >>> found = spectral_density(matrix, probes=1000, generator=Generator().manual_seed(0))
        >>> print(share_between(found, -math.inf, -0.5))
        0.201 ± 0.005
    """
    if not low <= high:
        raise ValueError(f"`low={low!r}` must not lie above `high={high!r}`.")
    inside = (low <= density.nodes) & (density.nodes <= high)
    value, stderr = mean_over_probes((density.weights * inside).sum(dim=1))
    bound = _unsure(density, density.nodes < low, low) + _unsure(
        density, density.nodes <= high, high
    )
    return Estimate(
        float(value),
        stderr=float(stderr),
        bound=min(bound, max(float(value), 1 - float(value))),
        matvecs=density.matvecs,
    )


def _unsure(density: SpectralDensity, left: Tensor, edge: float) -> float:
    """How far the share left of an edge may be off, averaged over the probes."""
    if math.isinf(edge):
        return 0.0
    weights = density.weights
    count = left.sum(dim=1, keepdim=True)
    around = pad(weights, (1, 1))  # A node before the first has no weight.
    nearest = torch.maximum(around.gather(1, count), around.gather(1, count + 1))[:, 0]
    distance = (density.nodes - edge).abs()
    # A residual below rounding is an eigenvalue, unless that leaves the side of the edge open.
    known = (density.residuals <= density.rounding) & (distance > density.rounding / 2)
    residuals = density.residuals.clamp(min=density.rounding)
    leaks = torch.where(known | (weights == 0), 0.0, weights.sqrt() * residuals / distance)
    over, back = (torch.where(side, leaks, 0.0).sum(dim=1) for side in (left, ~left))
    own, other = (weights * left).sum(dim=1).sqrt(), (weights * ~left).sum(dim=1).sqrt()
    leaked = 2 * torch.minimum(over * other, back * own) + torch.maximum(over, back) ** 2
    return float(torch.fmin(nearest, leaked).mean())  # It is nan where a node lies on the edge.


@dataclass(frozen=True)
class SymlogAxis:
    r"""The axis :math:`s = \operatorname{asinh}(x / 2c) / \ln 10`.

    Far from zero it counts decades, ``log10(|x| / c)`` with the sign of x; within c of zero it
    is linear. Unlike an axis glued together of two logarithms and a line it has no kink, so that
    a density along it has none either.

    Attributes:
        unit: The c, where the axis goes over from linear to logarithmic.

    Example:
        >>> axis = SymlogAxis(1e-3)
        >>> axis.place([-1.0, 0.0, 1e-3, 10.0]).round(4).tolist()
        [-3.0, 0.0, 0.209, 4.0]
        >>> axis.ticks(-1.0, 10.0)
        [-1.0, -0.1, -0.01, 0.0, 0.01, 0.1, 1.0, 10.0]
    """

    unit: float

    def __post_init__(self) -> None:
        if not 0 < self.unit < math.inf:
            raise ValueError(f"`unit={self.unit!r}` must be a positive finite number.")

    def place(self, values: ArrayLike) -> Array:
        """Positions of values on the axis, in decades."""
        found: Array = np.arcsinh(np.asarray(values, dtype=np.float64) / (2 * self.unit))
        return found / math.log(10)

    def value(self, places: ArrayLike) -> Array:
        """Values at positions on the axis: the inverse of `place`."""
        decades: Any = np.asarray(places, dtype=np.float64) * math.log(10)
        found: Array = 2 * self.unit * np.sinh(decades)
        return found

    def ticks(self, low: float, high: float) -> list[float]:
        """Values to label from low to high: zero and powers of ten at even distances."""
        first = math.floor(math.log10(self.unit) + 1e-9) + 1

        up, down = (
            math.floor(math.log10(end) + 1e-9) if end > 0 else first - 1 for end in (high, -low)
        )
        step = 1
        while (max(up - first + 1, 0) + max(down - first + 1, 0)) / step > _LABELS:
            step += 1
        # Aligned to the far end of the longer side, the labels there are the ones that are read.
        start = first + (max(up, down) - first) % step
        above = [10.0**k for k in range(start, up + 1, step)]
        below = [-(10.0**k) for k in range(start, down + 1, step)]
        return [*reversed(below), *([0.0] if low <= 0 <= high else []), *above]


def symlog_axis(density: SpectralDensity) -> SymlogAxis:
    """The axis that shows as much of a spectrum as the runs resolve, and no more."""
    # Its unit is the smallest size of a node that is surely not zero (see `resolution`), median
    # over the probes, rounded down to a power of ten.
    sizes, largest = density.nodes.abs(), float(density.nodes.abs().max()) or 1.0
    known = (sizes > resolution(density)) & (density.weights > 0)
    unit = float(torch.where(known, sizes, largest).amin(dim=1).median())
    return SymlogAxis(10.0 ** math.floor(math.log10(unit) + _SLACK))


def log_grid(densities: list[SpectralDensity], axis: SymlogAxis, width: float) -> Array:
    """Even positions on an axis that cover several spectra and their smoothing."""
    # Multiples of the same step, so that spectra share them. The width is in decades.
    reaches = [_reach(density, axis, width) for density in densities]
    low = min(float(left.min()) for left, _, _ in reaches) - _TAIL * width
    high = max(float(right.max()) for _, _, right in reaches) + _TAIL * width
    step = width / _FINENESS
    return np.arange(math.floor(low / step), math.ceil(high / step) + 1, dtype=np.float64) * step


def log_density(
    density: SpectralDensity, axis: SymlogAxis, places: Array, *, width: float
) -> Curve:
    """Eigenvalues per decade at some places on an axis; places and width are in decades.

    A node stands for the eigenvalues between its neighbours, unless its residual says that they
    are nearer: its weight is spread as a hat that is highest at the node and falls to zero at the
    neighbours, or where the residual ends. All is smoothed by a bell of this width.

    Returns:
        The curve over the places; it integrates to the size of the matrix.

    Raises:
        ValueError: If the width is not positive.
    """
    if not 0 < width < math.inf:
        raise ValueError(f"`width={width!r}` must be a positive number of decades.")
    grid = torch.from_numpy(places)
    hats = (torch.from_numpy(part) for part in _reach(density, axis, width))
    rows = [
        _hats(grid[:, None], left, centre, right, width) @ weights
        for left, centre, right, weights in zip(*hats, density.weights, strict=True)
    ]
    return Curve(grid, *mean_over_probes(density.size * torch.stack(rows)))


def _reach(density: SpectralDensity, axis: SymlogAxis, width: float) -> tuple[Array, Array, Array]:
    """Where every node's hat begins, is highest and ends, in decades, each (probes, steps)."""
    nodes, residuals = density.nodes.numpy(), density.residuals.numpy()
    low, high = np.full_like(nodes[:, :1], -np.inf), np.full_like(nodes[:, :1], np.inf)
    left = np.maximum(np.concatenate([low, nodes[:, :-1]], axis=1), nodes - residuals)
    right = np.minimum(np.concatenate([nodes[:, 1:], high], axis=1), nodes + residuals)
    places, least = axis.place(nodes), _SHARPEST * width
    return (
        np.minimum(axis.place(left), places - least),
        places,
        np.maximum(axis.place(right), places + least),
    )


def _hats(x: Tensor, left: Tensor, centre: Tensor, right: Tensor, width: float) -> Tensor:
    """Hats of area one, smoothed: second differences of the smoothed ramp (g, steps)."""

    def ramp(x: Tensor) -> Tensor:
        u: Tensor = x / width
        bell: Tensor = torch.exp(-(u**2) / 2) / math.sqrt(2 * math.pi)
        smooth: Tensor = width * (u * torch.special.ndtr(u) + bell)
        return smooth

    rising, falling = 1 / (centre - left), 1 / (right - centre)
    bend = rising * ramp(x - left) + falling * ramp(x - right)
    hats = 2 / (right - left) * (bend - (rising + falling) * ramp(x - centre))
    return hats.clamp(min=0.0)
