"""Curvature against weight under the best noise per matrix, row and column (Tsuzuku et al.)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from flatgauge.curvature.blocks import Block, Blocks, LayerValue, standard_error
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.matrix_scaling import Scaling, minimize_scaled_sum
from flatgauge.measures.minimum_sharpness import orbit_sizes
from flatgauge.measures.registry import RESCALINGS, Family, Needs, declare

#: How many standard errors above zero a root is as good as straight.
_STRAIGHT = 5.0

_COMMON = """
Cost:
    One sweep of the surrogate loss, exact for layers in which the output is linear. The others
    take Hessian products.
Raises:
    ValueError: If the surrogate does not fit the data, every sample has constant logits, the
        model has no layers, a pattern matches none, or a generator is needed and missing.
"""

PER_MATRIX = Family(
    paper="Tsuzuku et al. 2019, eq. 13",
    reference="[tsuzuku2019normalized]",
    geometry="one scale per layer",
    functional="trace of a block",
    invariant_to=frozenset(
        {"layerwise", "permutation", "output_scale", "output_shift", "branches"}
    ),
    cost="one sweep: about classes gradients, shared with all measures of the same loss",
    requires=Needs(frozenset({"trace"}), estimates=True),
    not_with={
        ("surrogate", None): frozenset({"output_scale"}),
        ("biases", True): frozenset({"output_shift"}),
    },
    docs=_COMMON
    + r"""
Definition:
    .. math:: \sum_l \sqrt{\|W_l\|_F^2 \, \max(\operatorname{tr} H_{ll}, 0)}

    the smallest :math:`\sum_l \operatorname{tr} H_{ll} \sigma_l^2 + \|W_l\|_F^2 / \sigma_l^2`
    over one noise level per layer, halved. The Hessian is that of the surrogate loss: by
    default the cross-entropy of logits divided by their standard deviation over the classes.
    With ``biases=True`` every bias that a layer adds has a term of its own,
    :math:`\sqrt{\|b_l\|^2 \max(\operatorname{tr} H_{b_l b_l}, 0)}`, as the paper's footnote 1
    has it. Normalization parameters contribute nothing.
Invariance:
    Multiplying a layer by c divides its trace by c². Under its own loss (``surrogate=None``) the
    value changes with the scale of the outputs, and with ``biases=True`` with their shift.
Args:
    biases: Whether the biases of these layers have terms, too.
Example:
    One weight, :math:`L = (3w - 1)^2` at w = 2: :math:`\sqrt{4 \cdot 18}`

    >>> from flatgauge.surface.examples import linear_regression
    >>> round(<name>(linear_regression(2.0), surrogate=None).value, 4)
    8.4853
""",
)

PER_UNIT = Family(
    paper="Tsuzuku et al. 2019, eq. 17 with λ = 1/2",
    reference="[tsuzuku2019normalized]",
    geometry="one scale per row and one per column",
    functional="trace of a block",
    invariant_to=RESCALINGS | PER_MATRIX.invariant_to,
    cost=f"{PER_MATRIX.cost}; then milliseconds per layer",
    requires=Needs(frozenset({"diagonal"})),
    probe_sizes=orbit_sizes,
    not_with={("surrogate", None): frozenset({"output_scale"})},
    docs=_COMMON
    + r"""
