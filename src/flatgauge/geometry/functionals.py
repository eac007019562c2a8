"""Functionals: what is asked of the loss around a point, in any geometry.

In: a chart (`flatgauge.geometry.chart`), which alone knows the model, the data and the geometry.
Out: an `Estimate`. There are four: the top eigenvalue of the curvature, its trace, the worst case
in a ball (by Auto-PGD) and the expectation under noise. Each registers itself in `FUNCTIONALS`;
`cell` asks any of them in any geometry.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Generator, Tensor

from flatgauge.curvature.block_diagonal import DEFAULT_PROBES
from flatgauge.estimators.eigenvalues import Eigenpairs, power_method, top_eigenvalues
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import child_generator, digest, is_finite, require_generator
from flatgauge.estimators.trace import BLOCK
from flatgauge.estimators.trace import trace as estimated_trace
from flatgauge.geometry.chart import GEOMETRIES, Chart, ExactTrace
from flatgauge.geometry.chart import chart as chart_of
from flatgauge.surface.surface import LossSurface

P = ParamSpec("P")

#: The functionals by name: functions of a chart and keyword options.
FUNCTIONALS: dict[str, Callable[..., Estimate]] = {}

#: Most pairs of displacements of one expectation.
_MOST_PAIRS = 10**6

#: Bound on an eigenvalue's error, relative to its size, and most products to spend on it.
_TOLERANCE, _MAX_MATVECS = 1e-3, 300

#: Error of the smallest eigenvalue, relative to its size, up to which it counts as known.
_OPPOSITE = 0.1

#: Auto-PGD: the share of a move that goes ahead (the rest repeats the last one), the share of
#: steps that must rise, and the number of steps before its step is halved, as shares of all
#: steps: at first, and by how much it falls each time.
_AHEAD, _RISING, _FIRST, _LESS = 0.75, 0.75, 0.22, 0.03

#: Rounding of a loss, in units of its last digit, and the part of a rise from which it is noted.
_ROUNDING, _NOTED = 8.0, 1e-2

#: Ascents from random starts begin in a ball larger by this factor.
_FAR = 2.0


def functional(name: str) -> Callable[[Callable[P, Estimate]], Callable[P, Estimate]]:
    """Register a function of a chart as the functional of that name."""

    def register(function: Callable[P, Estimate]) -> Callable[P, Estimate]:
        FUNCTIONALS[name] = function
        return function

    return register


def check_pairs(pairs: int) -> None:
    """Refuse a number of antithetic pairs that gives no error, or that would never finish."""
    if pairs < 2:
        raise ValueError(f"`pairs={pairs!r}` gives no standard error; draw at least 2 pairs.")
    if pairs > _MOST_PAIRS:
        raise ValueError(
            f"`pairs={pairs!r}` asks for {2 * pairs:,} passes over all samples; draw at most "
            f"{_MOST_PAIRS:,} pairs. The standard error falls with the square root of their "
            "number: 10,000 pairs give a hundredth of the spread."
        )


@functional("top eigenvalue")
def top_eigenvalue(
    chart: Chart,
    *,
    solver: str = "lanczos",
    tolerance: float = _TOLERANCE,
    max_matvecs: int = _MAX_MATVECS,
    smallest: bool = False,
    generator: Generator,
) -> Estimate:
    r"""The largest eigenvalue, by sign, of the loss's curvature in a geometry.

    Definition:
        .. math:: \lambda_{\max}\left(\partial^2 L / \partial u^2\right)

    Args:
        chart: The loss around the point.
        solver: ``"lanczos"``, or ``"power"`` for the power method, which finds the eigenvalue of
            largest size, and only if that is positive.
        tolerance: Bound on the error, relative to the value, at which Lanczos stops; for the
            power method, the change of the unit vector.
        max_matvecs: Most products to spend.
        smallest: Whether to go on until the smallest eigenvalue is known too (Lanczos only).
        generator: Source of randomness for the start vector, required.

    Returns:
        The estimate with its error bound. What is known of the smallest eigenvalue is in
        `details`: ``"smallest"`` with ``"smallest bound"`` where it is known to a tenth, or is
        zero to within the tolerance of the largest; else between which numbers it lies,
        ``"smallest at least"`` and ``"smallest at most"``.

    Raises:
        ValueError: If the solver does not exist or cannot find the smallest, or the generator is
            missing.
    """
    if solver == "power":
        if smallest:
            raise ValueError(
                "`smallest=True` needs `solver='lanczos'`: the power method sees one eigenvalue."
            )
        return _power_estimate(chart, tolerance, max_matvecs, generator)
    if solver != "lanczos":
        raise ValueError(f"`solver={solver!r}` is unknown; use 'lanczos' or 'power'.")
    pairs = top_eigenpair(chart, tolerance, max_matvecs, generator, smallest=smallest)
    details, notes = _describe_smallest(pairs, tolerance, smallest)
    return Estimate(
        float(pairs.values[0]),
        bound=float(pairs.bounds[0]),
        converged=pairs.converged,
        details={"residual": float(pairs.residuals[0]), **details},
        options={"tolerance": tolerance},
        notes=(*chart.notes, *notes),
    )


def _describe_smallest(
    pairs: Eigenpairs, tolerance: float, asked: bool
) -> tuple[dict[str, float], list[str]]:
    """What is known of the smallest eigenvalue, as details, and notes about it."""
    largest, most, bound = float(pairs.values[0]), pairs.opposite, pairs.opposite_bound
    if -most > largest:
        notes = [_saddle_note(most)]
    elif bound - most > largest:
        notes = [
            f"the smallest eigenvalue may lie as low as {most - bound:.3g}: whether it is larger "
            "in size than the largest is not known; `smallest=True` searches for it"
        ]
    else:
        notes = []
    if bound <= _OPPOSITE * abs(most):
        found = {"smallest": most, "smallest bound": bound}
        return found | {"smallest residual": pairs.opposite_residual}, notes
    if bound + abs(most) <= tolerance * max(abs(largest), abs(most)):
        return {"smallest": 0.0, "smallest bound": bound + abs(most)}, notes
    if asked:
        notes = [
            *notes,
            f"after {pairs.matvecs} products the smallest eigenvalue is known to lie between "
            f"{most - bound:.3g} and {most:.3g}; pass a larger `max_matvecs`",
        ]
    return {"smallest at least": most - bound, "smallest at most": most}, notes


def top_eigenpair(
    chart: Chart,
    tolerance: float,
    max_matvecs: int,
    generator: Generator,
    *,
    smallest: bool = False,
) -> Eigenpairs:
    """The top eigenvalue and its vector, computed once for equal states of the generator."""
    key = ("top eigenvalue", chart.key, tolerance, max_matvecs, smallest, digest(generator))
    return chart.surface.cache.get(
        key,
        lambda: top_eigenvalues(
            chart.curvature(),
            tolerance=tolerance,
            max_matvecs=max_matvecs,
            basis=chart.surface.budget.lanczos_vectors(),
            opposite=_OPPOSITE if smallest else None,
            generator=generator.clone_state(),
        ),
    )


def _power_estimate(
    chart: Chart, tolerance: float, max_matvecs: int, generator: Generator
) -> Estimate:
    """Algorithm 1 of Rangamani et al. 2019."""
    found = power_method(
        chart.curvature(), tolerance=tolerance, max_matvecs=max_matvecs, generator=generator
    )
    notes = list(chart.notes)
    details = {"residual": found.residual, "change of the vector": found.change}
    if found.negative:
        notes.append(
            f"{_saddle_note(found.value)}: the power method finds that one, its vector changes "
            "sign at every step, and it never converges; use `solver='lanczos'`"
        )
        details |= {"smallest": found.value, "smallest bound": found.residual}
    elif not found.converged:
        notes.append(
            f"the vector still changes by {found.change:.1g} at each of {max_matvecs} products; "
            "raise `max_matvecs`, or use `solver='lanczos'`"
        )
    return Estimate(
        found.value,
        bound=found.residual,
        converged=found.converged,
        details=details,
        options={"solver": "power", "tolerance": tolerance},
        notes=tuple(notes),
    )


def _saddle_note(smallest: float) -> str:
    return (
        f"not a minimum: the Hessian has an eigenvalue of {smallest:.3g}, larger in size than "
        "the largest positive one"
    )


@functional("trace")
def trace(
    chart: Chart,
    *,
    method: str = "sweep",
    probes: int | None = None,
    tolerance: float | None = None,
    max_matvecs: int = 500,
    all_columns: bool = False,
    generator: Generator | None = None,
) -> Estimate:
    r"""The trace of the loss's curvature in a geometry.

    Definition:
        .. math:: \operatorname{tr} \partial^2 L / \partial u^2

    Args:
        chart: The loss around the point.
        method: ``"sweep"`` for the exact sweep and Hutch++ for the rest; ``"hutch++"`` or
            ``"hutchinson"`` for all.
        probes: Products to spend, as a fixed budget; 48 if no ``tolerance`` is given.
        tolerance: Error to reach instead, relative to the value, with 95 % confidence.
        max_matvecs: Most products to spend on reaching the tolerance.
        all_columns: Whether the sweep is to be exact also with 64 or more outputs.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with its standard error; in `details`, the part that vanishes with the
        gradient, where weights are no linear functions of the coordinates.

    Raises:
        ValueError: If an option is out of range, or a generator is needed and missing.
    """
    if probes is None and tolerance is None:
        probes = DEFAULT_PROBES
    if method == "sweep":
        exact_part = chart.exact_trace(all_columns=all_columns, generator=generator)
    else:
        exact_part = ExactTrace(Estimate(0.0, exact=True), chart.curvature())
    known, rest, notes = exact_part.value, exact_part.rest, (*chart.notes, *exact_part.notes)
    first = chart.first_order()
    details = {} if first is None else {"first order": first}
    if rest is None:
        return replace(known, layers={}, notes=notes, details=details)
    budget, length = chart.surface.budget, rest.shape[0]
    estimate = estimated_trace(
        rest,
        probes=probes,
        tolerance=tolerance,
        max_matvecs=max_matvecs,
        method="hutch++" if method == "sweep" else method,
        # A quarter as much is taken by the signs that the basis comes from.
        basis=max(1, 4 * budget.lanczos_vectors(length) // 5),
        together=budget.hvp_columns(BLOCK),
        generator=generator,
    )
    exact = estimate.exact and known.exact and chart.surface.try_out_products() != "differences"
    return replace(
        estimate,
        value=estimate.value + known.value,
        stderr=math.hypot(estimate.stderr, known.stderr),
        exact=exact,
        # Nothing was estimated where so few weights are left that all their columns were taken.
        notes=(*(chart.notes if exact else notes), *estimate.notes),
        details={**estimate.details, **details},
    )


@functional("worst case in a ball")
def worst_case(
    chart: Chart,
    *,
    epsilon: float | None = None,
    starts: int = 3,
    steps: int = 10,
    option: str = "epsilon",
    generator: Generator,
) -> Estimate:
    r"""Largest rise of the loss within a ball of a geometry, by projected ascent: a lower bound.

    Definition:
        .. math:: \max_{\|u\|_2 \le \varepsilon} L(u) - L(0)

        divided by 1 + L(0) where the geometry says so. The first ascent starts along the
        gradient, the second along the direction of largest curvature (to the side that rises
        more), the others in random directions and for half of their steps in a ball twice as large,
        from which they are projected back. Each is an Auto-PGD: steps along the
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
    radius = chart.epsilon if epsilon is None else epsilon
    _check_radius(option, radius, chart.surface.dtype)
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
            f"the worst case divides by 1 + loss, but the loss here is {base:.6g}; it is made for "
            "losses that are never negative. Add a constant to the loss."
        )
    top = top_eigenpair(chart, _TOLERANCE, _MAX_MATVECS, generator)
    drawn = child_generator(generator, "starts")
    tries = _ascents(chart, gradient, top.vectors[:, 0], radius, steps, drawn)
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
    if rounding > _NOTED * largest:
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


