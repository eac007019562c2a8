"""Relative flatness of single layers (Petzka et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Generator

from flatgauge.curvature.blocks import DEFAULT_PROBES, block_curvature
from flatgauge.curvature.summary import combined, select, told
from flatgauge.estimators import Estimate
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface


@measure(
    symbol="κ_Tr(w)",
    paper="Petzka et al. 2021",
    geometry="one scale per layer",
    functional="trace",
    invariant_to={"layerwise", "permutation", "output_shift"},
    cost="one sweep: about classes + 2 gradients, shared with all measures of the sweep",
    needs=("relative", "estimates"),
)
def relative_flatness(
    surface: LossSurface,
    *,
    layers: str | Sequence[str] | None = None,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Traces of a layer's blocks between units, weighted by the units' inner products.

    Definition:
        .. math:: \kappa_{\mathrm{Tr}}^l = \sum_{s,s'} \langle w_s, w_{s'} \rangle
                  \operatorname{tr} H_{s,s'}

        with :math:`w_s` the rows of the layer's weight. The value is that of the last layer, as
        in the paper; grouped convolutions are summed over their groups.

    Invariance:
        layerwise, permutation, output_shift. For the last layer, rescaling hidden units moves it:
        their outputs and its columns scale against each other.

    Cost:
        As for ``kappa_trace_max``.

    Reference:
        [petzka2021relative]

    Args:
        surface: Where to measure.
        layers: Glob patterns of the layers to take; None for all. The value is that of the last.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for layers that are not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with every layer's value.

    Raises:
        ValueError: If the model has no layers, a pattern matches none, or a generator is needed.

    Example:
        >>> from flatgauge.examples import linear_regression
        >>> round(relative_flatness(linear_regression(2.0)).value, 6)
        72.0
    """
    blocks = block_curvature(
        surface, ("relative",), all_columns=all_columns, probes=probes, generator=generator
    )
    names = select(blocks.layers, layers)
    values = {name: blocks[name].layer_value("relative", 1.0) for name in names}
    reasons = {name: blocks[name].reason for name in names[-1:] if not blocks[name].exact}
    options = {} if layers is None else {"layers": layers}
    return combined(values, "last", notes=told(reasons), options=options)
