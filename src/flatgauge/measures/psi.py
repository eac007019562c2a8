"""The loss as a function of the values of basis paths: PSI-flatness.

Values depend on the skeleton. The default is the strongest one; the paper's is the diagonal one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Generator

from flatgauge.estimators import Estimate
from flatgauge.geometry import chart
from flatgauge.grid import cell
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface

_CLAIMS = {"layerwise", "nodewise", "rows", "permutation", "output_shift"}
_GEOMETRY = "basis paths"

#: The diagonal skeleton follows the order of the units; log|v| sees the size of the last bias.
_GIVEN_UP = {("skeleton", "diagonal"): ("permutation",), ("relative", True): ("output_shift",)}


def _half_limit(surface: LossSurface, options: Mapping[str, Any]) -> float | None:
    """The default radius and truncation: half of min |u_b|, None where nothing limits them."""
    if options["relative"]:
        return None
    found = chart(surface, _GEOMETRY, options["parameters"], skeleton=options["skeleton"])
    return found.epsilon if math.isfinite(found.limit) else None


@measure(
    symbol="λ_max(∂²L/∂v²)",
    paper="an open cell of Yi et al. 2019, whose skeleton is the diagonal one",
    geometry=_GEOMETRY,
    functional="top eigenvalue",
    invariant_to=_CLAIMS,
    cost="about 6 to 25 Hessian products at the default tolerance",
    needs=("products",),
    given_up=_GIVEN_UP,
)
def psi_max_eigenvalue(
    surface: LossSurface,
    *,
    skeleton: str = "strongest",
    relative: bool = False,
    parameters: str = "all",
    solver: str = "lanczos",
    tolerance: float = 1e-3,
    max_matvecs: int = 300,
    smallest: bool = False,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest eigenvalue of the Hessian by path values; strongest skeleton by default.

    Definition:
        .. math:: \lambda_{\max}\left(\frac{\partial^2 L}{\partial v^2}\right)

        with v the values of the m - H basis paths. What is known of the smallest
        eigenvalue is in `details`: ``"smallest"`` with ``"smallest bound"``, or the numbers
        between which it lies.

    Invariance:
        layerwise, nodewise, rows, permutation, output_shift. (Not permutation with
        ``skeleton="diagonal"``, or where the strongest skeleton is tied, which is told; not
        output_shift with ``relative=True``.)

    Cost:
        Lanczos: about 6 to 25 Hessian products at the default tolerance.

    Reference:
        [yi2019positively]

    Args:
        surface: Where to measure.
        skeleton: ``"strongest"``, or ``"diagonal"`` for the paper's, which depends on the order of
            the units, and whose values differ by orders of magnitude.
        relative: Whether log|v| is moved in the place of v, which spans many orders of magnitude.
        parameters: ``"all"`` trainable ones, or the weights of ``"layers"`` only.
        solver: ``"lanczos"``, or ``"power"`` for the power method, which finds the eigenvalue of
            largest size, and does not converge where that is negative, which is told.
        tolerance: Bound on the error, relative to the value, at which Lanczos stops; for the
            power method, the change of the unit vector.
        max_matvecs: Most products to spend.
        smallest: Whether to go on until the smallest eigenvalue is known too: near a minimum
            five to ten times as many products.
        generator: Source of randomness for the start vector, required.

    Returns:
        The estimate with its error bound.

    Raises:
        ValueError: If an option is out of range, parameters are frozen, or a generator is needed
            and missing.
        UnsupportedGraphError: If the model has no basis paths.

    Example:
        The loss ``(b relu(a))²`` is v² in the value v = ab of its only path:

        >>> from flatgauge.examples import two_weights
        >>> for surface in (two_weights(2.0, 3.0), two_weights(20.0, 0.3)):  # the same function
        ...     source = Generator().manual_seed(0)
        ...     print(round(psi_max_eigenvalue(surface, generator=source).value, 9))
        2.0
        2.0
    """
    return cell(
        surface,
        geometry=_GEOMETRY,
        functional="top eigenvalue",
        skeleton=skeleton,
        relative=relative,
        parameters=parameters,
        solver=solver,
        tolerance=tolerance,
        max_matvecs=max_matvecs,
        smallest=smallest,
        caller="psi_max_eigenvalue",
        generator=generator,
    )