class _Iterate(NamedTuple):
    """A point of an ascent."""

    point: Tensor
    value: float
    gradient: Tensor


def _ascents(
    chart: Chart, gradient: Tensor, top: Tensor, radius: float, steps: int, generator: Generator
) -> Iterator[float]:
    """The highest losses found by ascents, one start after the other."""
    if gradient.norm() > 0:
        yield _ascend(chart, _on_sphere(gradient, radius), radius, steps).value
    up = _on_sphere(top.to(gradient), radius)
    yield _ascend(chart, max(up, -up, key=chart.value), radius, steps).value
    while True:
        # From outside: on the ball itself, the first long step leads all of them to one place.
        far, half = min(_FAR * radius, (radius + chart.limit) / 2), steps // 2
        start = _on_sphere(chart.direction(generator), far)
        if half:
            start = _ascend(chart, start, far, half).point
        yield _ascend(chart, _on_sphere(start, radius), radius, steps - half).value


def _ascend(chart: Chart, start: Tensor, radius: float, steps: int) -> _Iterate:
    """Climb from a point of the sphere by Auto-PGD; returns the highest point found."""
    here = best = _Iterate(start, *chart.value_and_gradient(start))
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
        here = _Iterate(point, *chart.value_and_gradient(point))
        best = max(best, here, key=lambda iterate: iterate.value)
        taken, rising = taken + 1, rising + (here.value > last)
        if taken == window:  # Too little gained: back to the highest point, with half the step.
            stuck = best.value == highest and not shortened
            shortened = stuck or rising < _RISING * window
            if shortened:
                here, before, step = best, best.point, step / 2
            highest, taken, rising = best.value, 0, 0
            window = max(window - round(_LESS * steps), 1)
    return best


