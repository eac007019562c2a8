"""Charts in which every weight has a unit of length of its own: θ + D u with a diagonal D.

In: a loss surface. Out: the charts of the geometries "weights" (D = 1), "per tensor" (the norm of
the weight's tensor), "per weight" (the weight's own size) and "balanced" (D = 1 at the form of the
network with the smallest norm). Their curvature is D H D, and the exact sweep gives its trace.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from typing import ClassVar

import torch
from torch import Generator, Tensor

from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.blocks import Blocks, aggregate_layers, estimation_notes
from flatgauge.curvature.operators import Hessian, Operator, ParameterBlock, Scaled
from flatgauge.estimators.linalg import to_float64
from flatgauge.geometry.chart import Chart, ExactTrace
from flatgauge.graph.export import UnsupportedGraphError
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.balance import balanced_surface


class Diagonal(Chart):
    """A chart in which every weight moves by a unit of its own.

    Rewriting the network multiplies weights and units by the same, and leaves the loss, its
    gradient and its curvature by u unchanged: bit for bit where the factors are powers of two.

    Attributes:
        part: What the sweep must give of every tensor for the trace; see
            `curvature.sweep.accumulate.PARTS`.
    """

    part: ClassVar[str] = "trace"

    def __init__(self, surface: LossSurface, parameters: str = "all") -> None:
        super().__init__(surface, parameters)
        self._diagonal = surface.flatten(
            {
                name: self.units(value) if name in self.names else torch.zeros_like(value)
                for name, value in surface.params.items()
            }
        )

    @abstractmethod
    def units(self, value: Tensor) -> Tensor:
        """The unit of every weight of a tensor, in the tensor's shape."""

    @abstractmethod
    def share(self, value: Tensor) -> float:
        """What a tensor's `part` is multiplied by to give its trace."""

    @property
    def origin(self) -> Tensor:
        """The coordinates of the point: zeros."""
        return torch.zeros_like(self._diagonal)

    @cached_property
    def _point(self) -> Tensor:
        """Where u is zero; curvature does without."""
        return self.surface.point

    @property
    def moving(self) -> Tensor:
        """The weights that take part and have a unit."""
        return self._diagonal != 0

    def value(self, u: Tensor) -> float:
        """The loss at θ + D u."""
        return self.surface.value(self._point + self._diagonal * u)

    def value_and_gradient(self, u: Tensor) -> tuple[float, Tensor]:
        """The loss at θ + D u, and D times its gradient there."""
        value, gradient = self.surface.value_and_gradient(self._point + self._diagonal * u)
        return value, self._diagonal * gradient

    def curvature(self) -> Operator:
        """D H D."""
        return Scaled(Hessian(self.surface), by=self._diagonal)

    def direction(self, generator: Generator) -> Tensor:
        """A random direction among the weights that have a unit."""
        return super().direction(generator) * self.moving

    def exact_trace(self, *, all_columns: bool, generator: Generator | None) -> ExactTrace:
        """The sum over the swept tensors of tr D H D."""
        surface, notes = self.surface, []
        blocks = Blocks({}, frozenset())
        try:
            # A copy: whether the sweep still had to draw must not change what is drawn later.
            source = None if generator is None else generator.clone_state()
            blocks = block_curvature(
                surface, (self.part,), all_columns=all_columns, estimate=False, generator=source
            )
        except UnsupportedGraphError as error:
            notes.append(f"not swept, but estimated: {error}")
        found = {name: block for name, block in blocks.items() if name in self.names}
        reasons = {name: block.reason for name, block in found.items() if not block.exact}
        missing = {name: why for name, why in blocks.missing.items() if name in self.names}
        notes += estimation_notes(missing) + estimation_notes(reasons)
        params = surface.params
        known = aggregate_layers(
            {n: b.layer_value(self.part, self.share(params[n])) for n, b in found.items()}, "sum"
        )
        return ExactTrace(known, self._rest(frozenset(found)), tuple(notes))

    def _rest(self, swept: frozenset[str]) -> Operator | None:
        """D H D over the tensors that were not swept."""
        rest = tuple(name for name in self.surface.names if name in self.names - swept)
        if not rest:
            return None
        if len(rest) == len(self.surface.names):
            return self.curvature()
        units = self.surface.split(self._diagonal)
        chosen = torch.cat([units[name].reshape(-1) for name in rest])
        return Scaled(ParameterBlock(self.surface, rest), by=chosen)


def norm(value: Tensor) -> float:
    """The length of a tensor, in double precision."""
    return float(to_float64(value).norm())


class Weights(Diagonal):
    """θ + u: one unit is 1 for every weight. Not invariant: the baseline."""

    geometry = "weights"
    point = r"\theta + u"
    epsilon = 0.1
    sigma = 0.01

    def units(self, value: Tensor) -> Tensor:
        """Ones."""
        return torch.ones_like(value)

    def share(self, value: Tensor) -> float:
        """One."""
        return 1.0

    def curvature(self) -> Operator:
        """H, if all weights take part."""
        if self.names == frozenset(self.surface.names):
            return Hessian(self.surface)
        return super().curvature()


class PerTensor(Diagonal):
    """θ + D u with D = ‖θ_i‖ for every tensor i (Rangamani et al. 2019); zeros do not move.

    Noise of size σ on a tensor has the expected squared length σ² ‖θ_i‖².
    """

    geometry = "per tensor"
    point = r"\theta_i + \|\theta_i\|_2 \, u_i \text{ for every tensor } i"
    epsilon = 0.05
    sigma = 0.05

    def units(self, value: Tensor) -> Tensor:
        """The tensor's norm."""
        return torch.full_like(value, norm(value))

    def share(self, value: Tensor) -> float:
        """The squared norm."""
        return norm(value) ** 2

    def noise(self, sigma: float, generator: Generator) -> Tensor:
        """Noise that moves every tensor by a share of its norm, however many weights it has."""
        drawn = self.surface.split(super().noise(sigma, generator))
        return self.surface.flatten({n: u / math.sqrt(u.numel()) for n, u in drawn.items()})


class PerWeight(Diagonal):
    """θ + D u with D = |θ| (Kwon et al. 2021): u is the relative change; zeros do not move."""

    geometry = "per weight"
    point = r"\theta + |\theta| \odot u"
    epsilon = 0.5
    sigma = 0.05
    per_loss = False
    part = "weighted_diagonal"

    def units(self, value: Tensor) -> Tensor:
        """The weights' sizes."""
        return value.abs()

    def share(self, value: Tensor) -> float:
        """One: the part is weighted by the squared weights already."""
        return 1.0


class Balanced(Weights):
    """θ + u on a balanced copy of the model: of all ways to write it, that of smallest norm."""

    geometry = "balanced"
    point = r"\bar\theta + u \text{ with } \bar\theta \text{ the balanced weights}"

    def __init__(self, surface: LossSurface, parameters: str = "all") -> None:
        balanced, notes = balanced_surface(surface)
        super().__init__(balanced, parameters)
        self.notes = notes
