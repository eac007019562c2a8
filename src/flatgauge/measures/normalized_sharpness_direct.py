"""Normalized sharpness without a second-order approximation: the loss under noise itself.

In: a surface. Out: the least of rise plus penalty that a search over scales of noise has found. The
search starts at the scales that are best to second order, tries common factors, and then descends
by Adam in stages, each as long as all before it. Scales are compared on the same noise, and the
value is taken on noise that nothing was chosen by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from flatgauge.curvature.block_diagonal import (
    DEFAULT_PROBES,
    block_curvature,
    samples_without_loss,
    surrogate_notes,
    with_surrogate,
)
from flatgauge.curvature.blocks import Block
from flatgauge.estimators.estimate import Estimate
from flatgauge.estimators.linalg import child_generator, require_generator, root_seed
from flatgauge.geometry.functionals import check_pairs
from flatgauge.measures.normalized_sharpness import best_scales
from flatgauge.measures.registry import RESCALINGS, measure
from flatgauge.surface.surface import LossSurface

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


@measure(
    symbol="min E L(W + σσ'ε) − L(W) + Σ W²/(2λσ²σ'²)",
    paper="Tsuzuku et al. 2019, eq. 62",
    geometry="one scale per row and one per column",
    functional="expectation",
    kind="expectation",
    invariant_to=RESCALINGS | {"permutation", "output_scale", "output_shift"},
    cost="one sweep, 100 gradients and more (2 × steps at most), 6 × pairs + 80 forward passes",
    not_with={("surrogate", None): {"output_scale"}},
)
def normalized_sharpness_direct(
    surface: LossSurface,
    *,
    lam: float = 1e4,
    surrogate: str | None = "normalized_cross_entropy",
    layers: str | Sequence[str] | None = None,
    steps: int = 200,
    tolerance: float = 0.02,
    pairs: int = 16,
    probes: int = DEFAULT_PROBES,
    generator: Generator | None = None,
) -> Estimate:
    r"""Least rise of the loss under noise plus weight over noise, over row and column scales.

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
        layerwise, nodewise, rows, permutation, output_scale, output_shift. The search moves
        logarithms of scales, from the best to second order: powers of two change no bit.

    Cost:
        The sweep of ``normalized_sharpness``; about 80 passes for the best common factor of the
        variances; two gradients per step, in stages of 50, 50, 100, 200, ... steps until one
        gains less than the tolerance; six passes per pair and stage.

    Reference:
        [tsuzuku2019normalized], appendix D.

    Args:
        surface: Where to measure.
        lam: λ, the weight of a rise of the loss relative to the penalty. Take it so large that
            ``details["second order"]`` is well below ``details["pure noise"]``, and the same for
            all networks that are compared.
        surrogate: ``"normalized_cross_entropy"``, or None for the surface's own loss.
        layers: Glob patterns of the layers to shake; None for all.
        steps: Most steps of the search for better scales than the best to second order; 0 for
            none, and then nothing is minimized.
        tolerance: The search has converged when a stage, which is as long as all before it
            together, lowers the value by less than this part of it, or by less than the error
            with which that is seen on the same noise.
        pairs: Number of antithetic pairs for the value, at least 2.
        probes: Hessian products for the start, of layers that cannot be swept.
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
        >>> found = normalized_sharpness_direct(
        ...     linear_regression(2.0), surrogate=None, generator=generator
        ... )
        >>> abs(found.value - found.details["second order"]) < 4 * found.stderr, found.converged
        (True, True)
    """
    if not (math.isfinite(lam) and lam > 0):
        raise ValueError(f"`lam={lam!r}` must be a positive finite number.")
    if not 0 < tolerance < 1:
        raise ValueError(f"`tolerance={tolerance!r}` must lie between 0 and 1, such as 0.02.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"`steps={steps!r}` must be a whole number of at least 0.")
    check_pairs(pairs)
    source = require_generator(
        generator,
        caller="normalized_sharpness_direct(surface)",
        otherwise="call `fg.measure(surface, seed=0)`",
    )
    start = source.clone_state()  # Whether the sweep draws must not change the noise.
    noise = partial(child_generator, root_seed(source), device=source.device)
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
    tried = [noisy.multiply(4.0**power) for power in _FACTORS]
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

    def start_scales(self) -> LogScales:
        """The best scales to second order."""
        return {
            name: (torch.zeros_like(v[:, :, :1]), torch.zeros_like(v[:, :1, :]))
            for name, v in self._variances.items()
        }

    def multiply(self, factor: float) -> LogScales:
        """All variances times one factor."""
        return {
            name: (rows + math.log(factor), columns)
            for name, (rows, columns) in self.start_scales().items()
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
        parts |= {
            name: (deviation * noise[name]).to(parts[name])
            for name, deviation in deviations.items()
        }
        return self.surface.flatten(parts)

    @cached_property
    def _share(self) -> float:
        """What makes a mean over all samples that count one over those that have a loss."""
        count = self.surface.risk.count
        return count / (count - samples_without_loss(self.surface))