def _on_sphere(direction: Tensor, radius: float) -> Tensor:
    """A direction as a point of the sphere; the centre where it has no length."""
    length = direction.norm()
    return radius / length * direction if length > 0 else direction


def _project(point: Tensor, radius: float) -> Tensor:
    """The nearest point of the ball."""
    length = point.norm()
    return point * (radius / length) if length > radius else point


@functional("expectation")
def expectation(
    chart: Chart,
    *,
    sigma: float | None = None,
    pairs: int = 16,
    generator: Generator,
) -> Estimate:
    r"""Mean change of the loss under noise in a geometry, in size, by antithetic pairs.

    Definition:
        .. math:: |E\,L(u) - L(0)|

        with u the geometry's noise of size σ. Each draw is the mean over u and -u, which
        cancels every odd order: the gradient does not add to the error.

    Args:
        chart: The loss around the point.
        sigma: The size of the noise; None for the geometry's default.
        pairs: Number of pairs, at least 2 and at most a million.
        generator: Source of randomness, required.

    Returns:
        The mean with its standard error, its sign in ``details["signed"]``; infinite if some
        displacement has infinite loss.

    Raises:
        ValueError: If `sigma` is not positive, there are fewer than two pairs or more than a
            million, or the generator is missing.
    """
    sigma = chart.sigma if sigma is None else sigma
    _check_radius("sigma", sigma, chart.surface.dtype)
    check_pairs(pairs)
    base = chart.value(chart.origin)
    rises = []
    for _ in range(pairs):
        u = chart.noise(sigma, generator)
        rises.append((chart.value(u) + chart.value(-u)) / 2 - base)
    draws = torch.tensor(rises, dtype=torch.float64)
    options = {"sigma": sigma, "pairs": pairs, **chart.noise_settings}
    if not torch.isfinite(draws).all():
        share = int((~torch.isfinite(draws)).sum())
        note = f"the loss overflows at {share} of {pairs} pairs; take a smaller `sigma`"
        return Estimate(math.inf, converged=False, options=options, notes=(*chart.notes, note))
    mean, stderr = float(draws.mean()), float(draws.std()) / math.sqrt(pairs)
    notes = chart.notes
    if abs(mean) < 2 * stderr:
        notes += ("not distinguishable from zero; draw more `pairs` or take a larger `sigma`",)
    return Estimate(
        abs(mean), stderr=stderr, details={"signed": mean}, options=options, notes=notes
    )


