"""Relative flatness of single layers (Petzka et al. 2021), as they are and normalized."""

from __future__ import annotations

from dataclasses import replace

from flatgauge.curvature.blocks import Blocks
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures.declaration import declare
from flatgauge.measures.registry import RESCALINGS, Family, Needs

_OPTIONS = """
Args:
    layers: Glob patterns of the layers to take; None for all. The value is that of the last.
"""

RELATIVE = Family(
    paper="Petzka et al. 2021",
    reference="[petzka2021relative]",
    geometry="one scale per layer",
    functional="trace",
    invariant_to=frozenset({"layerwise", "permutation", "output_shift"}),
    cost="one sweep: about classes + 2 gradients, shared with all measures of the sweep",
    requires=Needs(frozenset({"relative"}), estimates=True),
    docs=_OPTIONS
    + r"""
Definition:
    .. math:: \kappa_{\mathrm{Tr}}^l = \sum_{s,s'} \langle w_s, w_{s'} \rangle
              \operatorname{tr} H_{s,s'}

    with :math:`w_s` the rows of the layer's weight. The value is that of the last layer, as
    in the paper; grouped convolutions are summed over their groups.
Invariance:
    For the last layer, rescaling hidden units moves it: their outputs and its columns scale
    against each other.
Example:
    >>> from flatgauge.surface.examples import linear_regression
    >>> round(relative_flatness(linear_regression(2.0)).value, 6)
    72.0
""",
)

NORMALIZED = Family(
    paper="Petzka et al. 2021, with normalized features",
    reference="[petzka2021relative]",
    geometry="one scale per input unit",
    functional="trace",
    invariant_to=RESCALINGS | RELATIVE.invariant_to,
    cost=f"{RELATIVE.cost}, and one forward pass",
    requires=Needs(frozenset({"normalized"}), estimates=True),
    docs=_OPTIONS
    + r"""
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
    A hidden unit times c has a standard deviation times c: what is measured does not depend on
    how units are scaled.
Cost:
    As for ``relative_flatness``, and one forward pass for the standard deviations.
Returns:
    The estimate with every layer's value, but for weights that are read more than once.
Raises:
    ValueError: If the model has no layers, a pattern matches none, the last layer's weight is
        read more than once, or a generator is needed and missing.
Example:
    One input unit that is always 3 is divided by 3, and its weight multiplied:

    >>> from flatgauge.surface.examples import linear_regression
    >>> round(relative_flatness_normalized(linear_regression(2.0)).value, 6)
    72.0
""",
)


def relative_curvature(blocks: Blocks) -> Estimate:
    """Traces of the blocks between units, weighted by the units' inner products."""
    values = {name: block.layer_value("relative", 1.0) for name, block in blocks.layers.items()}
    return blocks.aggregate(values, "last")


def normalized_curvature(blocks: Blocks) -> Estimate:
    """The same, of weights in units of their inputs' standard deviations."""
    values = {
        name: block.layer_value("normalized", 1.0)
        for name, block in blocks.layers.items()
        if "normalized" in block.values
    }
    last = list(blocks.layers)[-1]
    if last not in values:
        raise ValueError(
            f"the inputs of `{last}` have no one standard deviation: its weight is read more than "
            "once, or the model treats the number of samples as a constant. Choose other "
            "`layers=`, or measure `relative_flatness`."
        )
    # A sample moves the standard deviations too: its share in the sum is not all that it does.
    return replace(blocks.aggregate(values, "last"), samples=None)


relative_flatness = declare(
    relative_curvature,
    RELATIVE,
    name="relative_flatness",
    symbol="κ_Tr(w)",
    summary="Traces of a layer's blocks between units, weighted by the units' inner products.",
)

relative_flatness_normalized = declare(
    normalized_curvature,
    NORMALIZED,
    name="relative_flatness_normalized",
    symbol="κ_Tr(w̃)",
    summary="Relative flatness with every input unit of the layer divided by its spread.",
)
