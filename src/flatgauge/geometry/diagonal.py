"""Charts with one unit of length per weight: θ + D u."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import ClassVar

import torch
from torch import Generator, Tensor

from flatgauge.curvature import Hessian, Scaled
from flatgauge.curvature.blocks import Blocks, block_curvature
from flatgauge.curvature.factors import SubBlock
from flatgauge.curvature.operator import Operator
from flatgauge.curvature.summary import combined, told
from flatgauge.geometry.chart import Chart, Swept
from flatgauge.graph import UnsupportedGraphError
from flatgauge.precision import wide
from flatgauge.surface import LossSurface


class Diagonal(Chart):
    """A chart in which every weight moves by a unit of its own.

    Rewriting the network multiplies weights and units by the same, and leaves the loss, its
    gradient and its curvature by u unchanged: bit for bit where the factors are powers of two.

    Attributes:
        part: What the sweep must give of every tensor for the trace; see `curvature.taps.PARTS`.
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

    def swept(self, *, all_columns: bool, generator: Generator | None) -> Swept:
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
        notes += told(missing) + told(reasons)
        params = surface.params
        known = combined(
            {n: b.layer_value(self.part, self.share(params[n])) for n, b in found.items()}, "sum"
        )
        return Swept(known, self._rest(frozenset(found)), tuple(notes))

    def _rest(self, swept: frozenset[str]) -> Operator | None:
        """D H D over the tensors that were not swept."""
        rest = tuple(name for name in self.surface.names if name in self.names - swept)
        if not rest:
            return None
        if len(rest) == len(self.surface.names):
            return self.curvature()
        units = self.surface.split(self._diagonal)
        chosen = torch.cat([units[name].reshape(-1) for name in rest])
        return Scaled(SubBlock(self.surface, rest), by=chosen)


def norm(value: Tensor) -> float:
    """The length of a tensor, in double precision."""
    return float(wide(value).norm())
