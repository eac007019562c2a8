"""The functional "worst case in a ball": how much the loss rises at most within a distance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Generator, Tensor

from flatgauge.estimators import Estimate
from flatgauge.estimators.probes import branches
from flatgauge.functionals.functional import functional, required
from flatgauge.functionals.top_eigenvalue import MAX_MATVECS, TOLERANCE, top_pair
from flatgauge.geometry import Chart

#: Share of the last move that is repeated (Auto-PGD).
_MOMENTUM = 0.25


class _Stand(NamedTuple):
    """A place on the way up."""

    point: Tensor
    value: float
    gradient: Tensor


@functional("worst case in a ball")
def worst_case(
    chart: Chart,
    *,
    epsilon: float | None = None,
    starts: int = 3,
    steps: int = 10,
    option: str = "epsilon",
    caller: str = "worst_case",
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest rise of the loss within a ball of a geometry, by projected ascent: a lower bound.

    Definition:
        .. math:: \max_{\|u\|_2 \le \varepsilon} L(u) - L(0)

        divided by 1 + L(0) where the geometry says so. The first ascent starts along the
        gradient, the second along the direction of largest curvature (to the side that rises
        more), the others in random directions on the sphere. Each step goes along the normalised
        gradient with momentum and is projected onto the ball; steps start at 2 ε and are halved
        when the loss falls.

    Reference:
        [croce2020reliable]

    Args:
        chart: The loss around the point.
        epsilon: The ball's radius; None for the geometry's default.
        starts: Number of ascents.
        steps: Gradients per ascent.
        option: What the caller calls the radius.
        caller: Who asks, for the message about a missing generator.
        generator: Source of randomness, required.

    Returns:
        The largest rise seen. In `details`: the rise of every start, and what the first two
        orders of the loss predict, ``"first order"`` ε ‖g‖ and ``"second order"`` λ ε² / 2.

    Raises:
        ValueError: If a setting is not positive, the generator is missing, or a loss that is to
            be divided by is not positive.
    """
    source = required(generator, caller)
    radius = chart.epsilon if epsilon is None else epsilon
    if not (math.isfinite(radius) and radius > 0):
        raise ValueError(f"`{option}={radius!r}` must be a positive finite number: it is a radius.")
    if starts < 1 or steps < 1:
        raise ValueError(f"`starts={starts!r}` and `steps={steps!r}` must be at least 1.")
    base, gradient = chart.value_and_gradient(chart.origin)
    scale = 1 + base if chart.per_loss else 1.0
    if scale <= 0:
        raise ValueError(
            f"`{caller}` divides by 1 + loss, but the loss here is {base:.6g}; it is made for "
            "losses that are never negative. Add a constant to the loss."
        )
    top = top_pair(chart, TOLERANCE, MAX_MATVECS, source)
    tries = _directions(chart, gradient, top.vectors[:, 0], radius, branches(source)("starts"))
    details = {}
    for number in range(starts):
        rise = _ascend(chart, next(tries), radius, steps) - base
        details[f"start {number}"] = rise / scale
        if math.isinf(rise):
            break
    # The ball holds its centre, so the worst case is never below the loss there.
    largest = max(0.0, *details.values())
    details["first order"] = radius * float(gradient.norm()) / scale
    details["second order"] = float(top.values[0]) * radius**2 / 2 / scale
    notes = (*chart.notes, "a lower bound: the largest rise that the ascents found")
    if scale < 1:
        notes += ("the loss is negative; 1 + loss is a scale only for losses of at least 0",)
    return Estimate(
        largest,
        lower_bound=True,
        details=details,
        options={option: radius, "starts": starts, "steps": steps},
        notes=notes,
    )


def _directions(
    chart: Chart, gradient: Tensor, top: Tensor, radius: float, generator: Generator
) -> Iterator[Tensor]:
    """Where the ascents start."""
    if gradient.norm() > 0:
        yield _stretched(gradient, radius)
    up = _stretched(top.to(gradient), radius)
    yield max(up, -up, key=chart.value)
    while True:
        yield _stretched(chart.direction(generator), radius)


def _ascend(chart: Chart, start: Tensor, radius: float, steps: int) -> float:
    """Climb from a point of the sphere; returns the highest loss met."""
    here = best = _Stand(start, *chart.value_and_gradient(start))
    before, step = start, 2 * radius
    for _ in range(steps - 1):
        length = here.gradient.norm()
        if math.isinf(here.value) or not length > 0:
            break
        ahead = _project(here.point + step / length * here.gradient, radius)
        move = (1 - _MOMENTUM) * (ahead - here.point) + _MOMENTUM * (here.point - before)
        point = _project(here.point + move, radius)
        before, here = here.point, _Stand(point, *chart.value_and_gradient(point))
        if here.value > best.value:
            best = here
        else:  # Back to the highest point, more carefully.
            here, before, step = best, best.point, step / 2
    return best.value


def _stretched(direction: Tensor, radius: float) -> Tensor:
    """A direction as a point of the sphere; the centre where it has no length."""
    length = direction.norm()
    return radius / length * direction if length > 0 else direction


def _project(point: Tensor, radius: float) -> Tensor:
    """The nearest point of the ball."""
    length = point.norm()
    return point * (radius / length) if length > radius else point
