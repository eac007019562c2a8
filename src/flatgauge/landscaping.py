"""The loss on a line or plane through a point, along random directions of a geometry."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from flatgauge.geometry import chart
from flatgauge.surface import LossSurface

if TYPE_CHECKING:
    import pandas as pd

#: The geometries that directions can be drawn in, by the name of the space.
SPACES = {"basis_paths": "basis paths", "weights": "weights"}


@dataclass(frozen=True)
class Landscape:
    """The loss around a point.

    Attributes:
        space: Where the directions were drawn.
        ticks: Where along every direction the loss was computed (points,).
        loss: The loss, one axis per direction; infinite where there is none.
        beyond: Where a pole of the loss lies on the way from the centre (basis paths only): the
            loss there belongs to a network with another sign on some path.
        directions: The directions (dims, coordinates).
        options: The settings that it depends on.
        notes: What the reader must know.
    """

    space: str
    ticks: NDArray[np.float64]
    loss: NDArray[np.float64]
    beyond: NDArray[np.bool_]
    directions: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """One row per point of the grid: t1 (and t2), loss, beyond."""
        import pandas as pd

        dims = self.loss.ndim
        grid = np.meshgrid(*[self.ticks] * dims, indexing="ij")
        columns = {f"t{axis + 1}": values.reshape(-1) for axis, values in enumerate(grid)}
        return pd.DataFrame(
            columns | {"loss": self.loss.reshape(-1), "beyond": self.beyond.reshape(-1)}
        )


def landscape(
    surface: LossSurface,
    *,
    space: str = "basis_paths",
    dims: int = 2,
    points: int = 25,
    extent: float = 1.0,
    sigma: float = 0.05,
    skeleton: str = "strongest",
    seed: int = 0,
) -> Landscape:
    r"""Compute the loss on a grid of points around the surface's own.

    Definition:
        .. math:: f(t_1, t_2) = L(v + t_1 \xi + t_2 \eta)

        with independent normal directions ξ, η of size `sigma` (Yi et al. 2019, eq. 18). In the
        space of basis paths, v are their values, and the weights for others than the model's own
        follow from `BasisPaths.to_weights` (eq. 19 to 21): the free weights of the skeleton keep
        their values, and with them their signs.

    Args:
        surface: Where to look.
        space: ``"basis_paths"`` or ``"weights"``.
        dims: 1 for a line, 2 for a plane.
        points: How many along every direction; an odd number has the point itself among them.
        extent: The grid goes from -extent to extent.
        sigma: The size of the directions' components.
        skeleton: Of basis paths: ``"strongest"`` or ``"diagonal"``.
        seed: Of the directions.

    Returns:
        The landscape.

    Raises:
        TypeError: If `surface` is no surface.
        ValueError: If there is no such space, or a setting is out of range.

    Example:
        The loss ``(b relu(a))²`` is v² in the value v = ab = 6 of its only path:

        >>> from flatgauge.examples import two_weights
        >>> found = landscape(two_weights(2.0, 3.0), dims=1, points=3)
        >>> (step,) = found.directions[0].tolist()
        >>> np.allclose(found.loss, [(6 - step) ** 2, 36, (6 + step) ** 2])
        True
    """
    if not isinstance(surface, LossSurface):
        raise TypeError(
            f"`landscape` needs a LossSurface, but got a {type(surface).__name__}; make one with "
            "LossSurface(model, loss, data)."
        )
    if space not in SPACES:
        raise ValueError(f"there is no space {space!r}; the spaces are {', '.join(SPACES)}.")
    if dims not in (1, 2) or isinstance(points, bool) or points < 2:
        raise ValueError(
            f"`dims={dims!r}` must be 1 or 2, and `points={points!r}` at least 2 along each."
        )
    for name, value in (("extent", extent), ("sigma", sigma)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"`{name}={value!r}` must be a positive finite number.")
    chosen = {"skeleton": skeleton} if space == "basis_paths" else {}
    where = chart(surface, SPACES[space], **chosen)
    source = Generator().manual_seed(seed)
    directions = torch.stack([sigma * where.direction(source) for _ in range(dims)])
    ticks = np.linspace(-extent, extent, points)
    ticks[points // 2] = 0.0 if points % 2 else ticks[points // 2]
    loss, beyond = np.zeros((points,) * dims), np.zeros((points,) * dims, bool)
    for index in itertools.product(range(points), repeat=dims):
        steps = torch.tensor(ticks[list(index)], dtype=directions.dtype)
        u = steps.to(directions) @ directions
        loss[index], beyond[index] = where.anywhere(u), not where.reaches(u)
    notes = list(where.notes)
    if beyond.any():
        notes.append(
            f"{int(beyond.sum())} of {beyond.size} points lie beyond a pole of the loss; a smaller "
            "`sigma` or `extent` stays on this side"
        )
    options = {"dims": dims, "extent": extent, "sigma": sigma, "seed": seed, **where.settings}
    return Landscape(space, ticks, loss, beyond, directions, options, tuple(notes))
