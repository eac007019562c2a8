"""The chart of path values (Yi et al. 2019): coordinates that no rescaling changes.

In: a loss surface and a skeleton. Out: `PathValues`, the loss as a function of the values v of the
basis paths (`basis_paths`), with its gradient, its curvature (`PathCurvature`, by products) and
the part of the trace that one sweep gives. Where the path value of a hidden unit passes zero, the
loss has a pole: beyond it, values are infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Generator, Tensor

from flatgauge.curvature.operators import Operator, Restricted
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import TruncatedNormal
from flatgauge.geometry.chart import Chart, ExactTrace
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.symmetry.basis_paths import surface_paths
from flatgauge.symmetry.path_curvature import path_second_derivatives

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface

#: The default radius and the bound on every component of noise, in units of the smallest |u_b|.
_SHARE = 0.5

#: The default radius where there is no hidden unit, and of relative changes.
_RADIUS, _RELATIVE = 0.1, 0.5


class PathValues(Chart):
    """v + u for the values v of basis paths, or v exp(u) for relative changes.

    All but the loss itself is computed in double precision on the CPU: path values span many
    orders of magnitude.

    Args:
        surface: The surface.
        parameters: Which tensors take part; path values of others stay as they are.
        skeleton: ``"strongest"`` or ``"diagonal"``.
        relative: Whether coordinates are the logarithms of |v|; paths of value zero do not move.
        truncation: The largest size of any component of noise; None for half the smallest |u_b|.
    """

    geometry = "basis paths"
    point = "v + u"
    options: ClassVar[Mapping[str, Any]] = {
        "skeleton": "strongest",
        "relative": False,
        "truncation": None,
    }
    sigma = 0.05

    def __init__(
        self,
        surface: LossSurface,
        parameters: str = "all",
        *,
        skeleton: str = "strongest",
        relative: bool = False,
        truncation: float | None = None,
    ) -> None:
        super().__init__(surface, parameters)
        if not isinstance(relative, bool):
            raise ValueError(f"`relative={relative!r}` must be True or False.")
        self.relative = relative
        self.paths = surface_paths(surface, skeleton)
        frozen = [name for name, _ in self.paths.entries if name not in surface.names]
        if frozen:
            raise ValueError(
                f"`{frozen[0]}` is frozen, but basis paths run through all weights; set "
                "`requires_grad` of all parameters, or measure another geometry."
            )
        if not len(self.paths):
            raise ValueError(
                "no path of the model has a value other than zero, so that path space has no "
                "coordinates here; measure another geometry."
            )
        self.epsilon = _RELATIVE if relative else _RADIUS
        if self.paths.hidden and not relative:
            self.limit = self.paths.smallest
            self.epsilon = _SHARE * self.limit
        self.truncation = self._bound(truncation)
        self.settings = {"skeleton": self.paths.skeleton, "relative": relative}
        self.noise_settings = {} if relative else {"truncation": self.truncation}
        self.notes, sizes = self.paths.notes, self.paths.values.abs()
        self.details = {
            "weights m": float(self.paths.m),
            "hidden units H": float(self.paths.hidden),
            "basis paths": float(len(self.paths)),
            "smallest |v|": float(sizes.min()),
            "largest |v|": float(sizes.max()),
            "smallest |u|": self.paths.smallest,
        }
        mask = [
            torch.full((len(places),), name in self.names) for name, places in self.paths.entries
        ]
        self.mask = torch.cat([torch.zeros(0, dtype=torch.bool), *mask])
        if relative:
            self.mask = self.mask & (self.paths.values != 0)

    @property
    def origin(self) -> Tensor:
        """The coordinates of the point: zeros."""
        return torch.zeros(len(self.paths), dtype=torch.float64)

    @property
    def moving(self) -> Tensor:
        """The paths that take part."""
        return self.mask

    def row(self, u: Tensor) -> Tensor:
        """The weights at a displacement, in one row in the order of the paths' parameters."""
        moved = u * self.mask
        if self.relative:
            return self.paths.map.relative(moved)
        return self.paths.map(self.paths.values + moved)

    def to_point(self, row: Tensor) -> Tensor:
        """A row as a point of the surface; parameters that nothing reads stay."""
        found = self.paths.map.split(row.detach())
        return self.surface.flatten(
            {name: found.get(name, value).to(value) for name, value in self.surface.params.items()}
        )

    def to_direction(self, row: Tensor) -> Tensor:
        """A direction among the paths' weights as one of the surface."""
        found, read = self.paths.map.split(row.detach()), self.paths.edges.starts
        return self.surface.flatten(
            {
                name: found[name].to(value) if name in read else torch.zeros_like(value)
                for name, value in self.surface.params.items()
            }
        )

    def to_row(self, vector: Tensor) -> Tensor:
        """A gradient by the surface's parameters as one by the paths' weights."""
        return self.paths.map.to_row(self.surface.split(vector))

    def value(self, u: Tensor) -> float:
        """The loss at a displacement; infinite at a pole and beyond."""
        row = self.row(u)
        if not self.reaches(u) or not bool(row.isfinite().all()):
            return math.inf
        return self.surface.value(self.to_point(row))

    def reaches(self, u: Tensor) -> bool:
        """Whether no pole lies between the point and a displacement."""
        return self.relative or self.paths.reaches(self.paths.values + u * self.mask)

    def value_and_gradient(self, u: Tensor) -> tuple[float, Tensor]:
        """The loss at a displacement and its gradient; infinite beyond a pole."""
        if not self.reaches(u):
            return math.inf, torch.zeros_like(u)
        with torch.enable_grad():
            moved = u.detach().requires_grad_()
            row = self.row(moved)
            value, gradient = self.surface.value_and_gradient(self.to_point(row))
            (found,) = torch.autograd.grad(row, moved, self.to_row(gradient))
        return value, found

    def curvature(self) -> Operator:
        """The second derivatives by the coordinates."""
        return PathCurvature(self)

    def exact_trace(self, *, all_columns: bool, generator: Generator | None) -> ExactTrace:
        """The sum over the coordinates whose second derivative one sweep gives."""
        try:
            found = path_second_derivatives(
                self.surface, self.paths, all_columns=all_columns, generator=generator
            )
        except UnsupportedGraphError as error:
            why = f"not swept, but estimated: {error}"
            return ExactTrace(Estimate(0.0, exact=True), self.curvature(), (why,))
        values = found.values
        if self.relative:
            v = self.paths.values
            values = v.square() * values + v * found.gradient
        known = found.known & self.mask
        rest = torch.nonzero(~found.known & self.mask)[:, 0]
        return ExactTrace(
            Estimate(float(values[known].sum()), exact=True),
            Restricted(self.curvature(), rest) if len(rest) else None,
            found.notes,
        )

    def first_order(self) -> float:
        """The part of the trace that vanishes with the gradient."""
        mapping = self.paths.map
        slopes = mapping.at_coordinates(self.to_row(self.surface.gradient()))
        shares = mapping.amounts * slopes  # w_e g_e
        rooted = mapping.roots < len(self.paths)
        roots = mapping.roots[rooted]
        moving = self.mask[roots]
        if self.relative:  # By its own logarithm, and by that of the root it is divided by.
            return float(shares[self.mask].sum() + shares[rooted][moving].sum())
        return float((2 * shares[rooted] / self.paths.values[roots].square())[moving].sum())

    def direction(self, generator: Generator) -> Tensor:
        """A random direction among the coordinates that take part."""
        drawn = torch.randn(len(self.paths), generator=generator, dtype=torch.float64)
        return drawn * self.mask

    def noise(self, sigma: float, generator: Generator) -> Tensor:
        """Normal noise; every component cut off at the truncation, so that no pole is met."""
        if self.relative:
            return super().noise(sigma, generator)
        return TruncatedNormal(sigma, self.truncation).draw(len(self.paths), generator) * self.mask

    def _bound(self, truncation: float | None) -> float:
        """The largest size of a component of noise."""
        if truncation is None:
            return _SHARE * self.limit
        if not 0 < truncation < self.limit:
            raise ValueError(
                f"`truncation={truncation!r}` must be positive and below the smallest |u_b|, "
                f"{self.limit:.6g}: beyond it the loss has poles, and its mean is infinite."
            )
        return truncation


