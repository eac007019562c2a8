"""How much the loss rises at worst within a ball."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from flatgauge.estimators import Estimate

ValueAndGradient = Callable[[Tensor], tuple[float, Tensor]]

#: Share of the last move that is repeated (Auto-PGD).
_MOMENTUM = 0.25


class _Stand(NamedTuple):
    """A place on the way up."""

    point: Tensor
    value: float
    gradient: Tensor


def largest_increase(
    loss: ValueAndGradient,
    origin: Tensor,
    *,
    radius: float,
    starts: int,
    steps: int,
    generator: Generator,
) -> Estimate:
    r"""Largest rise of the loss within a ball, found by projected ascent: a lower bound.

    Definition:
        .. math:: \max_{\|u\|_2 \le r} L(u) - L(0)

        The first ascent starts along the gradient, the others in random directions on the
        sphere. Each step goes along the normalised gradient with momentum and is projected onto
        the ball; steps start at 2r and are halved when the loss falls .

    Reference:
        [croce2020reliable]

    Args:
        loss: The loss and its gradient at a displacement.
        origin: The zero displacement; gives length, precision and device.
        radius: The ball's radius r.
        starts: Number of ascents.
        steps: Gradients per ascent.
        generator: Source of randomness, on the CPU.

    Returns:
        The largest rise seen, with the rise of each start in `details`.

    Raises:
        ValueError: If a setting is not positive.
    """
    if not (math.isfinite(radius) and radius > 0):
        raise ValueError(f"the radius {radius!r} must be a positive finite number.")
    if starts < 1 or steps < 1:
        raise ValueError(f"`starts={starts!r}` and `steps={steps!r}` must be at least 1.")
    base, gradient = loss(origin)
    rises = []
    for number in range(starts):
        direction = gradient
        if number > 0 or not gradient.norm() > 0:
            direction = torch.randn(len(origin), generator=generator, dtype=origin.dtype)
        direction = direction.to(origin.device)
        rises.append(_ascend(loss, radius / direction.norm() * direction, radius, steps) - base)
        if math.isinf(rises[-1]):
            break
    spread = {f"start {number}": rise for number, rise in enumerate(rises)}
    # The ball holds its centre, so the worst case is never below the loss there.
    return Estimate(
        max(0.0, *rises),
        lower_bound=True,
        details=spread,
        options={"radius": radius, "starts": starts, "steps": steps},
        notes=("a lower bound: the largest rise that the ascents found",),
    )


def _ascend(loss: ValueAndGradient, start: Tensor, radius: float, steps: int) -> float:
    """Climb from a point of the sphere; returns the highest loss met."""
    here = best = _Stand(start, *loss(start))
    before, step = start, 2 * radius
    for _ in range(steps - 1):
        length = here.gradient.norm()
        if math.isinf(here.value) or not length > 0:
            break
        ahead = _project(here.point + step / length * here.gradient, radius)
        move = (1 - _MOMENTUM) * (ahead - here.point) + _MOMENTUM * (here.point - before)
        point = _project(here.point + move, radius)
        before, here = here.point, _Stand(point, *loss(point))
        if here.value > best.value:
            best = here
        else:  # Back to the highest point, more carefully.
            here, before, step = best, best.point, step / 2
    return best.value


def _project(point: Tensor, radius: float) -> Tensor:
    """The nearest point of the ball."""
    length = point.norm()
    return point * (radius / length) if length > radius else point
