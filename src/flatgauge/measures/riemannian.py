"""The largest eigenvalue of the Hessian in units of the parameters' own size."""

from __future__ import annotations

import torch
from torch import Generator

from flatgauge.curvature import Hessian, Scaled
from flatgauge.estimators import Estimate
from flatgauge.functionals import top_eigenvalue
from flatgauge.measures.registry import measure
from flatgauge.precision import wide
from flatgauge.surface import LossSurface

_COST = "about 6 to 25 Hessian products at the default tolerance"


@measure(
    symbol="λ_max(DHD), D = ‖θ_i‖",
    paper="Rangamani et al. 2019, Def. 3 and Prop. 2.5",
    geometry="per tensor",
    functional="top eigenvalue",
    invariant_to={"layerwise", "permutation"},
    cost=_COST,
    needs=("products",),
)
def riemannian_max_eigenvalue(
    surface: LossSurface,
    *,
    tolerance: float = 1e-3,
    max_matvecs: int = 300,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest eigenvalue of the Hessian where each parameter tensor has norm one.

    Definition:
        .. math:: \lambda_{\max}(D H D), \qquad D = \operatorname{diag}(\|\theta_i\|_2)

        with one norm for each parameter tensor, weights and biases. It is the spectral norm of the
        Riemannian Hessian under the metric
        :math:`\sum_i \langle\eta_i, \xi_i\rangle / \|\theta_i\|^2`. A tensor of zeros does not
        take part. The smallest eigenvalue that was seen on the way is in
        ``details["smallest"]``: the true one lies at or below it.

    Invariance:
        layerwise, permutation. (A shift of the outputs changes the size of the last bias.)

    Cost:
        Lanczos: about 6 to 25 Hessian products at the default tolerance.

    Reference:
        [rangamani2019scale]

    Args:
        surface: Where to measure.
        tolerance: Bound on the error, relative to the value, at which to stop.
        max_matvecs: Most products to spend.
        generator: Source of randomness for the start vector, required.

    Returns:
        The estimate with its error bound.

    Raises:
        ValueError: If an option is out of range, or the generator is missing.

    Example:
        With two scalar weights, D is |θ|, and the Hessian [[18, 24], [24, 8]] at (2, 3) becomes
        [[72, 144], [144, 72]]:

        >>> from flatgauge.examples import two_weights
        >>> for surface in (two_weights(2.0, 3.0), two_weights(20.0, 0.3)):  # the same function
        ...     source = Generator().manual_seed(0)
        ...     print(round(riemannian_max_eigenvalue(surface, generator=source).value, 9))
        216.0
        216.0
    """
    norms = [
        torch.full_like(wide(part), float(wide(part).norm())).reshape(-1)
        for part in surface.params.values()
    ]
    return top_eigenvalue(
        Scaled(Hessian(surface), by=torch.cat(norms)),
        caller="riemannian_max_eigenvalue",
        tolerance=tolerance,
        max_matvecs=max_matvecs,
        generator=generator,
    )


@measure(
    symbol="λ_max(DHD), D = |θ|",
    paper="Rangamani et al. 2019, §6",
    geometry="per weight",
    functional="top eigenvalue",
    invariant_to={"layerwise", "nodewise", "rows", "permutation"},
    cost=_COST,
    needs=("products",),
)
def riemannian_max_eigenvalue_nodewise(
    surface: LossSurface,
    *,
    tolerance: float = 1e-3,
    max_matvecs: int = 300,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest eigenvalue of the Hessian in units of every parameter's own size.

    Definition:
        .. math:: \lambda_{\max}(D H D), \qquad D = \operatorname{diag}(|\theta|)

        The smallest eigenvalue that was seen on the way is in ``details["smallest"]``: the true
        one lies at or below it.

    Invariance:
        layerwise, nodewise, rows, permutation. (A shift of the outputs changes the last bias.)

    Cost:
        Lanczos: about 6 to 25 Hessian products at the default tolerance.

    Reference:
        [rangamani2019scale]

    Args:
        surface: Where to measure.
        tolerance: Bound on the error, relative to the value, at which to stop.
        max_matvecs: Most products to spend.
        generator: Source of randomness for the start vector, required.

    Returns:
        The estimate with its error bound.

    Raises:
        ValueError: If an option is out of range, or the generator is missing.

    Example:
        >>> from flatgauge.examples import two_weights
        >>> source = Generator().manual_seed(0)
        >>> estimate = riemannian_max_eigenvalue_nodewise(two_weights(2.0, 3.0), generator=source)
        >>> round(estimate.value, 9)
        216.0
    """
    return top_eigenvalue(
        Scaled(Hessian(surface), by=surface.point.abs()),
        caller="riemannian_max_eigenvalue_nodewise",
        tolerance=tolerance,
        max_matvecs=max_matvecs,
        generator=generator,
    )
