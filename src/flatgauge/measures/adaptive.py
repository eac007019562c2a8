"""The loss in units of every weight's own size: relative changes."""

from __future__ import annotations

from torch import Generator

from flatgauge.estimators import Estimate
from flatgauge.grid import cell
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface

_CLAIMS = {"layerwise", "nodewise", "rows", "permutation"}
_GEOMETRY = "per weight"


@measure(
    symbol="λ_max(DHD), D = |θ|",
    paper="Rangamani et al. 2019, §6",
    geometry=_GEOMETRY,
    functional="top eigenvalue",
    invariant_to=_CLAIMS,
    cost="about 6 to 25 Hessian products at the default tolerance",
    needs=("products",),
)
def riemannian_max_eigenvalue_nodewise(
    surface: LossSurface,
    *,
    parameters: str = "all",
    solver: str = "lanczos",
    tolerance: float = 1e-3,
    max_matvecs: int = 300,
    smallest: bool = False,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest eigenvalue of the Hessian in units of every parameter's own size.

    Definition:
        .. math:: \lambda_{\max}(D H D), \qquad D = \operatorname{diag}(|\theta|)

        What is known of the smallest eigenvalue is in `details`: ``"smallest"`` with
        ``"smallest bound"``, or the numbers between which it lies.

    Invariance:
        layerwise, nodewise, rows, permutation. (A shift of the outputs changes the last bias.)

    Cost:
        Lanczos: about 6 to 25 Hessian products at the default tolerance.

    Reference:
        [rangamani2019scale]

    Args:
        surface: Where to measure.
        parameters: ``"all"`` trainable ones, or the weights of ``"layers"`` only.
        solver: ``"lanczos"``, or ``"power"`` for the paper's Algorithm 1: it finds the eigenvalue
            of largest size, and does not converge where that is negative, which is told.
        tolerance: Bound on the error, relative to the value, at which Lanczos stops; for the
            power method, the change of the unit vector.
        max_matvecs: Most products to spend.
        smallest: Whether to go on until the smallest eigenvalue is known too: near a minimum
            five to ten times as many products.
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
    return cell(
        surface,
        geometry=_GEOMETRY,
        functional="top eigenvalue",
        parameters=parameters,
        solver=solver,
        tolerance=tolerance,
        max_matvecs=max_matvecs,
        smallest=smallest,
        caller="riemannian_max_eigenvalue_nodewise",
        generator=generator,
    )


@measure(
    symbol="Σ θ² h",
    paper="a cell of the grid; cf. Kim et al. 2023, connectivity sharpness",
    geometry=_GEOMETRY,
    functional="trace",
    invariant_to=_CLAIMS,
    cost="one sweep (about classes + 2 gradients) where it is exact, else 48 Hessian products",
    needs=("own",),
)
def adaptive_trace(
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
    r"""Trace of the Hessian in units of every parameter's own size.

    Definition:
        .. math:: \operatorname{tr}(D H D) = \sum_k \theta_k^2 \,
                  \partial^2 L / \partial \theta_k^2, \qquad D = \operatorname{diag}(|\theta|)

    Invariance:
        layerwise, nodewise, rows, permutation. (A shift of the outputs changes the last bias.)

    Cost:
        As for ``hessian_trace``.

    Reference:
        [kwon2021asam] for the geometry.

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
        >>> from flatgauge.examples import two_weights
        >>> adaptive_trace(two_weights(2.0, 3.0)).value  # 2² * 18 + 3² * 8
        144.0
        >>> round(adaptive_trace(two_weights(20.0, 0.3)).value, 9)  # the same function
        144.0
    """
    return cell(
        surface,
        geometry=_GEOMETRY,
        functional="trace",
        parameters=parameters,
        method=method,
        probes=probes,
        tolerance=tolerance,
        max_matvecs=max_matvecs,
        all_columns=all_columns,
        caller="adaptive_trace",
        generator=generator,
    )


@measure(
    symbol="max L(θ+δ) − L(θ), ‖δ/|θ|‖ ≤ ρ",
    paper="Kwon et al. 2021 (ASAM)",
    geometry=_GEOMETRY,
    functional="worst case in a ball",
    kind="worst case",
    invariant_to=_CLAIMS,
    cost="starts × steps gradients, and the top eigenvalue",
    needs=("products",),
)
def adaptive_sharpness(
    surface: LossSurface,
    *,
    parameters: str = "all",
    rho: float = 0.5,
    starts: int = 3,
    steps: int = 10,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest rise of the loss under relative changes of the weights.

    Definition:
        .. math:: \max_{\|u\|_2 \le \rho} L(\theta + |\theta| \odot u) - L(\theta)

        The maximum is searched by projected gradient ascent from several starts, so the value
        is a lower bound of it. What the loss's first two orders predict is in `details`.

    Invariance:
        layerwise, nodewise, rows, permutation. (A shift of the outputs changes the last bias.)

    Cost:
        ``starts * steps`` gradients, and the top eigenvalue (6 to 25 Hessian products, shared with
        ``riemannian_max_eigenvalue_nodewise``) for a start and the prediction of second order.

    Reference:
        [kwon2021asam]

    Args:
        surface: Where to measure.
        parameters: ``"all"`` trainable ones, or the weights of ``"layers"`` only.
        rho: The ball's radius.
        starts: Number of ascents: along the gradient, along the sharpest direction, at random.
        steps: Gradients per ascent.
        generator: Source of randomness for the starts, required.

    Returns:
        A lower bound of the maximum; each start's rise is in `details`.

    Raises:
        ValueError: If an option is out of range, or the generator is missing.

    Example:
        The loss ``(b relu(a))²`` is 36 (1 + u)² (1 + v)² in units of a = 2, b = 3, and largest
        where u = v = ρ / √2:

        >>> from flatgauge.examples import two_weights
        >>> generator = Generator().manual_seed(0)
        >>> found = adaptive_sharpness(two_weights(2.0, 3.0), generator=generator)
        >>> round(found.value, 3)  # 36 ((1 + 0.5 / √2)⁴ - 1)
        84.838
    """
    return cell(
        surface,
        geometry=_GEOMETRY,
        functional="worst case in a ball",
        parameters=parameters,
        epsilon=rho,
        option="rho",
        starts=starts,
        steps=steps,
        caller="adaptive_sharpness",
        generator=generator,
    )


@measure(
    symbol="|E L(θ+σ|θ|u) − L(θ)|",
    paper="an open cell of the grid; no paper has it",
    geometry=_GEOMETRY,
    functional="expectation",
    kind="expectation",
    invariant_to=_CLAIMS,
    cost="2 × pairs forward passes",
)
def adaptive_expected_sharpness(
    surface: LossSurface,
    *,
    parameters: str = "all",
    sigma: float = 0.05,
    pairs: int = 16,
    generator: Generator | None = None,
) -> Estimate:
    r"""Mean change of the loss under noise in proportion to every weight, in size.

    Definition:
        .. math:: |E\,L(\theta + \sigma |\theta| \odot u) - L(\theta)|, \quad u \sim N(0, I)

        To second order it is ``½ σ²`` times the size of ``adaptive_trace``.

    Invariance:
        layerwise, nodewise, rows, permutation. (A shift of the outputs changes the last bias.)

    Cost:
        ``2 * pairs`` forward passes; pairs u, -u cancel the gradient.

    Reference:
        [kwon2021asam] for the geometry.

    Args:
        surface: Where to measure.
        parameters: ``"all"`` trainable ones, or the weights of ``"layers"`` only.
        sigma: The size of the noise.
        pairs: Number of antithetic pairs, at least 2.
        generator: Source of randomness, required.

    Returns:
        The estimate with its standard error; the signed change is in `details`.

    Raises:
        ValueError: If an option is out of range, or the generator is missing.

    Example:
        >>> from flatgauge.examples import two_weights
        >>> generator = Generator().manual_seed(0)
        >>> found = adaptive_expected_sharpness(
        ...     two_weights(2.0, 3.0), sigma=0.01, pairs=400, generator=generator
        ... )
        >>> abs(found.value - 0.0072) < 3 * found.stderr  # 0.01² * 144 / 2, and higher orders
        True
    """
    return cell(
        surface,
        geometry=_GEOMETRY,
        functional="expectation",
        parameters=parameters,
        sigma=sigma,
        pairs=pairs,
        caller="adaptive_expected_sharpness",
        generator=generator,
    )
