"""Trace and top eigenvalue of the Hessian: the classical baselines, not invariant."""

from __future__ import annotations

from torch import Generator

from flatgauge.estimators import Estimate
from flatgauge.grid import cell
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface


@measure(
    symbol="tr H",
    paper="classical; a baseline of Petzka et al. 2019 and Tsuzuku et al. 2019",
    geometry="weights",
    functional="trace",
    invariant_to={"permutation", "output_shift"},
    cost="one sweep (about classes + 2 gradients) where it is exact, else 48 Hessian products",
    needs=("trace",),
)
def hessian_trace(
    surface: LossSurface,
    *,
    parameters: str = "all",
    method: str = "sweep",
    probes: int | None = None,
    tolerance: float | None = None,
    max_matvecs: int = 500,
    all_columns: bool = False,
    generator: Generator | None = None,
) -> Estimate:
    r"""Sum of all eigenvalues of the Hessian over all trainable parameters.

    Definition:
        .. math:: \operatorname{tr} H = \sum_i \partial^2 L / \partial \theta_i^2

    Invariance:
        permutation, output_shift. Rescaling a hidden unit by c multiplies the second
        derivatives of what enters it by c⁻² and of what leaves it by c²: the trace can be made
        as large as one likes without changing the function.

    Cost:
        One sweep over the data gives the traces of all parameters in which the output is linear,
        exactly. The others, or all of them by another method, take one Hessian product per
        probe: the default budget leaves an error of some 3 to 20 %, which the standard error
        tells; a tolerance takes as many as it needs.

    Reference:
        [meyer2021hutchpp] for the estimator.

    Args:
        surface: Where to measure.
        parameters: ``"all"`` trainable ones, or the weights of ``"layers"`` only.
        method: ``"sweep"`` for the exact sweep and Hutch++ for the rest; ``"hutch++"`` or
            ``"hutchinson"`` for all.
        probes: Products to spend, as a fixed budget; 48 if no ``tolerance`` is given.
        tolerance: Error to reach instead, relative to the value, with 95 % confidence.
        max_matvecs: Most products to spend on reaching the tolerance.
        all_columns: Whether the sweep is to be exact also with 64 or more outputs.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: If an option is out of range, or a generator is needed and missing.

    Example:
        The loss ``(b relu(a))²`` has the Hessian ``[[2b², 4ab], [4ab, 2a²]]``:

        >>> from flatgauge.examples import two_weights
        >>> hessian_trace(two_weights(2.0, 3.0)).value
        26.0
        >>> round(hessian_trace(two_weights(20.0, 0.3)).value, 2)  # same function
        800.18
    """
    return cell(
        surface,
        geometry="weights",
        functional="trace",
        parameters=parameters,
        method=method,
        probes=probes,
        tolerance=tolerance,
        max_matvecs=max_matvecs,
        all_columns=all_columns,
        caller="hessian_trace",
        generator=generator,
    )


@measure(
    symbol="λ_max(H)",
    paper="classical; a baseline of Petzka et al. 2019 and Rangamani et al. 2019",
    geometry="weights",
    functional="top eigenvalue",
    invariant_to={"permutation", "output_shift"},
    cost="about 6 to 25 Hessian products at the default tolerance",
    needs=("products",),
)
def hessian_max_eigenvalue(
    surface: LossSurface,
    *,
    parameters: str = "all",
    tolerance: float = 1e-3,
    max_matvecs: int = 300,
    smallest: bool = False,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest eigenvalue of the Hessian over all trainable parameters.

    Definition:
        .. math:: \lambda_{\max}(H) = \max_{\|u\|_2 = 1} u^\top H u

        The largest by sign, not by size. What is known of the smallest is in
        `details`: ``"smallest"`` with ``"smallest bound"``, or the numbers between which it lies.

    Invariance:
        permutation, output_shift.

    Cost:
        Lanczos: about 6 to 25 Hessian products at the default tolerance.

    Reference:
        [lanczos1950]

    Args:
        surface: Where to measure.
        parameters: ``"all"`` trainable ones, or the weights of ``"layers"`` only.
        tolerance: Bound on the error, relative to the value, at which to stop.
        max_matvecs: Most products to spend.
        smallest: Whether to go on until the smallest eigenvalue is known too: near a minimum
            five to ten times as many products.
        generator: Source of randomness for the start vector, required.

    Returns:
        The estimate with its error bound.

    Raises:
        ValueError: If an option is out of range, or the generator is missing.

    Example:
        >>> from flatgauge.examples import bowl
        >>> generator = Generator().manual_seed(0)
        >>> round(hessian_max_eigenvalue(bowl([3.0, 1.0]), generator=generator).value, 6)
        3.0
    """
    return cell(
        surface,
        geometry="weights",
        functional="top eigenvalue",
        parameters=parameters,
        tolerance=tolerance,
        max_matvecs=max_matvecs,
        smallest=smallest,
        caller="hessian_max_eigenvalue",
        generator=generator,
    )
