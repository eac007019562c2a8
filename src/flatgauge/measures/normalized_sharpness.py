"""Curvature against weight under the best noise per matrix, row and column (Tsuzuku et al.).

`normalized_sharpness_direct` is the same without a second-order approximation: the least of rise
plus penalty that a search over scales of noise has found. It starts at the scales that are best to
second order, tries common factors, and then descends by Adam in stages, each as long as all before
it. Scales are compared on the same noise, and the value is taken on noise that nothing was chosen
by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from flatgauge.curvature.block_diagonal import (
    DEFAULT_PROBES,
    block_curvature,
    samples_without_loss,
    surrogate_notes,
    with_surrogate,
)
from flatgauge.curvature.blocks import Block, Blocks, LayerValue, standard_error
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import child_generator, root_seed
from flatgauge.estimators.matrix_scaling import Scaling, minimize_scaled_sum
from flatgauge.geometry.functionals import check_pairs
from flatgauge.measures.declaration import declare
from flatgauge.measures.minimum_sharpness import orbit_sizes
from flatgauge.measures.registry import RESCALINGS, Family, Needs
from flatgauge.surface.surface import LossSurface

#: How many standard errors above zero a root is as good as straight.
_STRAIGHT = 5.0

#: How far one step may move the logarithm of a scale, at the beginning of a stage.
_RATE = 0.1

#: Steps of the first stage of the search; every further one is as long as all before it.
_STAGE = 50

#: Powers of four by which all variances are multiplied before the search, and pairs for each.
_FACTORS, _FACTOR_PAIRS = range(-6, 3), 4

#: Most pairs that decide whether pure noise is better than what was found.
_FEW_PAIRS = 16

#: How much smaller than the noise the squared weights are in pure noise.
_PURE = 2.0**-10

#: From this part of what pure noise gives on, a value says little about the weights.
_NEAR = 0.8

#: Changes of the logarithms of variances, by layer: of rows, and of columns.
LogScales = dict[str, tuple[Tensor, Tensor]]

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

DIRECT = Family(
    paper="Tsuzuku et al. 2019, eq. 62",
    reference="[tsuzuku2019normalized], appendix D.",
    geometry="one scale per row and one per column",
    functional="expectation",
    kind="expectation",
    invariant_to=RESCALINGS | {"permutation", "output_scale", "output_shift"},
    cost="one sweep, 100 gradients and more (2 × steps at most), 6 × pairs + 80 forward passes",
    not_with={("surrogate", None): frozenset({"output_scale"})},
    docs=r"""
