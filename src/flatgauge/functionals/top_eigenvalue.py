"""The functional "top eigenvalue": how sharp is the sharpest direction?"""

from __future__ import annotations

from torch import Generator

from flatgauge.estimators import Estimate, top_eigenvalues
from flatgauge.estimators.matrix import SupportsMatmul
from flatgauge.estimators.probes import required


def top_eigenvalue(
    operator: SupportsMatmul,
    *,
    caller: str,
    tolerance: float,
    max_matvecs: int,
    generator: Generator | None,
) -> Estimate:
    """The largest eigenvalue, by sign, of the loss's curvature in some geometry.

    Args:
        operator: The curvature.
        caller: Who asks, for the message about a missing generator.
        tolerance: Bound on the error, relative to the value, at which to stop.
        max_matvecs: Most products to spend.
        generator: Source of randomness for the start vector, required.

    Returns:
        The estimate with its error bound; the smallest eigenvalue seen on the way, an inner
        estimate, is in ``details["smallest"]``.
    """
    source = required(
        generator, caller=f"{caller}(surface)", otherwise="call `fg.measure(surface, seed=0)`"
    )
    pairs = top_eigenvalues(
        operator, tolerance=tolerance, max_matvecs=max_matvecs, generator=source
    )
    largest, smallest = float(pairs.values[0]), pairs.opposite
    notes = []
    if -smallest > largest:
        notes.append(
            f"not a minimum: the Hessian has an eigenvalue of {smallest:.3g}, larger in size than "
            "the largest positive one"
        )
    return Estimate(
        largest,
        bound=float(pairs.bounds[0]),
        converged=pairs.converged,
        details={"smallest": smallest, "residual": float(pairs.residuals[0])},
        options={"tolerance": tolerance},
        notes=tuple(notes),
    )
