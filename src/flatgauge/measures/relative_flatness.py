"""Relative flatness of single layers (Petzka et al. 2021), as they are and normalized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Generator

from flatgauge.curvature.blocks import DEFAULT_PROBES, Blocks, block_curvature
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
    return _last(blocks, "relative", select(blocks.layers, layers), layers)


@measure(
    symbol="κ_Tr(w̃)",
    paper="Petzka et al. 2021, with normalized features",
    geometry="one scale per input unit",
    functional="trace",
    invariant_to={"layerwise", "nodewise", "rows", "permutation", "output_shift"},
    cost="one sweep: about classes + 2 gradients, shared with all measures of the sweep, and one "
    "forward pass",
    needs=("normalized", "estimates"),
)
def relative_flatness_normalized(
    surface: LossSurface,
    *,
    layers: str | Sequence[str] | None = None,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Relative flatness with every input unit of the layer divided by its spread.

    Definition:
        .. math:: \tilde\kappa_{\mathrm{Tr}}^l = \sum_{s,s'}
                  \langle \tilde w_s, \tilde w_{s'} \rangle
                  \operatorname{tr} \tilde H_{s,s'}, \qquad \tilde w_{sj} = \sigma_j w_{sj}

        with :math:`\sigma_j` the standard deviation of the layer's input unit j over the data (for
        convolutions over samples and positions), by which the input is divided, so that the
        function stays as it is; :math:`\tilde H` is the Hessian by :math:`\tilde w`. A unit that
        never varies is divided by its size, one that is always zero is left out. The value is
        that of the last layer.

    Invariance:
        layerwise, nodewise, rows, permutation, output_shift. A hidden unit times c has a standard
        deviation times c: what is measured does not depend on how units are scaled.

    Cost:
        As for ``relative_flatness``, and one forward pass for the standard deviations.

    Reference:
        [petzka2021relative]

    Args:
        surface: Where to measure.
        layers: Glob patterns of the layers to take; None for all. The value is that of the last.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for layers that are not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with every layer's value, but for weights that are read more than once.

    Raises:
        ValueError: If the model has no layers, a pattern matches none, the last layer's weight is
            read more than once, or a generator is needed.

    Example:
        One input unit that is always 3 is divided by 3, and its weight multiplied:

        >>> from flatgauge.examples import linear_regression
        >>> round(relative_flatness_normalized(linear_regression(2.0)).value, 6)
        72.0
    """
    blocks = block_curvature(
        surface, ("normalized",), all_columns=all_columns, probes=probes, generator=generator
    )
    names = select(blocks.layers, layers)
    known = [name for name in names if "normalized" in blocks[name].values]
    if names[-1] not in known:
        raise ValueError(
            f"the inputs of `{names[-1]}` have no one spread: its weight is read more than once, "
            "or the model treats the number of samples as a constant. Choose other `layers=`, or "
            "measure `relative_flatness`."
        )
    # A sample moves the spreads too, so that its share in the sum is not all that it does.
    return replace(_last(blocks, "normalized", known, layers), samples=None)


def _last(
    blocks: Blocks, part: str, names: Sequence[str], layers: str | Sequence[str] | None
) -> Estimate:
    """A part of every layer; the value is that of the last."""
    values = {name: blocks[name].layer_value(part, 1.0) for name in names}
    reasons = {name: blocks[name].reason for name in names[-1:] if not blocks[name].exact}
    options = {} if layers is None else {"layers": layers}
    return combined(values, "last", notes=told(reasons), options=options)