Definition:
    .. math:: \min_{\sigma, \sigma'} E\,L(W + \sigma \sigma' \epsilon) - L(W)
              + \sum_{l, ij} \frac{W_{ij}^2}{2 \lambda (\sigma_i \sigma'_j)^2},
              \qquad \epsilon \sim N(0, I)

    with noise on the weights of all layers together, one scale per output unit and one per
    input unit of each. To second order it is ``normalized_sharpness`` over
    :math:`2 \sqrt\lambda`, which is in ``details["second order"]``; unlike that, how networks
    compare depends on λ. Entries whose scale (17) drives to zero or infinity at no cost (rows
    without curvature, columns without weight) get no noise and count zero.

    The normalized loss is bounded: weights of pure noise have a loss of
    ``details["pure noise"]`` above the network's, at no penalty. Where λ is small, nothing is
    better than that: the minimum lies at infinite noise and says nothing about flatness. It
    is the case when second order predicts more than pure noise gives, which for networks of
    some size includes λ = N. It is named in the notes.
Invariance:
    The search moves logarithms of scales, from the best to second order: powers of two change no
    bit.
Cost:
    The sweep of ``normalized_sharpness``; about 80 passes for the best common factor of the
    variances; two gradients per step, in stages of 50, 50, 100, 200, ... steps until one
    gains less than the tolerance; six passes per pair and stage.
Args:
    lam: λ, the weight of a rise of the loss relative to the penalty. Take it so large that
        ``details["second order"]`` is well below ``details["pure noise"]``, and the same for
        all networks that are compared.
    steps: Most steps of the search for better scales than the best to second order; 0 for
        none, and then nothing is minimized.
    tolerance: The search has converged when a stage, which is as long as all before it
        together, lowers the value by less than this part of it, or by less than the error
        with which that is seen on the same noise.
    pairs: Number of antithetic pairs for the value, at least 2.
    generator: Source of randomness, required.
Returns:
    The estimate with its standard error: the value at the scales that were found, on noise
    that nothing was chosen by. The minimum is at most that; the problem is not convex, so a
    better one may be elsewhere. What the last stage gained is in ``details["last gain"]``.
Raises:
    ValueError: If an option is out of range, the surrogate does not fit the data, the model
        has no layers, or the generator is missing.
Example:
    The loss is quadratic, so that second order is all there is:

    >>> import torch
    >>> from flatgauge.surface.examples import linear_regression
    >>> generator = torch.Generator().manual_seed(0)
    >>> surface = linear_regression(2.0)
    >>> found = <name>(surface, surrogate=None, generator=generator)
    >>> abs(found.value - found.details["second order"]) < 4 * found.stderr, found.converged
    (True, True)
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


def least_noisy_sum(
    surface: LossSurface,
    *,
    lam: float = 1e4,
    surrogate: str | None = "normalized_cross_entropy",
    layers: str | Sequence[str] | None = None,
    steps: int = 200,
    tolerance: float = 0.02,
    pairs: int = 16,
    probes: int = DEFAULT_PROBES,
    generator: Generator,
) -> Estimate:
    """The least of rise plus penalty that a search over scales of noise has found."""
    if not (math.isfinite(lam) and lam > 0):
        raise ValueError(f"`lam={lam!r}` must be a positive finite number.")
    if not 0 < tolerance < 1:
        raise ValueError(f"`tolerance={tolerance!r}` must lie between 0 and 1, such as 0.02.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"`steps={steps!r}` must be a whole number of at least 0.")
    check_pairs(pairs)
    start = generator.clone_state()  # Whether the sweep draws must not change the noise.
    noise = partial(child_generator, root_seed(generator), device=generator.device)
    under = with_surrogate(surface, surrogate)
    blocks = block_curvature(under, ("diagonal",), probes=probes, generator=start).select(layers)
    noisy = NoisyLayers(under, blocks.layers, lam)
    found = _minimize(noisy, steps, tolerance, pairs, noise)
    pure = noisy.pure_noise()
    few = min(pairs, _FEW_PAIRS)
    of_pure, of_found = noisy.values([pure, found.scales], few, noise("noise"))
    degenerate = bool(of_pure.mean() < of_found.mean())
    scales = pure if degenerate else found.scales
    (draws,) = noisy.values([scales], pairs, noise("value"))
    details = {
        "second order": noisy.second_order,
        "penalty": noisy.penalty(scales),
        "pure noise": float(of_pure.mean()) - noisy.penalty(pure),
        "steps": float(found.steps),
    } | ({"last gain": found.gain} if found.steps else {})
    options: dict[str, object] = {"lam": lam, "surrogate": surrogate, "steps": steps}
    options |= {"tolerance": tolerance, "pairs": pairs}
    options |= {} if layers is None else {"layers": layers}
    if not torch.isfinite(draws).all():
        note = "the loss overflows under the noise; take a larger `lam`"
        return Estimate(math.inf, converged=False, details=details, options=options, notes=(note,))
    value, stderr = float(draws.mean()), float(draws.std()) / math.sqrt(pairs)
    notes = surrogate_notes(surface, surrogate)
    if degenerate or value > _NEAR * details["pure noise"]:
        notes.append(
            "`lam` is too small: pure noise costs no penalty and gives "
            f"{details['pure noise']:.3g}, so that the minimum lies at or near infinite noise and "
            "says nothing about flatness; take a larger one"
        )
    if not degenerate and not found.steps:
        notes.append("not minimized (`steps=0`): the value at the best scales to second order")
    elif not degenerate and not found.converged:
        notes.append(
            f"not minimized: the last stage of the search still lowered the value by "
            f"{found.gain:.2g}, or was shorter than {_STAGE} steps; raise `steps`"
        )
    if value - details["penalty"] < -2 * stderr:
        notes.append(
            "the loss falls under the noise: the point is not a minimum, and the search ended there"
        )
    return Estimate(
        value,
        stderr=stderr,
        converged=found.converged or degenerate,
        details=details,
        options=options,
        notes=tuple(notes),
    )


class _Search(NamedTuple):
    """The best scales of a search, and how it ended."""

    scales: LogScales
    gain: float  # by which the last stage lowered the value; 0 if it did not
    converged: bool
    steps: int


def _minimize(
    noisy: NoisyLayers,
    steps: int,
    tolerance: float,
    pairs: int,
    noise: Callable[[str], Generator],
) -> _Search:
    """Search in stages, each as long as all before it, until one gains next to nothing."""
    if not steps:
        return _Search(noisy.start_scales(), 0.0, False, 0)
    tried = [noisy.start_scales(4.0**power) for power in _FACTORS]
    means = [float(v.mean()) for v in noisy.values(tried, _FACTOR_PAIRS, noise("factor"))]
    ranked = [math.inf if math.isnan(mean) else mean for mean in means]
    best, gain, converged = tried[ranked.index(min(ranked))], 0.0, False
    search, choice = noise("search"), noise("choice")
    taken, length, falls = 0, _STAGE, False
    while taken < steps and not converged and not falls:
        length = min(length, steps - taken)
        moved = noisy.descend(best, length, search)
        first, last = noisy.values([best, moved], pairs, choice)
        taken += length
        differences = first - last
        gain = max(float(differences.mean()), 0.0) if last.isfinite().all() else 0.0
        if gain > 0:
            best, first = moved, last
        penalty = noisy.penalty(best)
        rise, error = float(first.mean()) - penalty, float(first.std()) / math.sqrt(pairs)
        # Where noise lowers the loss, the search would go on to train the network by noise.
        falls = rise < -2 * error
        smallest = float(differences.std()) / math.sqrt(pairs)
        # A stage that is shorter than the first could not have gone far.
        converged = length >= _STAGE and gain <= max(tolerance * (abs(rise) + penalty), smallest)
        length = taken
    return _Search(best, gain, converged, taken)


class NoisyLayers:
    """A surface under noise on its layers, whose variances are products of rows and columns."""

    def __init__(self, surface: LossSurface, blocks: Mapping[str, Block], lam: float) -> None:
        self.surface, self.lam = surface, lam
        self.layers = {name: block.layer for name, block in blocks.items() if block.layer}
        self._variances, self._squares, self.second_order = {}, {}, 0.0
        for name, layer in self.layers.items():
            scaling = best_scales(blocks[name])
            # E L − L is half of Σ h s, and so the sum is ½ Σ h s + (W² / λ) / s.
            self._variances[name] = torch.from_numpy(scaling.products) / math.sqrt(lam)
            self._squares[name] = layer.canonical(blocks[name].weight.square()).sum(-1).cpu()
            self.second_order += scaling.value / (2 * math.sqrt(lam))

    def start_scales(self, factor: float = 1.0) -> LogScales:
        """The best scales to second order, with all variances times one factor."""
        return {
            name: (torch.full_like(v[:, :, :1], math.log(factor)), torch.zeros_like(v[:, :1, :]))
            for name, v in self._variances.items()
        }

    def pure_noise(self) -> LogScales:
        """So much noise that the weights are nothing relative to it, layer by layer."""
        scales = self.start_scales()
        for name, term in self._penalties(scales).items():
            entries = int((term > 0).sum())
            if entries:
                # On average over the entries, W² / σ² is 2 λ times the penalty.
                ratio = 2 * self.lam * float(term.sum()) / entries
                scales[name][0].add_(math.log(ratio / _PURE))
        return scales

    def penalty(self, scales: LogScales) -> float:
        """The weights over the noise."""
        return float(sum(term.sum() for term in self._penalties(scales).values()))

    def values(self, candidates: list[LogScales], pairs: int, generator: Generator) -> list[Tensor]:
        """Rise plus penalty by every pair (pairs,), on the same noise for all candidates."""
        origin, point = self.surface.value(), self.surface.point
        draws: list[list[float]] = [[] for _ in candidates]
        deviations = [self._deviations(scales) for scales in candidates]
        for _ in range(pairs):
            noise = self._noise(generator)
            for found, deviation in zip(draws, deviations, strict=True):
                shift = self._shift(deviation, noise)
                ends = [self.surface.value(point + sign * shift) for sign in (1, -1)]
                found.append(self._share * (sum(ends) / 2 - origin))
        return [
            torch.tensor(found, dtype=torch.float64) + self.penalty(scales)
            for found, scales in zip(draws, candidates, strict=True)
        ]

    def descend(self, start: LogScales, steps: int, generator: Generator) -> LogScales:
        """Follow the slope of the expectation; return the mean of the later half of the way."""
        scales = {name: (rows.clone(), columns.clone()) for name, (rows, columns) in start.items()}
        point = self.surface.point
        flat = [part for parts in scales.values() for part in parts]
        mean = [torch.zeros_like(part) for part in flat]
        adam = torch.optim.Adam(flat, lr=_RATE, eps=1e-30)
        counted = 0
        for step in range(steps):
            deviations, noise = self._deviations(scales), self._noise(generator)
            shift = self._shift(deviations, noise)
            slopes = [self.surface.gradient(point + sign * shift) for sign in (1, -1)]
            if not all(torch.isfinite(slope).all() for slope in slopes):
                break
            parts = self.surface.split(self._share * (slopes[0] - slopes[1]) / 2)
            penalties = self._penalties(scales)
            for name, (rows, columns) in scales.items():
                along = parts[name].cpu().double() * deviations[name] * noise[name] / 2
                slope = self.layers[name].canonical(along).sum(-1) - penalties[name]
                rows.grad, columns.grad = slope.sum(2, keepdim=True), slope.sum(1, keepdim=True)
            adam.param_groups[0]["lr"] = _RATE * (1 - step / steps)
            adam.step()
            if 2 * step >= steps - 1:
                counted += 1
                for total, part in zip(mean, flat, strict=True):
                    total += (part - total) / counted
        if not counted:
            return start
        halves = iter(mean)
        return {name: (next(halves), next(halves)) for name in scales}

    def _variance(self, name: str, scales: LogScales) -> Tensor:
        rows, columns = scales[name]
        return self._variances[name] * (rows + columns).exp()

    def _penalties(self, scales: LogScales) -> dict[str, Tensor]:
        """The weights over the noise, entry by entry; zero where there is no noise."""
        found = {}
        for name, squares in self._squares.items():
            variance = self._variance(name, scales)
            found[name] = (squares / (2 * self.lam * variance)).where(variance > 0, 0.0)
        return found

    def _deviations(self, scales: LogScales) -> dict[str, Tensor]:
        """The standard deviation of every weight's noise, of the weights' shape."""
        found = {}
        for name, layer in self.layers.items():
            deviation = self._variance(name, scales).sqrt()
            kernel = math.prod(layer.shape) // deviation.numel()
            spread = deviation[..., None].expand(*deviation.shape, kernel)
            found[name] = layer.original(spread).contiguous()
        return found

    def _noise(self, generator: Generator) -> dict[str, Tensor]:
        return {
            name: torch.randn(layer.shape, generator=generator, dtype=torch.float64)
            for name, layer in self.layers.items()
        }

    def _shift(self, deviations: Mapping[str, Tensor], noise: Mapping[str, Tensor]) -> Tensor:
        """Noise on the layers, none on other parameters, as one flat vector."""
        parts = {name: torch.zeros_like(value) for name, value in self.surface.params.items()}
        for name, deviation in deviations.items():
            parts[name] = (deviation * noise[name]).to(parts[name])
        return self.surface.flatten(parts)

    @cached_property
    def _share(self) -> float:
        """What makes a mean over all samples that count one over those that have a loss."""
        count = self.surface.risk.count
        return count / (count - samples_without_loss(self.surface))


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

normalized_sharpness_direct = declare(
    least_noisy_sum,
    DIRECT,
    name="normalized_sharpness_direct",
    symbol="min E L(W + σσ'ε) − L(W) + Σ W²/(2λσ²σ'²)",
    summary="Least rise of the loss under noise plus weight over noise, over row and column "
    "scales.",
)
