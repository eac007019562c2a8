"""Curvature of layers in units of their own size: κ and κ_τ (Petzka et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Generator

from flatgauge.curvature.blocks import DEFAULT_PROBES, block_curvature
from flatgauge.curvature.eigenvalues import block_eigenvalues
from flatgauge.curvature.summary import LayerValue, combined, select, told
from flatgauge.curvature.sweep import sweeper_of
from flatgauge.estimators import Estimate
from flatgauge.estimators.probes import digest, required
from flatgauge.measures.registry import measure
from flatgauge.precision import wide
from flatgauge.surface import LossSurface

_PAPER = "Petzka et al. 2019, Table 1"
_CLAIMS = {"layerwise", "permutation", "output_shift"}


@measure(
    symbol="κ_max",
    paper=_PAPER,
    geometry="one scale per layer",
    functional="top eigenvalue of a block",
    invariant_to=_CLAIMS,
    cost="one sweep (about classes + 2 gradients) and a few cheap block products per layer",
    needs=("eigenvalues",),
)
def kappa_max(
    surface: LossSurface,
    *,
    layers: str | Sequence[str] | None = None,
    tolerance: float = 1e-3,
    max_matvecs: int = 300,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest over the layers of squared norm times top eigenvalue of the layer's block.

    Definition:
        .. math:: \kappa^{\max} = \max_l \kappa^l, \qquad
                  \kappa^l = \|W_l\|_F^2 \, \lambda_{\max}(H_{ll})

        with :math:`H_{ll}` the block of the Hessian that belongs to the layer's weight.

    Invariance:
        layerwise, permutation, output_shift. Multiplying a layer's weight by c divides its block
        by c². Rescaling single units moves it.

    Cost:
        One sweep that keeps columns within the memory budget, then Lanczos on these. Layers in
        which the output is curved take Hessian products instead.

    Reference:
        [petzka2019reparameterization]

    Args:
        surface: Where to measure.
        layers: Glob patterns of the layers to take; None for all.
        tolerance: Bound on the error of every eigenvalue, relative to its value.
        max_matvecs: Most block products per layer.
        generator: Source of randomness for start vectors, required.

    Returns:
        The estimate with every layer's value.

    Raises:
        ValueError: If the model has no layers, a pattern matches none, or there is no generator.

    Example:
        Linear regression on one weight, :math:`L = (3w - 1)^2` at w = 2: :math:`2 \cdot 9 \cdot 4`

        >>> from flatgauge.examples import linear_regression
        >>> generator = Generator().manual_seed(0)
        >>> round(kappa_max(linear_regression(2.0), generator=generator).value, 6)
        72.0
    """
    return _kappa(surface, "max", "kappa_max", layers, tolerance, max_matvecs, generator)


@measure(
    symbol="κ_Σ",
    paper=_PAPER,
    geometry="one scale per layer",
    functional="top eigenvalue of a block",
    invariant_to=_CLAIMS,
    cost="one sweep (about classes + 2 gradients) and a few cheap block products per layer",
    needs=("eigenvalues",),
)
def kappa_sum(
    surface: LossSurface,
    *,
    layers: str | Sequence[str] | None = None,
    tolerance: float = 1e-3,
    max_matvecs: int = 300,
    generator: Generator | None = None,
) -> Estimate:
    r"""Sum over the layers of squared norm times top eigenvalue of the layer's block.

    Definition:
        .. math:: \kappa^{\Sigma} = \sum_l \|W_l\|_F^2 \, \lambda_{\max}(H_{ll})

    Invariance:
        layerwise, permutation, output_shift. As for ``kappa_max``.

    Cost:
        As for ``kappa_max``, whose eigenvalues it shares.

    Reference:
        [petzka2019reparameterization]

    Args:
        surface: Where to measure.
        layers: Glob patterns of the layers to take; None for all.
        tolerance: Bound on the error of every eigenvalue, relative to its value.
        max_matvecs: Most block products per layer.
        generator: Source of randomness for start vectors, required.

    Returns:
        The estimate with every layer's value.

    Raises:
        ValueError: If the model has no layers, a pattern matches none, or there is no generator.

    Example:
        >>> from flatgauge.examples import linear_regression
        >>> generator = Generator().manual_seed(0)
        >>> round(kappa_sum(linear_regression(2.0), generator=generator).value, 6)
        72.0
    """
    return _kappa(surface, "sum", "kappa_sum", layers, tolerance, max_matvecs, generator)


