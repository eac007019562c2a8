"""Random directions among the values of basis paths (Yi et al. 2019): no rescaling changes them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from flatgauge.analysis.landscapes.space import Space, positive
from flatgauge.geometry.path_values import PathValues
from flatgauge.surface.surface import LossSurface

#: How much of the way to the nearest pole is shown.
_SHARE = 0.95


class InBasisPaths(Space):
    """v + t₁ ξ + t₂ η for the values v of basis paths, back to weights by their own map.

    The free weights of the skeleton keep their values, and with them their signs.
    """

    name = "basis_paths"
    title = "The loss in the space of basis paths"
    words = "random directions in the space of basis paths"
    options: ClassVar[dict[str, Any]] = {"sigma": 0.05, "skeleton": "strongest"}

    def __init__(
        self, surface: LossSurface, dims: int, generator: Generator, *, sigma: float, skeleton: str
    ) -> None:
        super().__init__(surface, dims)
        size = positive("sigma", sigma)
        self._chart = PathValues(surface, skeleton=skeleton)
        self.directions = torch.stack(
            [size * self._chart.direction(generator) for _ in range(dims)]
        )
        self._params = surface.params  # Once: reading them looks whether the model has changed.
        self.settings = {"sigma": sigma, **self._chart.settings}
        self.notes = self._chart.notes

    def place(self, steps: Tensor) -> Tensor | None:
        """The weights of the moved paths; None at a pole."""
        row = self._chart.row(steps @ self.directions)
        if not bool(row.isfinite().all()):
            return None
        found = self._chart.paths.map.split(row)
        return self.surface.flatten(
            {name: found.get(name, value).to(value) for name, value in self._params.items()}
        )

    def reach(self) -> float:
        """1, or nearly as far as the nearest pole in any direction of the grid."""
        paths = self._chart.paths
        spans = self.directions[:, paths.roots].abs().sum(0)
        ways = (paths.values[paths.roots].abs() / spans)[spans > 0]
        return min(self.extent, _SHARE * float(ways.min())) if len(ways) else self.extent

    def reaches(self, steps: Tensor) -> bool:
        """Whether no hidden unit's path value has changed its sign on the way."""
        return self._chart.reaches(steps @ self.directions)
