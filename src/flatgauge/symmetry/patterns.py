"""Which tensors share a scale: the coordinates of a gauge group, grouped by what they move."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatgauge.symmetry.gauge import GaugeGroup

#: Exponents below this are none.
_ZERO = 1e-9


@dataclass(frozen=True)
class Moved:
    """A tensor that a scale moves.

    Attributes:
        name: Of the tensor.
        axis: The axis along which the scales differ; None where they do not, or along several.
        power: The exponent of the scale in it: 1 for what enters a unit, -1 for what leaves it.
    """

    name: str
    axis: int | None
    power: float


@dataclass(frozen=True)
class ScalePattern:
    """Scales that move the same tensors in the same way.

    Attributes:
        site: The parameter or op whose output they scale.
        scales: How many there are.
        moved: The tensors.
    """

    site: str
    scales: int
    moved: tuple[Moved, ...]


def scale_patterns(gauge: GaugeGroup) -> list[ScalePattern]:
    """Group the scales of a gauge group by what they move.

    Args:
        gauge: The group.

    Returns:
        One pattern per site and set of tensors, in the order of the coordinates.
    """
    effects = {name: _effects(gauge, name) for name in gauge.names}
    sites = list(dict.fromkeys(gauge.sites))
    keys = np.array(
        [[sites.index(site) for site in gauge.sites], *effects.values()], np.float64
    ).T.reshape(gauge.dim, -1)
    patterns = []
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    for group in np.argsort(first):
        mine = np.flatnonzero(inverse.reshape(-1) == group)
        moved = [
            Moved(name, _axis(gauge, name, int(mine[0])), float(powers[mine[0]]))
            for name, powers in effects.items()
            if powers[mine[0]]
        ]
        patterns.append(ScalePattern(gauge.sites[mine[0]], len(mine), tuple(moved)))
    return patterns


def _effects(gauge: GaugeGroup, name: str) -> NDArray[np.float64]:
    """For every coordinate, its exponent in a tensor where it is largest in size."""
    rows = gauge.rows(name).tocoo()
    found = np.zeros(gauge.dim)
    order = np.argsort(np.abs(rows.data), kind="stable")
    found[rows.col[order]] = np.round(rows.data[order], 6)
    return found


def _axis(gauge: GaugeGroup, name: str, coordinate: int) -> int | None:
    """The only axis of a tensor along which a coordinate moves some entries and not others."""
    column = gauge.basis[:, [coordinate]].toarray()[:, 0]
    # Terms alone say nothing: what one of them takes, another may give back.
    parts = [c * column[rows].reshape(shape) for c, rows, shape in gauge.terms(name)]
    exponents = sum(parts[1:], start=parts[0])
    axes = [axis for axis in range(exponents.ndim) if np.ptp(exponents, axis=axis).max() > _ZERO]
    return axes[0] if len(axes) == 1 else None