class PathCurvature(Operator):
    """The second derivatives of the loss by the coordinates of a `PathValues` chart."""

    def __init__(self, chart: PathValues) -> None:
        super().__init__(len(chart.paths), chart.surface.dtype, chart.surface.device)
        self._chart = chart
        self._gradient = chart.to_row(chart.surface.gradient())

    def __matmul__(self, vectors: Tensor) -> Tensor:
        chart = self._chart
        columns = vectors.reshape(self.shape[0], -1).double().cpu()
        with torch.enable_grad():
            u = chart.origin.requires_grad_()
            row = chart.row(u)
            (slopes,) = torch.autograd.grad(row, u, self._gradient, create_graph=True)
            bends = [self._bend(slopes, u, column) for column in columns.T]
            # What a direction is among the weights: the transpose of the transpose.
            probe = torch.zeros_like(row).requires_grad_()
            (pulled,) = torch.autograd.grad(row, u, probe, create_graph=True)
            pushed = [
                torch.autograd.grad(pulled, probe, c, retain_graph=True)[0] for c in columns.T
            ]
            products = chart.surface.hvp(
                torch.stack([chart.to_direction(p) for p in pushed], dim=1)
            )
            found = [
                torch.autograd.grad(row, u, chart.to_row(product), retain_graph=True)[0] + bend
                for product, bend in zip(products.T, bends, strict=True)
            ]
        return torch.stack(found, dim=1).reshape(vectors.shape).to(vectors)

    @staticmethod
    def _bend(slopes: Tensor, u: Tensor, column: Tensor) -> Tensor:
        """What the weights' own second derivatives add."""
        if not slopes.requires_grad:
            return torch.zeros_like(column)
        (found,) = torch.autograd.grad(slopes, u, column, retain_graph=True, allow_unused=True)
        return torch.zeros_like(column) if found is None else found
