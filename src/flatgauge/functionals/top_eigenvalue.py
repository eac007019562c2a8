"""The functional "top eigenvalue": how sharp is the sharpest direction?"""

from __future__ import annotations

from torch import Generator

from flatgauge.estimators import Estimate, top_eigenvalues
from flatgauge.estimators.eigen import Eigenpairs
from flatgauge.estimators.power import power_method
from flatgauge.estimators.probes import digest
from flatgauge.functionals.functional import functional, required
from flatgauge.geometry import Chart

#: Bound on an eigenvalue's error, relative to its size, and most products to spend on it.
TOLERANCE, MAX_MATVECS = 1e-3, 300

#: Error of the smallest eigenvalue, relative to its size, up to which it counts as known.
OPPOSITE = 0.1


@functional("top eigenvalue")
def top_eigenvalue(
    chart: Chart,
    *,
    solver: str = "lanczos",
    tolerance: float = TOLERANCE,
    max_matvecs: int = MAX_MATVECS,
    smallest: bool = False,
    caller: str = "top_eigenvalue",
    generator: Generator | None = None,
) -> Estimate:
    """The largest eigenvalue, by sign, of the loss's curvature in a geometry.

    Args:
        chart: The loss around the point.
        solver: ``"lanczos"``, or ``"power"`` for the power method, which finds the eigenvalue of
            largest size, and only if that is positive.
        tolerance: Bound on the error, relative to the value, at which Lanczos stops; for the
            power method, the change of the unit vector.
        max_matvecs: Most products to spend.
        smallest: Whether to go on until the smallest eigenvalue is known too (Lanczos only).
        caller: Who asks, for the message about a missing generator.
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
    source = required(generator, caller)
    if solver == "power":
        if smallest:
            raise ValueError(
                "`smallest=True` needs `solver='lanczos'`: the power method sees one eigenvalue."
            )
        return _by_power(chart, tolerance, max_matvecs, source)
    if solver != "lanczos":
        raise ValueError(f"`solver={solver!r}` is unknown; use 'lanczos' or 'power'.")
    pairs = top_pair(chart, tolerance, max_matvecs, source, smallest=smallest)
    details, notes = _other_end(pairs, tolerance, smallest)
    return Estimate(
        float(pairs.values[0]),
        bound=float(pairs.bounds[0]),
        converged=pairs.converged,
        details={"residual": float(pairs.residuals[0]), **details},
        options={"tolerance": tolerance},
        notes=(*chart.notes, *notes),
    )


def _other_end(
    pairs: Eigenpairs, tolerance: float, asked: bool
) -> tuple[dict[str, float], list[str]]:
    """What is known of the smallest eigenvalue, as details, and what must be said about it."""
    largest, most, bound = float(pairs.values[0]), pairs.opposite, pairs.opposite_bound
    if -most > largest:
        notes = [_saddle(most)]
    elif bound - most > largest:
        notes = [
            f"the smallest eigenvalue may lie as low as {most - bound:.3g}: whether it is larger "
            "in size than the largest is not known; `smallest=True` searches for it"
        ]
    else:
        notes = []
    if bound <= OPPOSITE * abs(most):
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


def top_pair(
    chart: Chart,
    tolerance: float,
    max_matvecs: int,
    generator: Generator,
    *,
    smallest: bool = False,
) -> Eigenpairs:
    """The top eigenvalue and its vector, computed once for all who ask with the same source.

    Args:
        chart: The loss around the point.
        tolerance: Bound on the error, relative to the value.
        max_matvecs: Most products to spend.
        generator: Source of randomness; it is left as it was.
        smallest: Whether to go on until the smallest eigenvalue is known too.

    Returns:
        The pair.
    """
    key = ("top eigenvalue", chart.key, tolerance, max_matvecs, smallest, digest(generator))
    return chart.surface.recall(
        key,
        lambda: top_eigenvalues(
            chart.curvature(),
            tolerance=tolerance,
            max_matvecs=max_matvecs,
            basis=chart.surface.budget.basis(),
            opposite=OPPOSITE if smallest else None,
            generator=generator.clone_state(),
        ),
    )


def _by_power(chart: Chart, tolerance: float, max_matvecs: int, generator: Generator) -> Estimate:
    """Algorithm 1 of Rangamani et al. 2019."""
    found = power_method(
        chart.curvature(), tolerance=tolerance, max_matvecs=max_matvecs, generator=generator
    )
    notes = list(chart.notes)
    details = {"residual": found.residual, "change of the vector": found.change}
    if found.negative:
        notes.append(
            f"{_saddle(found.value)}: the power method finds that one, its vector changes sign "
            "at every step, and it never converges; use `solver='lanczos'`"
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


def _saddle(smallest: float) -> str:
    return (
        f"not a minimum: the Hessian has an eigenvalue of {smallest:.3g}, larger in size than "
        "the largest positive one"
    )