Definition:
    .. math:: \sum_l \inf_{\sigma, \sigma'} \sum_{ij} h_{ij} (\sigma_i \sigma'_j)^2
              + \frac{W_{ij}^2}{(\sigma_i \sigma'_j)^2}

    with :math:`h_{ij} = \max(H_{ij,ij}, 0)` the diagonal of the layer's block of the Hessian of
    the surrogate loss: by default the cross-entropy of logits divided by their standard
    deviation over the classes. Rows are output units, columns input units; of convolutions,
    channels, and both terms are summed over the kernel. Biases and normalization parameters
    contribute nothing. Others code a variant :math:`\sqrt{\sum_i A_i B_i}` of the conference
    version, whose value differs.
Invariance:
    Scales of rows and columns are scales of units. Under its own loss (``surrogate=None``) the
    value changes with the scale of the outputs.
Cost:
    One sweep of the surrogate loss, exact for layers in which the output is linear. The
    others take Hessian products, whose noise the clipping at zero turns into an excess:
    the standard error allows for it. The minimum is found by Newton's method.
Returns:
    The estimate with every layer's value; its `bound` is the gap to a dual solution.
Example:
    One weight, :math:`L = (3w - 1)^2` at w = 2: :math:`2 \cdot 2 \cdot \sqrt{18}`

    >>> from flatgauge.surface.examples import linear_regression
    >>> round(<name>(linear_regression(2.0), surrogate=None).value, 4)
    16.9706
""",
)


def per_matrix(
    blocks: Blocks, *, surrogate: str | None = "normalized_cross_entropy", biases: bool = False
) -> Estimate:
    """The roots of squared norm times trace, summed over layers and, if asked for, their biases."""
    names: dict[str, None] = {}  # Every layer, followed by the bias that it adds.
    for name, block in blocks.layers.items():
        names[name] = None
        bias = None if block.layer is None else block.layer.bias
        if biases and bias is not None and bias in blocks:  # It may be frozen.
            names[bias] = None
    values = {name: root_of_trace(blocks[name]) for name in names}
    below = [f"`{name}`" for name in names if float(blocks[name].values["trace"]) < 0]
    notes = [f"the trace of {', '.join(below)} is negative and counts as zero"] if below else []
    options = {"surrogate": surrogate} | ({"biases": True} if biases else {})
    return blocks.aggregate(values, "sum", notes=notes, options=options)


def per_unit(blocks: Blocks, *, surrogate: str | None = "normalized_cross_entropy") -> Estimate:
    """The smallest sums of curvature and weight under scales of rows and columns."""
    values, errors = {}, []
    for name, block in blocks.layers.items():  # One at a time: scales are as large as weights.
        scaling = best_scales(block)
        errors.append(_errors(block, scaling))
        values[name] = LayerValue(
            scaling.value,
            stderr=sum(errors[-1]),
            bound=scaling.gap,
            exact=block.exact,
            converged=scaling.converged,
        )
    diagonals = [block.values["diagonal"] for block in blocks.layers.values()]
    negative = sum(float(h.clamp_max(0).abs().sum()) for h in diagonals)
    whole = sum(float(h.abs().sum()) for h in diagonals)
    total = math.fsum(item.value for item in values.values())
    gap = math.fsum(item.bound for item in values.values())
    details = {
        "relative gap": gap / total if total else 0.0,
        "negative curvature": negative / whole if whole else 0.0,
    }
    notes = []
    if negative:
        share = f"{negative / whole:.2g}"
        notes.append(f"second derivatives below zero count as zero: {share} of all by size")
    if any(math.isnan(item.stderr) for item in values.values()):
        notes.append("how far random combinations of factors move the value is not known")
    estimate = blocks.aggregate(
        values, "sum", notes=notes, options={"surrogate": surrogate}, details=details
    )
    # Standard errors add up in squares, and the excesses by clipping as they are.
    noise, excess = math.hypot(*(e for e, _ in errors)), math.fsum(e for _, e in errors)
    return replace(estimate, stderr=noise + excess)


matrix_normalized_sharpness = declare(
    per_matrix,
    PER_MATRIX,
    name="matrix_normalized_sharpness",
    symbol="Σ √(‖W‖² tr H)",
    summary="Sum over the layers of the root of squared norm times trace of the layer's block.",
)

normalized_sharpness = declare(
    per_unit,
    PER_UNIT,
    name="normalized_sharpness",
    symbol="Σ min Σ h σ²σ'² + W²/(σ²σ'²)",
    summary="Sum over the layers of the least curvature plus weight under row and column scales.",
)


def best_scales(block: Block) -> Scaling:
    """The best scales of a layer: curvature forward, squared weights backward.

    Args:
        block: With its diagonal.

    Returns:
        The scales, for arrays (groups, out, in).
    """
    assert block.layer is not None
    diagonal = block.values["diagonal"].clamp_min(0)
    if block.rounding is not None:  # The root of a zero that was rounded is none.
        diagonal = diagonal.where(diagonal > block.rounding, 0.0)
    curvature = block.layer.canonical(diagonal).sum(-1)
    squares = block.layer.canonical(block.weight.square()).sum(-1)
    return minimize_scaled_sum(curvature.cpu().numpy(), squares.cpu().numpy())


def _errors(block: Block, scaling: Scaling) -> tuple[float, float]:
    """A layer's standard error, and the excess that clipping noise at zero leaves on average."""
    # To first order the sum grows with every h by its product of scales. The errors of random
    # signs on two weights have at most their pair in common, so that the variance of a sum is at
    # most twice the sum of the variances, over all layers too.
    assert block.layer is not None
    if block.exact:
        return 0.0, 0.0
    if "diagonal" not in block.stderr:
        return math.nan, 0.0
    from scipy.special import ndtr  # the normal distribution; slow to import

    slopes = scaling.products[..., None]
    errors = block.layer.canonical(block.stderr["diagonal"]).cpu().numpy()
    means = block.layer.canonical(block.values["diagonal"].clamp_min(0)).cpu().numpy()
    away = np.divide(means, errors, out=np.zeros_like(means), where=errors > 0)
    gain = np.exp(-(away**2) / 2) / math.sqrt(2 * math.pi) - away * ndtr(-away)
    return float(np.sqrt(2 * np.sum((slopes * errors) ** 2))), float(np.sum(slopes * errors * gain))


def root_of_trace(block: Block) -> LayerValue:
    """The root of squared norm times trace, with its errors."""
    size, trace, error = block.squared_norm, block.values["trace"], float(block.stderr["trace"])
    clipped = max(float(trace), 0.0)
    if block.rounding is not None and clipped <= float(block.rounding.sum()):
        clipped = 0.0  # The root of a zero that was rounded is none.
    value = math.sqrt(size) * math.sqrt(clipped)
    # A root falls faster than it rises; what is clipped may have been larger.
    doubt = math.sqrt(clipped) - math.sqrt(max(clipped - error, 0.0))
    if float(trace) < error:
        doubt = math.sqrt(max(float(trace) + 3 * error, 0.0))
    samples, draws = block.samples.get("trace"), block.draws.get("trace")
    slope = math.sqrt(size) / math.sqrt(clipped) / 2 if clipped else 0.0
    if samples is not None:
        samples = torch.as_tensor(value) + slope * (samples - trace)
    if draws is not None:  # Far from zero a root is nearly straight.
        draws = value + slope * (draws - trace) if clipped > _STRAIGHT * error else None
    return LayerValue(
        value,
        stderr=math.sqrt(size) * doubt,
        data_stderr=standard_error(samples),
        samples=samples,
        draws=draws,
        exact=block.exact,
    )