@measure(
    symbol="tr ∂²L/∂v²",
    paper="Yi et al. 2019, Definition 4.1, whose skeleton is the diagonal one",
    geometry=_GEOMETRY,
    functional="trace",
    invariant_to=_CLAIMS,
    cost="two sweeps (2 × classes + 5 gradients) where exact, 48 Hessian products for the rest",
    needs=("diagonal",),
    given_up=_GIVEN_UP,
)
def psi_trace(
    surface: LossSurface,
    *,
    skeleton: str = "strongest",
    relative: bool = False,
    parameters: str = "all",
    method: str = "sweep",
    probes: int | None = None,
    tolerance: float | None = None,
    max_matvecs: int = 500,
    all_columns: bool = False,
    generator: Generator | None = None,
) -> Estimate:
    r"""Trace of the Hessian by path values; strongest skeleton by default.

    Definition:
        .. math:: \operatorname{tr} \frac{\partial^2 L}{\partial v^2}
                  = \sum_k \frac{\partial^2 L}{\partial v_k^2}

        with v the values of the m - H basis paths. For a path value that no weight is divided by,
        the second derivative is its weight's, over (P R)². For the *roots*, each of which scales
        all that leaves the hidden units of its run, it comes out of a second sweep for runs of
        one or two units; for longer runs and residual streams by Hessian products, exactly where
        there are no more of them than `probes`, else by Hutch++ over them alone. The part of the
        trace that is of first order (zero where the gradient is) is in
        ``details["first order"]``.

    Invariance:
        layerwise, nodewise, rows, permutation, output_shift. (Not permutation with
        ``skeleton="diagonal"``, or where the strongest skeleton is tied, which is told; not
        output_shift with ``relative=True``.)

    Cost:
        Two sweeps (the first is shared with other measures); products for what is left.

    Reference:
        [yi2019positively]

    Args:
        surface: Where to measure.
        skeleton: ``"strongest"``, or ``"diagonal"`` for the paper's, which depends on the order of
            the units, and whose values differ by orders of magnitude.
        relative: Whether log|v| is moved in the place of v, which spans many orders of magnitude.
        parameters: ``"all"`` trainable ones, or the weights of ``"layers"`` only.
        method: ``"sweep"`` for the exact sweeps and Hutch++ for the rest; ``"hutch++"`` or
            ``"hutchinson"`` for all.
        probes: Products to spend, as a fixed budget; 48 if no ``tolerance`` is given.
        tolerance: Error to reach instead, relative to the value, with 95 % confidence.
        max_matvecs: Most products to spend on reaching the tolerance.
        all_columns: Whether to sweep also with 64 or more outputs.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: If an option is out of range, parameters are frozen, or a generator is needed
            and missing.
        UnsupportedGraphError: If the model has no basis paths.

    Example:
        >>> from flatgauge.examples import two_weights
        >>> psi_trace(two_weights(2.0, 3.0)).value  # L = v²
        2.0
    """
    return cell(
        surface,
        geometry=_GEOMETRY,
        functional="trace",
        skeleton=skeleton,
        relative=relative,
        parameters=parameters,
        method=method,
        probes=probes,
        tolerance=tolerance,
        max_matvecs=max_matvecs,
        all_columns=all_columns,
        caller="psi_trace",
        generator=generator,
    )