@measure(
    symbol="κ_τ,max",
    paper=_PAPER,
    geometry="one scale per layer",
    functional="trace",
    invariant_to=_CLAIMS,
    cost="one sweep: about classes + 2 gradients, shared with all measures of the sweep",
    needs=("trace", "estimates"),
)
def kappa_trace_max(
    surface: LossSurface,
    *,
    layers: str | Sequence[str] | None = None,
    normalize: bool = False,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Largest over the layers of squared norm times trace of the layer's block.

    Definition:
        .. math:: \kappa_\tau^{\max} = \max_l \kappa_\tau^l, \qquad
                  \kappa_\tau^l = \|W_l\|_F^2 \operatorname{tr} H_{ll}

    Invariance:
        layerwise, permutation, output_shift. As for ``kappa_max``.

    Cost:
        One sweep, exact for layers in which the output is linear (with 64 or more outputs: the
        heaviest columns and mixtures, unless ``all_columns``). The others take Hessian products.

    Reference:
        [petzka2019reparameterization]

    Args:
        surface: Where to measure.
        layers: Glob patterns of the layers to take; None for all.
        normalize: Whether to divide every trace by the layer's number of weights, as the authors'
            code does on CIFAR-10.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for layers that are not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with every layer's value.

    Raises:
        ValueError: If the model has no layers, a pattern matches none, or a generator is needed.

    Example:
        >>> from flatgauge.examples import linear_regression
        >>> round(kappa_trace_max(linear_regression(2.0)).value, 6)
        72.0
    """
    return _kappa_trace(surface, "max", layers, normalize, all_columns, probes, generator)


@measure(
    symbol="κ_τ,Σ",
    paper=_PAPER,
    geometry="one scale per layer",
    functional="trace",
    invariant_to=_CLAIMS,
    cost="one sweep: about classes + 2 gradients, shared with all measures of the sweep",
    needs=("trace", "estimates"),
)
def kappa_trace_sum(
    surface: LossSurface,
    *,
    layers: str | Sequence[str] | None = None,
    normalize: bool = False,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Sum over the layers of squared norm times trace of the layer's block.

    Definition:
        .. math:: \kappa_\tau^{\Sigma} = \sum_l \|W_l\|_F^2 \operatorname{tr} H_{ll}

    Invariance:
        layerwise, permutation, output_shift. As for ``kappa_max``.

    Cost:
        As for ``kappa_trace_max``.

    Reference:
        [petzka2019reparameterization]

    Args:
        surface: Where to measure.
        layers: Glob patterns of the layers to take; None for all.
        normalize: Whether to divide every trace by the layer's number of weights, as the authors'
            code does on CIFAR-10.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for layers that are not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with every layer's value.

    Raises:
        ValueError: If the model has no layers, a pattern matches none, or a generator is needed.

    Example:
        >>> from flatgauge.examples import linear_regression
        >>> round(kappa_trace_sum(linear_regression(2.0)).value, 6)
        72.0
    """
    return _kappa_trace(surface, "sum", layers, normalize, all_columns, probes, generator)


def _kappa(
    surface: LossSurface,
    how: str,
    caller: str,
    layers: str | Sequence[str] | None,
    tolerance: float,
    max_matvecs: int,
    generator: Generator | None,
) -> Estimate:
    """Every layer's squared norm times top eigenvalue, joined."""
    source = required(
        generator, caller=f"{caller}(surface)", otherwise="call `fg.measure(surface, seed=0)`"
    )
    plan = sweeper_of(surface).plan
    names = select(plan.layers, layers)
    key = ("eigenvalues", tuple(names), tolerance, max_matvecs, digest(source))
    found = surface.recall(
        key,
        lambda: block_eigenvalues(
            surface, names, tolerance=tolerance, max_matvecs=max_matvecs, generator=source
        ),
    )
    params = surface.params
    values = {}
    for name, top in found.items():
        scale = float(wide(params[name]).square().sum())
        values[name] = LayerValue(
            scale * top.value,
            bound=scale * top.bound,
            data_stderr=None if top.data_stderr is None else scale * top.data_stderr,
            samples=None if top.samples is None else scale * top.samples,
            exact=False,
            converged=top.converged,
        )
    details = {f"residual of {name}": top.residual for name, top in found.items()}
    details["block products"] = float(sum(top.products for top in found.values()))
    options = {"tolerance": tolerance} | _chosen(layers)
    return combined(values, how, options=options, details=details)


def _kappa_trace(
    surface: LossSurface,
    how: str,
    layers: str | Sequence[str] | None,
    normalize: bool,
    all_columns: bool,
    probes: int,
    generator: Generator | None,
) -> Estimate:
    """Every layer's squared norm times trace, joined."""
    blocks = block_curvature(
        surface, ("trace",), all_columns=all_columns, probes=probes, generator=generator
    )
    names = select(blocks.layers, layers)
    values = {}
    for name in names:
        block = blocks[name]
        scale = block.squared_norm / (block.weight.numel() if normalize else 1)
        values[name] = block.layer_value("trace", scale)
    reasons = {name: blocks[name].reason for name in names if not blocks[name].exact}
    options = ({"normalize": True} if normalize else {}) | _chosen(layers)
    return combined(values, how, notes=told(reasons), options=options)


def _chosen(layers: str | Sequence[str] | None) -> dict[str, object]:
    """The layers as an option to be shown, if any were chosen."""
    return {} if layers is None else {"layers": layers}
