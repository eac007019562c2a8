"""The line from a point to another, or the plane through three: straight ways in weight space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flatgauge.analysis.landscapes.space import Space
from flatgauge.surface.model import unwrap
from flatgauge.surface.surface import LossSurface


class Between(Space):
    """(1 - t₁ - t₂) θ + t₁ θ' + t₂ θ'': the model is at (0, 0), the others at (1, 0) and (0, 1).

    Args:
        surface: The first point, and what is evaluated.
        to: The others: models, surfaces, or state dicts.
    """

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