def cell(
    surface: LossSurface,
    *,
    geometry: str,
    functional: str,
    parameters: str = "all",
    generator: Generator | None = None,
    **options: Any,
) -> Estimate:
    """Ask a functional of the loss in a geometry: one cell of the grid.

    Measures with names of their own are cells with their defaults; see `flatgauge catalogue`.

    Args:
        surface: Where to measure.
        geometry: ``"weights"``, ``"per tensor"``, ``"per weight"``, ``"basis paths"`` or
            ``"balanced"``.
        functional: ``"top eigenvalue"``, ``"trace"``, ``"worst case in a ball"`` or
            ``"expectation"``.
        parameters: Which tensors take part: ``"all"`` trainable ones, or the weights of
            ``"layers"`` only.
        generator: Source of randomness, required where anything is drawn.
        **options: Of the functional and of the geometry.

    Returns:
        The estimate.

    Raises:
        TypeError: If `surface` is not a surface.
        ValueError: If there is no such geometry or functional, or an option is out of range.

    Example:
        >>> from flatgauge.surface.examples import two_weights
        >>> for a, b in ((2.0, 3.0), (20.0, 0.3)):  # the same function
        ...     found = cell(two_weights(a, b), geometry="balanced", functional="trace")
        ...     print(round(found.value, 9))
        24.0
        24.0
    """
    if not isinstance(surface, LossSurface):
        raise TypeError(
            f"`cell` measures a LossSurface, but got a {type(surface).__name__}; make one with "
            "LossSurface(model, loss, data)."
        )
    if functional not in FUNCTIONALS:
        raise ValueError(
            f"there is no functional {functional!r}; the functionals are {', '.join(FUNCTIONALS)}."
        )
    function = FUNCTIONALS[functional]
    if inspect.signature(function).parameters["generator"].default is not None:
        require_generator(
            generator, caller="cell(surface)", otherwise="call `fg.measure(surface, seed=0)`"
        )
    own = GEOMETRIES[geometry].options if geometry in GEOMETRIES else ()
    chosen = {key: options.pop(key) for key in own if key in options}
    where = chart_of(surface, geometry, parameters, **chosen)
    spent = where.surface.matvecs
    found = function(where, generator=generator, **options)
    if where.surface is not surface:
        surface.matvecs += where.surface.matvecs - spent
    settings = where.settings | ({} if parameters == "all" else {"parameters": parameters})
    return replace(
        found,
        options={**found.options, **settings},
        details={**found.details, **where.details},
    )


def _check_radius(name: str, value: Any, dtype: torch.dtype) -> None:
    """Refuse a radius that is not positive, or whose square is infinite."""
    if not is_finite(value) or value <= 0:
        raise ValueError(f"`{name}={value!r}` must be a positive finite number: it is a radius.")
    largest = math.sqrt(torch.finfo(dtype).max)
    if value > largest:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"`{name}={value!r}` is too large a radius: its square overflows in {kind}, which "
            f"holds radii up to {largest:.2g}; take a smaller one."
        )
