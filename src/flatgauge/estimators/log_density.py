"""The density of eigenvalues over a signed logarithmic axis."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from flatgauge.estimators.density import Curve, SpectralDensity, mean_over_probes
from flatgauge.estimators.shares import resolution
from flatgauge.signed_log import Array, SignedLog

#: How far the smoothing reaches, in units of its width.
_TAIL = 5.0

#: What a node may be below a power of ten, in decades, and still count as that.
_SLACK = 1e-6

#: Points of the grid per width.
_FINENESS = 4

#: Half the foot of the sharpest hat, in units of the width; anything smaller looks the same.
_SHARPEST = 0.1


def axis_of(density: SpectralDensity) -> SignedLog:
    """The axis that shows as much of a spectrum as the runs can tell, and no more.

    Its unit is the smallest size of a node that is surely not zero (see `resolution`), median
    over the probes, rounded down to a power of ten.

    Args:
        density: The spectrum.

    Returns:
        The axis.
    """
    sizes, largest = density.nodes.abs(), float(density.nodes.abs().max()) or 1.0
    told = (sizes > resolution(density)) & (density.weights > 0)
    unit = float(torch.where(told, sizes, largest).amin(dim=1).median())
    return SignedLog(10.0 ** math.floor(math.log10(unit) + _SLACK))


def log_grid(densities: list[SpectralDensity], axis: SignedLog, width: float) -> Array:
    """Even places on an axis that cover several spectra and their smoothing.

    Args:
        densities: The spectra.
        axis: The axis.
        width: Of the smoothing, in decades.

    Returns:
        The places, in decades: multiples of the same step, so that spectra share them.
    """
    reached = [_reach(density, axis, width) for density in densities]
    low = min(float(left.min()) for left, _, _ in reached) - _TAIL * width
    high = max(float(right.max()) for _, _, right in reached) + _TAIL * width
    step = width / _FINENESS
    return np.arange(math.floor(low / step), math.ceil(high / step) + 1, dtype=np.float64) * step


def log_density(density: SpectralDensity, axis: SignedLog, places: Array, *, width: float) -> Curve:
    """Eigenvalues per decade along an axis.

    A node stands for the eigenvalues between its neighbours, unless its residual says that they
    are nearer: its weight is spread as a hat that is highest at the node and falls to zero at the
    neighbours, or where the residual ends. All is smoothed by a bell.

    Args:
        density: The spectrum.
        axis: The axis.
        places: Where on it, in decades.
        width: Standard deviation of the bell, in decades.

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


def _reach(density: SpectralDensity, axis: SignedLog, width: float) -> tuple[Array, Array, Array]:
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
