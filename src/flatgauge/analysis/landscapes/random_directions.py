"""Random directions among the weights: as they are drawn, or in units of filters or layers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from flatgauge.analysis.landscapes.space import Straight, positive
from flatgauge.estimators.linalg import to_float64
from flatgauge.geometry.chart import norm
from flatgauge.surface.surface import LossSurface


class RandomDirections(Straight):
    """Normal directions, scaled tensor by tensor."""

    def draw_directions(self, dims: int, generator: Generator) -> list[Tensor]:
        """Independent normal directions, scaled."""
        return [self._one(generator) for _ in range(dims)]

    @abstractmethod
    def scale_direction(self, direction: Tensor, weight: Tensor) -> Tensor:
        """A tensor's part of a direction, in units of the tensor (both in double precision)."""

    def _one(self, generator: Generator) -> Tensor:
        # In double precision whatever the surface's: the same seed is the same direction.
        surface = self.surface
        drawn = torch.randn(surface.size, generator=generator, dtype=torch.float64)
        parts = surface.split(drawn)
        return surface.flatten(
            {
                name: self.scale_direction(parts[name].to(weight.device), to_float64(weight)).to(
                    weight
                )
                for name, weight in surface.params.items()
            }
        )


class InWeights(RandomDirections):
    """Every component normal with standard deviation `sigma`: not invariant, the baseline."""

    name = "weights"
    title = "The loss in weight space"
    words = "random directions in weight space"
    options: ClassVar[dict[str, Any]] = {"sigma": 0.05}

    def __init__(
        self, surface: LossSurface, dims: int, generator: Generator, *, sigma: float
    ) -> None:
        self._sigma = positive("sigma", sigma)
        super().__init__(surface, dims, generator)
        self.settings = {"sigma": sigma}

    def scale_direction(self, direction: Tensor, weight: Tensor) -> Tensor:
        """Sigma times the direction."""
        return self._sigma * direction


class InFilters(RandomDirections):
    """Every filter of the direction has the length of the model's own [li2018visualizing].

    A filter is what belongs to one index of a tensor's first axis: the weights into one unit.
    Tensors of one axis or none (biases, the parameters of norms) do not move, and neither does a
    filter of zeros.
    """

    name = "filters"
    title = "The loss along filter-normalised directions"
    words = "random directions scaled filter by filter to the length of the weights"

    def __init__(self, surface: LossSurface, dims: int, generator: Generator) -> None:
        moving = [name for name, weight in surface.params.items() if weight.dim() > 1]
        if not any(surface.params[name].any() for name in moving):
            raise ValueError(
                "no parameter of the model has filters (two axes or more) that are not zero, so "
                "that nothing would move; use `space='layers'` or `space='weights'`."
            )
        super().__init__(surface, dims, generator)
        still = len(surface.names) - len(moving)
        if still:
            self.notes = (
                f"{still} of {len(surface.names)} parameter tensors have no filters (biases, "
                "norms) and do not move",
            )

    def scale_direction(self, direction: Tensor, weight: Tensor) -> Tensor:
        """Each filter with the length of the weight's."""
        if weight.dim() < 2:
            return torch.zeros_like(direction)
        axes = tuple(range(1, weight.dim()))
        length = torch.linalg.vector_norm(weight, dim=axes, keepdim=True)
        own = torch.linalg.vector_norm(direction, dim=axes, keepdim=True)
        found: Tensor = direction * (length / own)
        return found


class InLayers(RandomDirections):
    """Every tensor of the direction has the length of the model's own (Rangamani et al. 2019).

    Every parameter tensor is a layer of its own here, biases included. A tensor of zeros does not
    move.
    """

    name = "layers"
    title = "The loss along layer-normalised directions"
    words = "random directions scaled layer by layer to the length of the weights"

    def __init__(self, surface: LossSurface, dims: int, generator: Generator) -> None:
        super().__init__(surface, dims, generator)
        zeros = [name for name, weight in surface.params.items() if not weight.any()]
        if len(zeros) == len(surface.names):
            raise ValueError(
                "every parameter of the model is zero, so that nothing would move; use "
                "`space='weights'`."
            )
        if zeros:
            self.notes = (
                f"{len(zeros)} of {len(surface.names)} parameter tensors are zero and do not "
                f"move: {', '.join(zeros[:3])}{', …' if len(zeros) > 3 else ''}",
            )

    def scale_direction(self, direction: Tensor, weight: Tensor) -> Tensor:
        """The direction with the length of the weight."""
        return direction * (norm(weight) / norm(direction))
