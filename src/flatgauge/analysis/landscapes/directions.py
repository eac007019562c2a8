"""Where a landscape looks: lines and planes of weights through the point of a surface.

A `Space` turns steps along one or two directions into weights. `SPACES` are those that are asked
for by name; `Between` leads straight to other models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from flatgauge.curvature.operators import Hessian
from flatgauge.estimators.eigenvalues import top_eigenvalues
from flatgauge.estimators.linalg import is_finite, to_float64
from flatgauge.geometry.chart import norm
from flatgauge.geometry.path_values import PathValues
from flatgauge.surface.model import unwrap
from flatgauge.surface.surface import LossSurface

#: How much of the way to the nearest pole of basis paths is shown.
_SHARE = 0.95


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
        """The weights (p,) at steps along the directions; None where there are no such weights."""

    def reach(self) -> float:
        """How far the grid goes by default."""
        return self.extent

    def reaches(self, steps: Tensor) -> bool:
        """Whether no pole of the loss lies between the point and these steps."""
        return True

    @classmethod
    def ticks(cls, points: int, extent: float) -> NDArray[np.float64]:
        """Where along every direction to look; with an odd number of points, 0 is among them."""
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


class AlongEigenvectors(Straight):
    """Unit vectors; the second derivative of the loss along each is its eigenvalue."""

    name = "eigenvectors"
    title = "The loss along eigenvectors of the Hessian"
    words = "leading eigenvectors of the Hessian"
    extent = 0.5

    def draw_directions(self, dims: int, generator: Generator) -> list[Tensor]:
        """The eigenvectors of the largest eigenvalues, largest first."""
        basis = self.surface.budget.lanczos_vectors(count=dims)
        pairs = top_eigenvalues(Hessian(self.surface), count=dims, basis=basis, generator=generator)
        names = [f"eigenvalue {number + 1}" for number in range(dims)]
        self.details = dict(zip(names, pairs.values.tolist(), strict=True))
        if not pairs.converged:
            bounds = ", ".join(f"{bound:.1g}" for bound in pairs.bounds.tolist())
            self.notes = (
                f"the eigenvectors have not converged after {pairs.matvecs} products: the "
                f"eigenvalues are known to within {bounds}",
            )
        return [vector.to(self._point) for vector in pairs.vectors.T]


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


class Between(Space):
    """(1 - t₁ - t₂) θ + t₁ θ' + t₂ θ'': the model is at (0, 0), the others at (1, 0) and (0, 1)."""

    name = "between"
    title = "The loss between models"
    words = "the straight line to another model"
    extent: ClassVar[float] = 0.25

    def __init__(self, surface: LossSurface, to: Sequence[Any]) -> None:
        dims = len(to)
        super().__init__(surface, dims)
        states = [_state(target, surface) for target in to]
        here = surface.point
        ends = [surface.flatten({n: state[n] for n in surface.names}).to(here) for state in states]
        if dims == 2:
            self.words = "the straight lines to two other models"
        self._corners = torch.stack([here, *ends])
        self.directions = self._corners[1:] - here
        names = ["to"] if dims == 1 else [f"to[{number}]" for number in range(dims)]
        for axis, name in enumerate(names):
            self.marks[name] = tuple(float(axis == other) for other in range(dims))
        self.notes = tuple(
            note
            for name, state in zip(names, states, strict=True)
            if (note := self._unmoved_tensors(state, name))
        )

    def place(self, steps: Tensor) -> Tensor:
        """The mean of the corners, each weighed by its coordinate."""
        shares = torch.cat([1 - steps.sum(0, keepdim=True), steps]).to(self._corners)
        return shares @ self._corners

    @classmethod
    def ticks(cls, points: int, extent: float) -> NDArray[np.float64]:
        """From -extent to 1 + extent; the ticks nearest to 0 and 1 are moved onto them."""
        ticks = np.linspace(-extent, 1 + extent, points)
        nearest = [int(np.abs(ticks - end).argmin()) for end in (0.0, 1.0)]
        if nearest[0] == nearest[1]:
            raise ValueError(
                f"`points={points}` are too few for both ends of the line to be among them; give "
                "more."
            )
        ticks[nearest] = 0.0, 1.0
        return ticks

    def _unmoved_tensors(self, state: Mapping[str, Tensor], name: str) -> str | None:
        """Say which tensors differ but do not move along."""
        own = self.surface.functional_model.state
        differing = [
            key
            for key, value in own.items()
            if key in state and key not in self.surface.names and value.is_floating_point()
            if not torch.equal(state[key].to(value), value)
        ]
        if not differing:
            return None
        return (
            f"{len(differing)} buffers or frozen parameters of `{name}` differ (such as "
            f"{differing[0]}); those of the surface are used all along"
        )


def _state(target: Any, surface: LossSurface) -> Mapping[str, Tensor]:
    """The parameters and buffers of a model, a surface or a state dict."""
    if isinstance(target, LossSurface):
        state = target.functional_model.state
    elif isinstance(target, nn.Module):
        module = unwrap(target)
        state = dict(module.named_buffers()) | dict(module.named_parameters())
    elif isinstance(target, Mapping):
        state = dict(target)
    else:
        raise TypeError(
            f"`to` is a {type(target).__name__}; give a model, a LossSurface or a state dict, or "
            "a list of two of them."
        )
    missing = [name for name in surface.names if not isinstance(state.get(name), Tensor)]
    if missing:
        raise ValueError(
            f"`to` has no parameter `{missing[0]}` ({len(missing)} of {len(surface.names)} are "
            "missing); a line leads between two models of the same kind."
        )
    for name, value in surface.params.items():
        if state[name].shape != value.shape:
            raise ValueError(
                f"`{name}` of `to` has shape {tuple(state[name].shape)}, but that of the surface "
                f"has shape {tuple(value.shape)}; a line leads between two models of the same kind."
            )
        if not torch.isfinite(state[name]).all():
            raise ValueError(f"`{name}` of `to` holds values that are nan or infinite.")
    return {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}


def positive(name: str, value: Any) -> float:
    """A setting; refused if it is not a positive finite number."""
    if not is_finite(value) or value <= 0:
        raise ValueError(f"`{name}={value!r}` must be a positive finite number.")
    return float(value)


#: The spaces that directions can be drawn in, by name.
SPACES: dict[str, type[Space]] = {
    space.name: space for space in (InBasisPaths, InWeights, InFilters, InLayers, AlongEigenvectors)
}
