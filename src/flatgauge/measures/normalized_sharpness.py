"""Curvature against weight under the best noise per matrix, row and column (Tsuzuku et al.)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Generator

from flatgauge.curvature.blocks import DEFAULT_PROBES, Block, Blocks, block_curvature
from flatgauge.curvature.summary import LayerValue, combined, select, spread, told
from flatgauge.curvature.surrogate import caveats, under_surrogate
from flatgauge.estimators import Estimate
from flatgauge.geometry.orbit_blocks import orbit_blocks
from flatgauge.matrix_scaling import Scaling, smallest_sum
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface

#: How many standard errors above zero a root is as good as straight.
_STRAIGHT = 5.0

_COST = "one sweep: about classes gradients, shared with all measures of the same loss"


@measure(
    symbol="Σ √(‖W‖² tr H)",
    paper="Tsuzuku et al. 2019, eq. 13",
    geometry="one scale per layer",
    functional="trace of a block",
    invariant_to={"layerwise", "permutation", "output_scale", "output_shift", "branches"},
    cost=_COST,
    needs=("trace", "estimates"),
    given_up={("surrogate", None): {"output_scale"}, ("biases", True): {"output_shift"}},
)
def matrix_normalized_sharpness(
    surface: LossSurface,
    *,
    surrogate: str | None = "normalized_cross_entropy",
    layers: str | Sequence[str] | None = None,
    biases: bool = False,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Sum over the layers of the root of squared norm times trace of the layer's block.

    Definition:
        .. math:: \sum_l \sqrt{\|W_l\|_F^2 \, \max(\operatorname{tr} H_{ll}, 0)}

        the smallest :math:`\sum_l \operatorname{tr} H_{ll} \sigma_l^2 + \|W_l\|_F^2 / \sigma_l^2`
        over one noise level per layer, halved. The Hessian is that of the surrogate loss: by
        default the cross-entropy of logits divided by their standard deviation over the classes.
        With ``biases=True`` every bias that a layer adds has a term of its own,
        :math:`\sqrt{\|b_l\|^2 \max(\operatorname{tr} H_{b_l b_l}, 0)}`, as the paper's footnote 1
        has it. Normalization parameters contribute nothing.

    Invariance:
        layerwise, permutation, output_scale, output_shift, branches. Multiplying a layer by c
        divides its trace by c². Under its own loss (``surrogate=None``) a network does not stand
        a scaled output, and with ``biases=True`` no shifted one.

    Cost:
        One sweep of the surrogate loss, exact for layers in which the output is linear. The
        others take Hessian products.

    Reference:
        [tsuzuku2019normalized]

    Args:
        surface: Where to measure.
        surrogate: ``"normalized_cross_entropy"``, or None for the surface's own loss.
        layers: Glob patterns of the layers to take; None for all.
        biases: Whether the biases of these layers have terms, too.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for layers that are not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with every layer's value.

    Raises:
        ValueError: If the surrogate does not fit the data, every sample has constant logits, the
            model has no layers, a pattern matches none, or a generator is needed.

    Example:
        One weight, :math:`L = (3w - 1)^2` at w = 2: :math:`\sqrt{4 \cdot 18}`

        >>> from flatgauge.examples import linear_regression
        >>> round(matrix_normalized_sharpness(linear_regression(2.0), surrogate=None).value, 4)
        8.4853
    """
    blocks = block_curvature(
        under_surrogate(surface, surrogate),
        ("trace",),
        all_columns=all_columns,
        probes=probes,
        generator=generator,
    )
    names = select(blocks.layers, layers)
    if biases:
        names = _with_biases(blocks, names)
    values = {name: _root(blocks[name]) for name in names}
    below = [f"`{name}`" for name in names if float(blocks[name].values["trace"]) < 0]
    notes = [f"the trace of {', '.join(below)} is negative and counts as zero"] if below else []
    return combined(
        values,
        "sum",
        notes=notes + _notes(blocks, names) + caveats(surface, surrogate),
        options=_options(surrogate, layers) | ({"biases": True} if biases else {}),
    )