@measure(
    symbol="max (L(v+δ) − L(v)) / (1 + L), ‖δ‖ ≤ ε",
    paper="Yi et al. 2019, eq. 7, whose skeleton is the diagonal one",
    geometry=_GEOMETRY,
    functional="worst case in a ball",
    kind="worst case",
    invariant_to=_CLAIMS,
    cost="starts × steps gradients, and the top eigenvalue",
    needs=("products",),
    given_up=_GIVEN_UP,
    model_defaults={"epsilon": _half_limit},
)
def psi_epsilon_sharpness(
    surface: LossSurface,
    *,
    skeleton: str = "strongest",
    relative: bool = False,
    parameters: str = "all",
    epsilon: float | None = None,
    starts: int = 3,
    steps: int = 10,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest rise in a ball of path values over 1 + loss; strongest skeleton by default.

    Definition:
        .. math:: \max_{\|\delta\|_2 \le \varepsilon} \frac{L(v + \delta) - L(v)}{1 + L(v)}

        The maximum is searched by projected gradient ascent from several starts, so the value
        is a lower bound of it. Where the path value of a hidden unit passes zero, the loss has a
        pole: from a radius of the smallest of them on, min |u_b|, the value is infinite. What the
        loss's first two orders predict is in `details`.

    Invariance:
        layerwise, nodewise, rows, permutation, output_shift. (Not permutation with
        ``skeleton="diagonal"``, or where the strongest skeleton is tied, which is told; not
        output_shift with ``relative=True``.)

    Cost:
        ``starts * steps`` gradients, and the top eigenvalue (6 to 25 Hessian products, shared with
        ``psi_max_eigenvalue``) for a start and the prediction of second order.

    Reference:
        [yi2019positively]

    Args:
        surface: Where to measure.
        skeleton: ``"strongest"``, or ``"diagonal"`` for the paper's, which depends on the order of
            the units, and whose values differ by orders of magnitude.
        relative: Whether log|v| is moved in the place of v, which spans many orders of magnitude.
        parameters: ``"all"`` trainable ones, or the weights of ``"layers"`` only.
        epsilon: The ball's radius; None for half of min |u_b| (0.5 with ``relative=True``, 0.1
            without hidden units). `fg.compare` uses the smallest of the models' defaults for all.
        starts: Number of ascents: along the gradient, along the sharpest direction, at random.
        steps: Gradients per ascent.
        generator: Source of randomness for the starts, required.

    Returns:
        A lower bound of the maximum; each start's rise is in `details`.

    Raises:
        ValueError: If an option is out of range, parameters are frozen, or a generator is needed
            and missing.
        UnsupportedGraphError: If the model has no basis paths.

    Example:
        The loss ``(b relu(a))²`` is v² with v = 6, and the default radius 3:

        >>> from flatgauge.examples import two_weights
        >>> generator = Generator().manual_seed(0)
        >>> found = psi_epsilon_sharpness(two_weights(2.0, 3.0), generator=generator)
        >>> round(found.value, 6)  # (9² - 6²) / (1 + 6²)
        1.216216
    """
    return cell(
        surface,
        geometry=_GEOMETRY,
        functional="worst case in a ball",
        skeleton=skeleton,
        relative=relative,
        parameters=parameters,
        epsilon=epsilon,
        starts=starts,
        steps=steps,
        caller="psi_epsilon_sharpness",
        generator=generator,
    )


@measure(
    symbol="|E L(v+u) − L(v)|",
    paper="Yi et al. 2019, Definition 4.1, whose skeleton is the diagonal one",
    geometry=_GEOMETRY,
    functional="expectation",
    kind="expectation",
    invariant_to=_CLAIMS,
    cost="2 × pairs forward passes",
    needs=(),
    given_up=_GIVEN_UP,
    model_defaults={"truncation": _half_limit},
)
def psi_expected_sharpness(
    surface: LossSurface,
    *,
    skeleton: str = "strongest",
    relative: bool = False,
    parameters: str = "all",
    sigma: float = 0.05,
    truncation: float | None = None,
    pairs: int = 16,
    generator: Generator | None = None,
) -> Estimate:
    r"""Mean change of the loss under noise on path values; strongest skeleton by default.

    Definition:
        .. math:: |E\,L(v + u) - L(v)|

        Every component of u is normal of size σ, on the condition that it is not larger than the
        truncation: without it the mean is infinite, because the loss has poles where the path
        value of a hidden unit is zero.

    Invariance:
        layerwise, nodewise, rows, permutation, output_shift. (Not permutation with
        ``skeleton="diagonal"``, or where the strongest skeleton is tied, which is told; not
        output_shift with ``relative=True``.)

    Cost:
        ``2 * pairs`` forward passes; pairs u, -u cancel the gradient.

    Reference:
        [yi2019positively]

    Args:
        surface: Where to measure.
        skeleton: ``"strongest"``, or ``"diagonal"`` for the paper's, which depends on the order of
            the units, and whose values differ by orders of magnitude.
        relative: Whether log|v| is moved in the place of v, which spans many orders of magnitude.
        parameters: ``"all"`` trainable ones, or the weights of ``"layers"`` only.
        sigma: The size of the noise; the paper draws its plots with 0.05.
        truncation: The largest size of a component, below min |u_b|; None for half of that.
            `fg.compare` uses the smallest of the models' defaults for all. Not used with
            ``relative=True``, where there are no poles.
        pairs: Number of antithetic pairs, at least 2.
        generator: Source of randomness, required.

    Returns:
        The estimate with its standard error; the signed change is in `details`.

    Raises:
        ValueError: If an option is out of range, parameters are frozen, or a generator is needed
            and missing.
        UnsupportedGraphError: If the model has no basis paths.

    Example:
        >>> from flatgauge.examples import two_weights
        >>> generator = Generator().manual_seed(0)
        >>> found = psi_expected_sharpness(two_weights(2.0, 3.0), pairs=400, generator=generator)
        >>> abs(found.value - 0.0025) < 3 * found.stderr  # L = v²: 0.05²
        True
    """
    return cell(
        surface,
        geometry=_GEOMETRY,
        functional="expectation",
        skeleton=skeleton,
        relative=relative,
        truncation=truncation,
        parameters=parameters,
        sigma=sigma,
        pairs=pairs,
        caller="psi_expected_sharpness",
        generator=generator,
    )
