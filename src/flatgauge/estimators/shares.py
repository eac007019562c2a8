"""What share of the eigenvalues lies in an interval, and how surely the runs can tell."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatgauge.estimators.density import SpectralDensity, mean_over_probes
from flatgauge.estimators.estimate import Estimate

#: What a share may be off by quadrature and still count as told.
TOLD = 0.1


def resolution(density: SpectralDensity) -> float:
    """How near to zero the runs can tell eigenvalues from zero.

    Networks have most of their eigenvalues there, and a run of some steps puts one or two nodes
    for all of them: their signs, and which of them are zero, cannot be read from those nodes.

    Args:
        density: The spectrum.

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
    told = (
        size
        for size in candidates
        if density.rounding <= size and (share_between(density, -size, size).bound or 0.0) <= TOLD
    )
    return next(told, largest)


def share_between(density: SpectralDensity, low: float, high: float) -> Estimate:
    r"""The share of eigenvalues from low to high.

    Definition:
        The weights of the nodes in the interval, averaged over the probes. The bound is on what
        the quadrature may be off, which the standard error does not show: at each end, for
        every probe, the less of

        - the weight of the nearest node on either side (Chebyshev, Markov and Stieltjes: the
          quadrature's distribution function and the true one cross between any two nodes);
        - what nodes on one side can have on the other: a node :math:`\theta` with residual r and
          weight w has at most :math:`\sqrt w\, r / d` beyond distance d.

    Args:
        density: The spectrum.
        low: Lower end, included; -inf for none.
        high: Upper end, included; inf for none.

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
    around = torch.nn.functional.pad(weights, (1, 1))  # A node before the first has no weight.
    nearest = torch.maximum(around.gather(1, count), around.gather(1, count + 1))[:, 0]
    distance = (density.nodes - edge).abs()
    # A residual below rounding is an eigenvalue, unless that leaves the side of the edge open.
    told = (density.residuals <= density.rounding) & (distance > density.rounding / 2)
    residuals = density.residuals.clamp(min=density.rounding)
    leaks = torch.where(told | (weights == 0), 0.0, weights.sqrt() * residuals / distance)
    over, back = (torch.where(side, leaks, 0.0).sum(dim=1) for side in (left, ~left))
    own, other = (weights * left).sum(dim=1).sqrt(), (weights * ~left).sum(dim=1).sqrt()
    leaked = 2 * torch.minimum(over * other, back * own) + torch.maximum(over, back) ** 2
    return float(torch.fmin(nearest, leaked).mean())  # It is nan where a node lies on the edge.