@measure(
    symbol="Σ min Σ h σ²σ'² + W²/(σ²σ'²)",
    paper="Tsuzuku et al. 2019, eq. 17 with λ = 1/2",
    geometry="one scale per row and one per column",
    functional="trace of a block",
    invariant_to={
        *("layerwise", "nodewise", "rows", "permutation"),
        *("output_scale", "output_shift", "branches"),
    },
    cost=_COST + "; then milliseconds per layer",
    needs=("diagonal",),
    given_up={("surrogate", None): {"output_scale"}},
)
def normalized_sharpness(
    surface: LossSurface,
    *,
    surrogate: str | None = "normalized_cross_entropy",
    layers: str | Sequence[str] | None = None,
    all_columns: bool = False,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Sum over the layers of the least curvature plus weight under row and column scales.

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
        layerwise, nodewise, rows, permutation, output_scale, output_shift, branches. Scales of
        rows and columns are scales of units. Under its own loss (``surrogate=None``) a network
        does not stand a scaled output.

    Cost:
        One sweep of the surrogate loss, exact for layers in which the output is linear. The
        others take Hessian products, whose noise the clipping at zero turns into an excess:
        the standard error allows for it. The minimum is found by Newton's method.

    Reference:
        [tsuzuku2019normalized]

    Args:
        surface: Where to measure.
        surrogate: ``"normalized_cross_entropy"``, or None for the surface's own loss.
        layers: Glob patterns of the layers to take; None for all.
        all_columns: Whether to be exact also with 64 or more outputs.
        probes: Hessian products for layers that are not exact.
        generator: Source of randomness, required where not everything is exact.

    Returns:
        The estimate with every layer's value; its `bound` is the gap to a dual solution.

    Raises:
        ValueError: If the surrogate does not fit the data, every sample has constant logits, the
            model has no layers, a pattern matches none, or a generator is needed.

    Example:
        One weight, :math:`L = (3w - 1)^2` at w = 2: :math:`2 \cdot 2 \cdot \sqrt{18}`

        >>> from flatgauge.examples import linear_regression
        >>> round(normalized_sharpness(linear_regression(2.0), surrogate=None).value, 4)
        16.9706
    """
    blocks = orbit_blocks(
        under_surrogate(surface, surrogate),
        ("diagonal",),
        all_columns=all_columns,
        probes=probes,
        generator=generator,
    )
    names = select(blocks.layers, layers)
    values, errors = {}, []
    for name in names:  # The scales of one layer at a time: they are as large as its weights.
        scaling = scaled(blocks[name])
        errors.append(_errors(blocks[name], scaling))
        values[name] = _solved(blocks[name], scaling, sum(errors[-1]))
    diagonals = [blocks[name].values["diagonal"] for name in names]
    negative = sum(float(h.clamp_max(0).abs().sum()) for h in diagonals)
    whole = sum(float(h.abs().sum()) for h in diagonals)
    total = math.fsum(item.value for item in values.values())
    gap = math.fsum(item.bound for item in values.values())
    details = {
        "relative gap": gap / total if total else 0.0,
        "negative curvature": negative / whole if whole else 0.0,
    }
    notes = _notes(blocks, names) + caveats(surface, surrogate)
    if negative:
        share = f"{negative / whole:.2g}"
        notes.append(f"second derivatives below zero count as zero: {share} of all by size")
    if any(math.isnan(item.stderr) for item in values.values()):
        notes.append("how far mixtures of columns move the value is not known")
    options = _options(surrogate, layers)
    estimate = combined(values, "sum", notes=notes, options=options, details=details)
    return replace(
        estimate,
        stderr=math.hypot(*(error for error, _ in errors)) + math.fsum(more for _, more in errors),
    )


def scaled(block: Block) -> Scaling:
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
    return smallest_sum(curvature.cpu().numpy(), squares.cpu().numpy())


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


def _solved(block: Block, scaling: Scaling, stderr: float) -> LayerValue:
    """A layer's smallest sum with its errors."""
    return LayerValue(
        scaling.value,
        stderr=stderr,
        bound=scaling.gap,
        exact=block.exact,
        converged=scaling.converged,
    )


def _root(block: Block) -> LayerValue:
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
        data_stderr=spread(samples),
        samples=samples,
        draws=draws,
        exact=block.exact,
    )


def _with_biases(blocks: Blocks, names: Sequence[str]) -> list[str]:
    """Every layer, followed by the bias that it adds where that is trainable."""
    layers = blocks.layers
    found: dict[str, None] = {}
    for name in names:
        layer = layers[name].layer
        assert layer is not None
        found[name] = None
        if layer.bias is not None and layer.bias in blocks:
            found[layer.bias] = None
    return list(found)


def _notes(blocks: Blocks, names: Sequence[str]) -> list[str]:
    """What was estimated, and what was left out."""
    notes = told({name: blocks[name].reason for name in names if not blocks[name].exact})
    if blocks.left_out:
        count = blocks.left_out
        notes.append(
            f"{count} sample{'s' * (count > 1)} left out: constant logits have no normalized loss"
        )
    return notes


def _options(surrogate: str | None, layers: str | Sequence[str] | None) -> dict[str, object]:
    """The settings that the value depends on."""
    return {"surrogate": surrogate} | ({} if layers is None else {"layers": layers})
