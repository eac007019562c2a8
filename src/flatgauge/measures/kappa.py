"""Curvature of layers in units of their own size: κ and κ_τ (Petzka et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Generator

from flatgauge.curvature.block_eigenvalues import block_eigenvalues
from flatgauge.curvature.blocks import Blocks, LayerValue, aggregate_layers, select_layers
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import child_generator, root_seed, to_float64
from flatgauge.measures.declaration import declare
from flatgauge.measures.registry import Family, Needs
from flatgauge.surface.surface import LossSurface

KAPPA = Family(
    paper="Petzka et al. 2019, Table 1",
    reference="[petzka2019reparameterization]",
    geometry="one scale per layer",
    functional="top eigenvalue of a block",
    invariant_to=frozenset({"layerwise", "permutation", "output_shift"}),
    cost="one sweep (about classes + 2 gradients) and a few cheap block products per layer",
    requires=Needs(eigenvalues=True),
    docs=r"""
    Definition:
        .. math:: \kappa^{\<join>} = \<join>_l \kappa^l, \qquad
                  \kappa^l = \|W_l\|_F^2 \, \lambda_{\max}(H_{ll})

        with :math:`H_{ll}` the block of the Hessian that belongs to the layer's weight.
    Invariance:
        Multiplying a layer's weight by c divides its block by c². Rescaling single units moves it.
    Cost:
        One sweep that keeps factors within the memory budget, then Lanczos on these. Layers in
        which the output is curved take Hessian products instead.
    Args:
        tolerance: Bound on the error of every eigenvalue, relative to its value.
        max_matvecs: Most block products per layer.
        generator: Source of randomness for start vectors, required.
    Returns:
        The estimate with every layer's value.
    Raises:
        ValueError: If the model has no layers, a pattern matches none, or there is no generator.
    Example:
        Linear regression on one weight, :math:`L = (3w - 1)^2` at w = 2: :math:`2 \cdot 9 \cdot 4`

        >>> import torch
        >>> from flatgauge.surface.examples import linear_regression
        >>> generator = torch.Generator().manual_seed(0)
        >>> round(<name>(linear_regression(2.0), generator=generator).value, 6)
        72.0
    """,
)

KAPPA_TRACE = Family(
    paper="Petzka et al. 2019, Table 1",
    reference="[petzka2019reparameterization]",
    geometry="one scale per layer",
    functional="trace",
    invariant_to=KAPPA.invariant_to,
    cost="one sweep: about classes + 2 gradients, shared with all measures of the sweep",
    requires=Needs(frozenset({"trace"}), estimates=True),
    docs=r"""
    Definition:
        .. math:: \kappa_\tau^{\<join>} = \<join>_l \kappa_\tau^l, \qquad
                  \kappa_\tau^l = \|W_l\|_F^2 \operatorname{tr} H_{ll}
    Invariance:
        As for ``kappa_max``.
    Args:
        normalize: Whether to divide every trace by the layer's number of weights, as the authors'
            code does on CIFAR-10.
    Example:
        >>> from flatgauge.surface.examples import linear_regression
        >>> round(<name>(linear_regression(2.0)).value, 6)
        72.0
    """,
)


def kappa(
    surface: LossSurface,
    *,
    join: str,
    layers: str | Sequence[str] | None = None,
    tolerance: float = 1e-3,
    max_matvecs: int = 300,
    generator: Generator,
) -> Estimate:
    """Every layer's squared norm times the top eigenvalue of its block, joined."""
    names, seed = select_layers(sweep_of(surface).plan.layers, layers), root_seed(generator)
    found = surface.cache.get(
        ("block eigenvalues", tuple(names), tolerance, max_matvecs, seed),
        lambda: block_eigenvalues(
            surface,
            names,
            tolerance=tolerance,
            max_matvecs=max_matvecs,
            generator=child_generator(seed, "block eigenvalues"),
        ),
    )
    params, values = surface.params, {}
    for name, top in found.items():
        size = float(to_float64(params[name]).square().sum())
        values[name] = LayerValue(
            size * top.value,
            bound=size * top.bound,
            data_stderr=None if top.data_stderr is None else size * top.data_stderr,
            samples=None if top.samples is None else size * top.samples,
            exact=False,
            converged=top.converged,
        )
    details = {f"residual of {name}": top.residual for name, top in found.items()}
    details["block products"] = float(sum(top.products for top in found.values()))
    options = {"tolerance": tolerance} | ({} if layers is None else {"layers": layers})
    return aggregate_layers(values, join, options=options, details=details)


def kappa_trace(blocks: Blocks, *, join: str, normalize: bool = False) -> Estimate:
    """Every layer's squared norm times the trace of its block, joined."""
    values = {
        name: block.layer_value(
            "trace", block.squared_norm / (block.value.numel() if normalize else 1)
        )
        for name, block in blocks.layers.items()
    }
    return blocks.aggregate(values, join, options={"normalize": True} if normalize else {})


kappa_max = declare(
    kappa,
    KAPPA,
    name="kappa_max",
    symbol="κ_max",
    summary="Largest over the layers of squared norm times top eigenvalue of the layer's block.",
    join="max",
)

kappa_sum = declare(
    kappa,
    KAPPA,
    name="kappa_sum",
    symbol="κ_Σ",
    summary="Sum over the layers of squared norm times top eigenvalue of the layer's block.",
    join="sum",
)

kappa_trace_max = declare(
    kappa_trace,
    KAPPA_TRACE,
    name="kappa_trace_max",
    symbol="κ_τ,max",
    summary="Largest over the layers of squared norm times trace of the layer's block.",
    join="max",
)

kappa_trace_sum = declare(
    kappa_trace,
    KAPPA_TRACE,
    name="kappa_trace_sum",
    symbol="κ_τ,Σ",
    summary="Sum over the layers of squared norm times trace of the layer's block.",
    join="sum",
)
