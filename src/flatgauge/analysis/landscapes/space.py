"""The contract of a space: a line or plane of weights through the point of a surface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from flatgauge.estimators.linalg import is_finite
from flatgauge.surface.surface import LossSurface


class Space(ABC):
    """Weights as a function of steps t along one or two directions; the point itself is t = 0.

    Args:
        surface: Where to look.
        dims: How many directions.
        generator: Source of random directions.
        **options: Its own.

    Attributes:
        name: How it is asked for.
        title: Of pictures.
        words: What its directions are, for captions: "along ...".
        extent: How far the grid goes at most by default.
        options: Its own options, with their defaults.
        directions: One row per direction (dims, coordinates).
        settings: Its options as they were used.
        details: Numbers to be shown with the result.
        notes: What the reader must know.
        marks: Names of points of the grid that are looked at one by one, with their steps.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    words: str
    extent: ClassVar[float] = 1.0
    options: ClassVar[dict[str, Any]] = {}
    directions: Tensor

    def __init__(
        self,
        surface: LossSurface,
        dims: int,
        generator: Generator | None = None,
        **options: Any,
    ) -> None:
        self.surface = surface
        self.settings: dict[str, Any] = {}
        self.details: dict[str, float] = {}
        self.notes: tuple[str, ...] = ()
        self.marks: dict[str, tuple[float, ...]] = {"model": (0.0,) * dims}

    @abstractmethod
    def place(self, steps: Tensor) -> Tensor | None:
        """The weights at steps along the directions, as a point of the surface.

        Args:
            steps: One per direction, in double precision.

        Returns:
            A flat vector (p,); None where there are no such weights.
        """

    def reach(self) -> float:
        """How far the grid goes by default."""
        return self.extent

    def reaches(self, steps: Tensor) -> bool:
        """Whether no pole of the loss lies between the point and these steps."""
        return True

    @classmethod
    def ticks(cls, points: int, extent: float) -> NDArray[np.float64]:
        """Where along every direction to look.

        Args:
            points: How many.
            extent: How far, to either side.

        Returns:
            The ticks, in order; with an odd number, 0 is among them.
        """
        ticks = np.linspace(-extent, extent, points)
        ticks[points // 2] = 0.0 if points % 2 else ticks[points // 2]
        return ticks


class Straight(Space):
    """Weights that change in proportion to the steps: θ + t₁ d₁ + t₂ d₂."""

    def __init__(self, surface: LossSurface, dims: int, generator: Generator) -> None:
        super().__init__(surface, dims, generator)
        self._point = surface.point
        self.directions = torch.stack(self.draw_directions(dims, generator))

    @abstractmethod
    def draw_directions(self, dims: int, generator: Generator) -> list[Tensor]:
        """Directions, each a flat vector (p,)."""

    def place(self, steps: Tensor) -> Tensor:
        """θ + t₁ d₁ + t₂ d₂."""
        return self._point + steps.to(self.directions) @ self.directions


def positive(name: str, value: Any) -> float:
    """Refuse a setting that is not a positive finite number.

    Args:
        name: Of the setting.
        value: What was given.

    Returns:
        The number.

    Raises:
        ValueError: If it is none.
    """
    if not is_finite(value) or value <= 0:
        raise ValueError(f"`{name}={value!r}` must be a positive finite number.")
    return float(value)
