"""Charts: the loss around a point of weight space, as a function of the coordinates of a geometry.

In: a loss surface and the name of a geometry. Out: a `Chart`, which functionals
(`flatgauge.geometry.functionals`) measure. A chart maps coordinates u to weights, with the point
itself at u = 0: one unit of u is what the geometry counts as one unit of distance.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from flatgauge.curvature.operators import Operator
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.estimators.estimate import Estimate
from flatgauge.surface.surface import LossSurface

#: The geometries by name.
GEOMETRIES: dict[str, type[Chart]] = {}


@dataclass(frozen=True)
class ExactTrace:
    """The part of a chart's trace that the exact sweep gives.

    Attributes:
        value: That part.
        rest: The curvature of the coordinates that the sweep does not reach; None if there are
            none.
        notes: Why it does not reach them.
    """

    value: Estimate
    rest: Operator | None
    notes: tuple[str, ...] = ()


class Chart(ABC):
    """The loss around a point as a function of coordinates u; the point itself is u = 0.

    A subclass with a `geometry` of its own registers itself in `GEOMETRIES`; every functional
    then works in it.

    Attributes:
        geometry: Its name.
        point: The weights at u, as LaTeX.
        options: Its own options with their defaults; which tensors take part is not one of them.
        epsilon: The default radius of a ball; set by instances if it depends on the model.
        sigma: The default size of noise.
        limit: The smallest radius at which a ball contains points without a finite loss.
        per_loss: Whether the worst case in a ball is divided by 1 + loss.
        surface: Where the loss is computed.
        parameters: Which tensors take part: ``"all"`` trainable ones, or the weights of
            ``"layers"`` only.
        notes: Notes that belong to every result.

    Args:
        surface: The surface.
        parameters: Which tensors take part.
    """

    geometry: ClassVar[str]
    point: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    epsilon: float
    sigma: float
    limit: float = math.inf
    per_loss: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "geometry" in cls.__dict__:
            GEOMETRIES[cls.geometry] = cls

    def __init__(self, surface: LossSurface, parameters: str = "all") -> None:
        self.surface, self.parameters = surface, parameters
        self.names = frozenset(select_tensors(surface, parameters))
        self.notes: tuple[str, ...] = ()

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The options that depend on the geometry, with their defaults; None: of the model."""
        return {**cls.options, "epsilon": getattr(cls, "epsilon", None), "sigma": cls.sigma}

    @property
    def key(self) -> Hashable:
        """What distinguishes its coordinates from those of other charts of the same surface."""
        return self.geometry, self.parameters

    @property
    def settings(self) -> dict[str, Any]:
        """Its own options, as they are shown with every result."""
        return {}

    @property
    def noise_settings(self) -> dict[str, Any]:
        """What its noise depends on except its size, as it is shown with expectations."""
        return {}

    @property
    def details(self) -> dict[str, float]:
        """What else is shown with every result."""
        return {}

    @property
    @abstractmethod
    def origin(self) -> Tensor:
        """The coordinates of the point: zeros."""

    @property
    def moving(self) -> Tensor:
        """Which coordinates move the weights at all, one flag each."""
        return torch.ones_like(self.origin, dtype=torch.bool)

    @abstractmethod
    def value(self, u: Tensor) -> float:
        """The loss at a displacement."""

    @abstractmethod
    def value_and_gradient(self, u: Tensor) -> tuple[float, Tensor]:
        """The loss at a displacement, and its gradient by the coordinates."""

    def reaches(self, u: Tensor) -> bool:
        """Whether no pole of the loss lies between the point and a displacement."""
        return True

    @abstractmethod
    def curvature(self) -> Operator:
        """The second derivatives by the coordinates, at the point."""

    @abstractmethod
    def exact_trace(self, *, all_columns: bool, generator: Generator | None) -> ExactTrace:
        """The part of the curvature's trace that one sweep gives exactly."""

    def first_order(self) -> float | None:
        """The part of the trace that vanishes with the gradient; None where weights are linear."""
        return None

    def direction(self, generator: Generator) -> Tensor:
        """A random direction among the coordinates that take part."""
        # In double precision whatever the surface's: the same seed is the same direction.
        drawn = torch.randn(len(self.origin), generator=generator, dtype=torch.float64)
        return drawn.to(self.surface.dtype).to(self.surface.device)

    def noise(self, sigma: float, generator: Generator) -> Tensor:
        """Noise of a size."""
        return sigma * self.direction(generator)


def chart(surface: LossSurface, geometry: str, parameters: str = "all", **options: Any) -> Chart:
    """The loss around a surface's point, in a geometry.

    Args:
        surface: The surface.
        geometry: ``"weights"``, ``"per tensor"``, ``"per weight"``, ``"basis paths"`` or
            ``"balanced"``.
        parameters: Which tensors take part: ``"all"`` trainable ones, or the weights of
            ``"layers"`` only.
        **options: Of the geometry.

    Returns:
        The chart.

    Raises:
        ValueError: If there is no such geometry, or no such choice of parameters or options.

    Example:
        >>> from flatgauge.surface.examples import two_weights
        >>> chart(two_weights(2.0, 3.0), "per weight").value(torch.tensor([0.5, 0.0]).double())
        81.0
    """
    if geometry not in GEOMETRIES:
        raise ValueError(
            f"there is no geometry {geometry!r}; the geometries are {', '.join(GEOMETRIES)}."
        )
    return GEOMETRIES[geometry](surface, parameters, **options)


def select_tensors(surface: LossSurface, parameters: str) -> list[str]:
    """The names of all trainable tensors (``"all"``) or of the weights of layers (``"layers"``)."""
    if parameters == "all":
        return list(surface.names)
    if parameters != "layers":
        raise ValueError(
            f"`parameters={parameters!r}` must be 'all' (every trainable tensor) or 'layers' (the "
            "weights of layers only)."
        )
    layers = list(sweep_of(surface).plan.layers)
    if not layers:
        raise ValueError("the model has no layers; pass `parameters='all'`.")
    return layers
