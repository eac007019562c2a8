"""The functional "worst case in a ball": how much the loss rises at most within a distance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from flatgauge.arguments import check_radius
from flatgauge.estimators import Estimate
from flatgauge.estimators.probes import branches
from flatgauge.functionals.functional import functional, required
from flatgauge.functionals.top_eigenvalue import MAX_MATVECS, TOLERANCE, top_pair
from flatgauge.geometry import Chart

#: Auto-PGD: the share of a move that goes ahead (the rest repeats the last one), the share of
#: steps that must rise, and how long it waits before halving its step, in shares of all steps:
#: at first, and less every time.
_AHEAD, _RISING, _FIRST, _LESS = 0.75, 0.75, 0.22, 0.03

#: What rounding leaves of a loss, in units of its last digit, and what part of a rise is worth a
#: word.
_ROUNDING, _SEEN = 8.0, 1e-2

#: Ascents from random starts begin in a ball larger by this factor.
_FAR = 2.0


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
        more), the others in random directions and for half of their steps in a ball twice as large,
        out of which they are drawn in. Each is an Auto-PGD: steps along the
        normalised gradient with momentum, projected onto the ball; they start at 2 ε and are
        halved, back at the highest point, whenever too few of the last ones rose.

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
        The largest rise seen; infinite if the ball reaches a pole. Where it is smaller than the
        loss, with a bound on what rounding of the loss leaves in it. In `details`: the
        rise of every start, and what the first two orders of the loss predict, ``"first order"``
        ε ‖g‖ and ``"second order"`` λ ε² / 2.

    Raises:
        ValueError: If a setting is not positive, the generator is missing, or a loss that is to
            be divided by is not positive.
    """
    source = required(generator, caller)
    radius = chart.epsilon if epsilon is None else epsilon
    check_radius(option, radius, chart.surface.dtype)
    if starts < 1 or steps < 1:
        raise ValueError(f"`starts={starts!r}` and `steps={steps!r}` must be at least 1.")
    if radius >= chart.limit:
        note = (
            f"a ball of this radius holds points without a finite loss, the first of them at a "
            f"distance of {chart.limit:.3g}; take a smaller `{option}`"
        )
        return Estimate(math.inf, options={option: radius}, notes=(*chart.notes, note))
    base, gradient = chart.value_and_gradient(chart.origin)
    scale = 1 + base if chart.per_loss else 1.0
    if scale <= 0:
        raise ValueError(
            f"`{caller}` divides by 1 + loss, but the loss here is {base:.6g}; it is made for "
            "losses that are never negative. Add a constant to the loss."
        )
    top = top_pair(chart, TOLERANCE, MAX_MATVECS, source)
    tries = _ascents(chart, gradient, top.vectors[:, 0], radius, steps, branches(source)("starts"))
    details = {}
    for number in range(starts):
        rise = next(tries) - base
        details[f"start {number}"] = rise / scale
        if math.isinf(rise):
            break
    # The ball holds its centre, so the worst case is never below the loss there.
    largest = max(0.0, *details.values())
    details["first order"] = radius * float(gradient.norm()) / scale
    details["second order"] = float(top.values[0]) * radius**2 / 2 / scale
    notes = (*chart.notes, "a lower bound: the largest rise that the ascents found")
    rounding = _ROUNDING * torch.finfo(chart.surface.dtype).eps * abs(base) / scale
    if rounding > _SEEN * largest:
        notes += (
            "hardly more than what rounding leaves of the loss; take a larger radius, or measure "
            "in double precision (`dtype=torch.float64`)",
        )
    if scale < 1:
        notes += ("the loss is negative; 1 + loss is a scale only for losses of at least 0",)
    return Estimate(
        largest,
        bound=rounding if largest < abs(base) / scale else None,
        lower_bound=True,
        details=details,
        options={option: radius, "starts": starts, "steps": steps},
        notes=notes,
    )


def _ascents(
    chart: Chart, gradient: Tensor, top: Tensor, radius: float, steps: int, generator: Generator
) -> Iterator[float]:
    """The highest losses met by ascents from one start after the other."""
    if gradient.norm() > 0:
        yield _ascend(chart, _stretched(gradient, radius), radius, steps).value
    up = _stretched(top.to(gradient), radius)
    yield _ascend(chart, max(up, -up, key=chart.value), radius, steps).value
    while True:
        # From outside: on the ball itself, the first long step leads all of them to one place.
        far, half = min(_FAR * radius, (radius + chart.limit) / 2), steps // 2
        start = _stretched(chart.direction(generator), far)
        if half:
            start = _ascend(chart, start, far, half).point
        yield _ascend(chart, _stretched(start, radius), radius, steps - half).value


def _ascend(chart: Chart, start: Tensor, radius: float, steps: int) -> _Stand:
    """Climb from a point of the sphere by Auto-PGD; returns the highest place met."""
    here = best = _Stand(start, *chart.value_and_gradient(start))
    before, step = start, 2 * radius
    window = max(1, round(_FIRST * steps))
    taken = rising = 0
    highest, shortened = best.value, True
    for _ in range(steps - 1):
        length = here.gradient.norm()
        if math.isinf(here.value) or not length > 0:
            break
        ahead = _project(here.point + step / length * here.gradient, radius)
        move = _AHEAD * (ahead - here.point) + (1 - _AHEAD) * (here.point - before)
        point = _project(here.point + move, radius)
        last, before = here.value, here.point
        here = _Stand(point, *chart.value_and_gradient(point))
        best = max(best, here, key=lambda stand: stand.value)
        taken, rising = taken + 1, rising + (here.value > last)
        if taken == window:  # Too little gained: back to the highest point, with half the step.
            stuck = best.value == highest and not shortened
            shortened = stuck or rising < _RISING * window
            if shortened:
                here, before, step = best, best.point, step / 2
            highest, taken, rising = best.value, 0, 0
            window = max(window - round(_LESS * steps), 1)
    return best


def _stretched(direction: Tensor, radius: float) -> Tensor:
    """A direction as a point of the sphere; the centre where it has no length."""
    length = direction.norm()
    return radius / length * direction if length > 0 else direction


def _project(point: Tensor, radius: float) -> Tensor:
    """The nearest point of the ball."""
    length = point.norm()
    return point * (radius / length) if length > radius else point
