"""Worst case and expectation of the loss around the weights: baselines, not invariant."""

from __future__ import annotations

from torch import Generator

from flatgauge.estimators import Estimate
from flatgauge.grid import cell
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface


@measure(
    symbol="S_ε",
    paper="Keskar et al. 2017; a baseline of Yi et al. 2019",
    geometry="weights",
    functional="worst case in a ball",
    kind="worst case",
    invariant_to={"permutation", "output_shift"},
    cost="starts × steps gradients, and the top eigenvalue",
    needs=("products",),
)
def epsilon_sharpness(
    surface: LossSurface,
    *,
    parameters: str = "all",
    epsilon: float = 0.1,
    starts: int = 3,
    steps: int = 10,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest rise of the loss within a ball around the weights, relative to 1 + loss.

    Definition:
        .. math:: S_\varepsilon = \max_{\|\delta\|_2 \le \varepsilon}
                  \frac{L(\theta + \delta) - L(\theta)}{1 + L(\theta)}

        The maximum is searched by projected gradient ascent from several starts, so the value
        is a lower bound of it. What the loss's first two orders predict is in `details`.

    Invariance:
        permutation, output_shift. The ball is absolute: shrink all weights of a layer and
        enlarge the next, and it reaches further.

    Cost:
        ``starts * steps`` gradients, and the top eigenvalue (6 to 25 Hessian products, shared with
        ``hessian_max_eigenvalue``) for a start and the prediction of second order.

    Reference:
        [keskar2017large]

    Args:
        surface: Where to measure.
        parameters: ``"all"`` trainable ones, or the weights of ``"layers"`` only.
        epsilon: The ball's radius.
        starts: Number of ascents: along the gradient, along the sharpest direction, at random.
        steps: Gradients per ascent.
        generator: Source of randomness for the starts, required.

    Returns:
        A lower bound of the maximum; each start's rise is in `details`.

    Raises:
        ValueError: If an option is out of range, the generator is missing, or 1 + loss is not
            positive.

    Example:
        At the bottom of ``½ (3 a² + b²)`` the worst direction is a:

        >>> from flatgauge.examples import bowl
        >>> generator = Generator().manual_seed(0)
        >>> estimate = epsilon_sharpness(bowl([3.0, 1.0]), epsilon=0.1, generator=generator)
        >>> round(estimate.value, 5)  # 3 * 0.1² / 2
        0.015
    """
    return cell(
        surface,
        geometry="weights",
        functional="worst case in a ball",
        parameters=parameters,
        epsilon=epsilon,
        starts=starts,
        steps=steps,
        caller="epsilon_sharpness",
        generator=generator,
    )


@measure(
    symbol="|E L(θ+σu) − L(θ)|",
    paper="Neyshabur et al. 2017; a baseline of Yi et al. 2019",
    geometry="weights",
    functional="expectation",
    kind="expectation",
    invariant_to={"permutation", "output_shift"},
    cost="2 × pairs forward passes",
)
def expected_sharpness(
    surface: LossSurface,
    *,
    parameters: str = "all",
    sigma: float = 0.01,
    pairs: int = 16,
    generator: Generator | None = None,
) -> Estimate:
    r"""Mean change of the loss under Gaussian noise on every weight, in size.

    Definition:
        .. math:: |E\,L(\theta + \sigma u) - L(\theta)|, \quad u \sim N(0, I)

        To second order it is ``½ σ² |tr H|``.

    Invariance:
        permutation, output_shift. The noise is absolute, so it shakes small weights more.

    Cost:
        ``2 * pairs`` forward passes; pairs u, -u cancel the gradient.

    Reference:
        [neyshabur2017exploring]

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
        >>> from flatgauge.examples import bowl
        >>> generator = Generator().manual_seed(0)
        >>> estimate = expected_sharpness(bowl([3.0, 1.0]), sigma=0.1, generator=generator)
        >>> abs(estimate.value - 0.02) < 3 * estimate.stderr  # 0.1² * (3 + 1) / 2
        True
    """
    return cell(
        surface,
        geometry="weights",
        functional="expectation",
        parameters=parameters,
        sigma=sigma,
        pairs=pairs,
        caller="expected_sharpness",
        generator=generator,
    )
