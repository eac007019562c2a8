"""Charts: the loss around a point of weight space, as a function of the coordinates of a geometry.

In: a loss surface and the name of a geometry. Out: a `Chart`, which functionals
(`flatgauge.geometry.functionals`) measure. A chart maps coordinates u to weights, with the point
itself at u = 0: one unit of u is what the geometry counts as one unit of distance.

The charts here are θ + D u with a diagonal D: 1 in the geometry "weights", the norm of the weight's
tensor in "per tensor", the weight's own size in "per weight". Their curvature is D H D, and the
exact sweep gives its trace.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Generator, Tensor

from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.blocks import Blocks, aggregate_layers, estimation_notes
from flatgauge.curvature.operators import Hessian, Operator, ParameterBlock, Scaled
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import to_float64
from flatgauge.graph.export import UnsupportedGraphError

if TYPE_CHECKING:
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
        settings: Its own options, as they are shown with every result.
        noise_settings: What its noise depends on except its size; shown with expectations.
        details: What else is shown with every result.
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
        self.settings: dict[str, Any] = {}
        self.noise_settings: dict[str, Any] = {}
        self.details: dict[str, float] = {}
        self.notes: tuple[str, ...] = ()

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The options that depend on the geometry, with their defaults; None: of the model."""
        return {**cls.options, "epsilon": getattr(cls, "epsilon", None), "sigma": cls.sigma}

    @property
    def key(self) -> Hashable:
        """What distinguishes its coordinates from those of other charts of the same surface."""
        return (*self.settings.items(), self.geometry, self.parameters)

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

    def share(self, value: Tensor) -> float:
        """What a tensor's `part` is multiplied by to give its trace."""
        return 1.0

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
            # A copy, so that the sweep does not change what is drawn later.
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


class Weights(Diagonal):
    """θ + u: one unit is 1 for every weight. Not invariant: the baseline."""

    geometry = "weights"
    point = r"\theta + u"
    epsilon = 0.1
    sigma = 0.01

    def units(self, value: Tensor) -> Tensor:
        """Ones."""
        return torch.ones_like(value)

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


def norm(value: Tensor) -> float:
    """The length of a tensor, in double precision."""
    return float(to_float64(value).norm())
