"""Normalized sharpness without a second-order approximation: the loss under noise itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor

from flatgauge.curvature.blocks import DEFAULT_PROBES, Blocks, block_curvature
from flatgauge.curvature.summary import select
from flatgauge.curvature.surrogate import caveats, samples_without_loss, under_surrogate
from flatgauge.estimators import Estimate
from flatgauge.estimators.probes import branches, required
from flatgauge.functionals.functional import check_pairs
from flatgauge.layers import Layer
from flatgauge.measures.normalized_sharpness import scaled
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface

#: How far one step may move the logarithm of a scale, at the beginning of a stage.
_RATE = 0.1

#: Steps of the first stage of the search; every further one is as long as all before it.
_STAGE = 50

#: Powers of four by which all variances are multiplied before the search, and pairs for each.
_FACTORS, _FACTOR_PAIRS = range(-6, 3), 4

#: Most pairs that decide whether pure noise is better than what was found.
_FEW_PAIRS = 16

#: How much smaller than the noise the squared weights are where noise is all there is.
_DROWNED = 2.0**-10

#: From this part of what pure noise gives on, a value says little about the weights.
_NEAR = 0.8

#: Changes of the logarithms of scales, by layer: of rows, and of columns.
Changes = dict[str, tuple[Tensor, Tensor]]


@measure(
    symbol="min E L(W + σσ'ε) − L(W) + Σ W²/(2λσ²σ'²)",
    paper="Tsuzuku et al. 2019, eq. 62",
    geometry="one scale per row and one per column",
    functional="expectation",
    kind="expectation",
    invariant_to={
        *("layerwise", "nodewise", "rows", "permutation", "output_scale", "output_shift"),
    },
    cost="one sweep, 100 gradients and more (2 × steps at most), 6 × pairs + 80 forward passes",
    given_up={("surrogate", None): {"output_scale"}},
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
        lam: λ, what a rise of the loss weighs beside the weights. Take it so large that
            ``details["second order"]`` is well below ``details["pure noise"]``, and the same for
            all networks that are compared.
        surrogate: ``"normalized_cross_entropy"``, or None for the surface's own loss.
        layers: Glob patterns of the layers to shake; None for all.
        steps: Most steps of the search for better scales than the best to second order; 0 for
            none, and then nothing is minimised.
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

        >>> from flatgauge.examples import linear_regression
        >>> generator = Generator().manual_seed(0)
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
    source = required(
        generator,
        caller="normalized_sharpness_direct(surface)",
        otherwise="call `fg.measure(surface, seed=0)`",
    )
    # A copy: whether the sweep still had to draw must not change the noise.
    start, noise = source.clone_state(), branches(source)
    under = under_surrogate(surface, surrogate)
    blocks = block_curvature(under, ("diagonal",), probes=probes, generator=start)
    shaken, second_order = _start(under, blocks, select(blocks.layers, layers), lam)
    found = _minimise(shaken, steps, tolerance, pairs, noise)
    drowned = shaken.drowned()
    few = min(pairs, _FEW_PAIRS)
    with_noise, best = shaken.values([drowned, found.changes], few, noise("noise"))
    degenerate = bool(with_noise.mean() < best.mean())
    changes = drowned if degenerate else found.changes
    (draws,) = shaken.values([changes], pairs, noise("value"))
    details = {
        "second order": second_order,
        "penalty": shaken.penalty(changes),
        "pure noise": float(with_noise.mean()) - shaken.penalty(drowned),
        "steps": float(found.steps),
    } | ({"last gain": found.gain} if found.steps else {})
    options: dict[str, object] = {"lam": lam, "surrogate": surrogate, "steps": steps}
    options |= {"tolerance": tolerance, "pairs": pairs}
    options |= {} if layers is None else {"layers": layers}
    if not torch.isfinite(draws).all():
        note = "the loss overflows under the noise; take a larger `lam`"
        return Estimate(math.inf, converged=False, details=details, options=options, notes=(note,))
    value, stderr = float(draws.mean()), float(draws.std()) / math.sqrt(pairs)
    notes = caveats(surface, surrogate)
    if degenerate or value > _NEAR * details["pure noise"]:
        notes.append(
            "`lam` is too small: noise that drowns the weights costs no penalty and gives "
            f"{details['pure noise']:.3g}, so that the minimum lies at or near infinite noise and "
            "says nothing about flatness; take a larger one"
        )
    if not degenerate:
        notes += _remarks(found)
    if value - details["penalty"] < -2 * stderr:
        notes.append(
            "the loss falls under the noise: the point is no minimum, and the search ended there"
        )
    return Estimate(
        value,
        stderr=stderr,
        converged=found.converged or degenerate,
        details=details,
        options=options,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Found:
    """The best scales that a search came to.

    Attributes:
        changes: Of the scales.
        gain: By how much the last stage lowered the value; 0 if it did not.
        converged: Whether that was less than the tolerance.
        steps: How many were taken.
    """

    changes: Changes
    gain: float
    converged: bool
    steps: int


def _minimise(
    shaken: _Shaken,
    steps: int,
    tolerance: float,
    pairs: int,
    noise: Callable[[str], Generator],
) -> _Found:
    """Search in stages, each as long as all before it, until one gains next to nothing.

    Where noise lowers the loss, the point is no minimum, and the search would go on to train the
    network by noise: it ends there.

    Args:
        shaken: What is under noise.
        steps: The most to take.
        tolerance: What part of the value is next to nothing.
        pairs: Of noise, to compare scales by.
        noise: Gives a source of randomness for a purpose.

    Returns:
        The best scales found.
    """
    best, gain, converged = shaken.unchanged(), 0.0, False
    if not steps:
        return _Found(best, gain, converged, 0)
    scaled = [shaken.multiplied(4.0**power) for power in _FACTORS]
    tried = shaken.values(scaled, _FACTOR_PAIRS, noise("factor"))
    means = [float(draws.mean()) for draws in tried]
    best = scaled[min(range(len(means)), key=lambda place: _ordered(means[place]))]
    search, choice = noise("search"), noise("choice")
    taken, length, falls = 0, _STAGE, False
    while taken < steps and not converged and not falls:
        length = min(length, steps - taken)
        moved = shaken.searched(best, length, search)
        first, last = shaken.values([best, moved], pairs, choice)
        taken += length
        differences = first - last
        gain = max(float(differences.mean()), 0.0) if last.isfinite().all() else 0.0
        if gain > 0:
            best, first = moved, last
        penalty = shaken.penalty(best)
        rise, error = float(first.mean()) - penalty, float(first.std()) / math.sqrt(pairs)
        falls = rise < -2 * error
        seen = float(differences.std()) / math.sqrt(pairs)
        # A stage that is shorter than the first could not have gone far.
        converged = length >= _STAGE and gain <= max(tolerance * (abs(rise) + penalty), seen)
        length = taken
    return _Found(best, gain, converged, taken)


def _ordered(number: float) -> float:
    """A number that sorts last if it is none."""
    return math.inf if math.isnan(number) else number


def _remarks(found: _Found) -> list[str]:
    """Why the search has not come to a minimum, if it has not."""
    if not found.steps:
        return ["not minimised (`steps=0`): the value at the best scales to second order"]
    if not found.converged:
        return [
            f"not minimised: the last stage of the search still lowered the value by "
            f"{found.gain:.2g}, or was shorter than {_STAGE} steps; raise `steps`"
        ]
    return []


def _start(
    surface: LossSurface, blocks: Blocks, names: Sequence[str], lam: float
) -> tuple[_Shaken, float]:
    """The best scales to second order, and the value there."""
    variances, squares, layers, value = {}, {}, {}, 0.0
    for name in names:
        block = blocks[name]
        assert block.layer is not None
        scaling = scaled(block)
        # E L − L is half of Σ h s, and so the sum is ½ Σ h s + (W² / λ) / s.
        variances[name] = torch.from_numpy(scaling.products) / math.sqrt(lam)
        squares[name] = block.layer.canonical(block.weight.square()).sum(-1).cpu()
        layers[name] = block.layer
        value += scaling.value / (2 * math.sqrt(lam))
    return _Shaken(surface, variances, squares, layers, lam), value


@dataclass(frozen=True)
class _Shaken:
    """A surface under noise on its layers.

    Attributes:
        surface: The surface.
        variances: Of the noise, by layer (groups, out, in), before any change.
        squares: Of the weights, summed over the kernel.
        layers: How each is contracted.
        lam: λ.
    """

    surface: LossSurface
    variances: Mapping[str, Tensor]
    squares: Mapping[str, Tensor]
    layers: Mapping[str, Layer]
    lam: float

    def unchanged(self) -> Changes:
        """No change."""
        return {
            name: (torch.zeros_like(v[:, :, :1]), torch.zeros_like(v[:, :1, :]))
            for name, v in self.variances.items()
        }

    def multiplied(self, factor: float) -> Changes:
        """All variances times one factor."""
        return {
            name: (rows + math.log(factor), columns)
            for name, (rows, columns) in self.unchanged().items()
        }

    def drowned(self) -> Changes:
        """So much noise that weights are nothing beside it, layer by layer."""
        changes = self.unchanged()
        for name, term in self._terms(changes).items():
            entries = int((term > 0).sum())
            if entries:
                # On average over the entries, W² / σ² is 2 λ times the penalty.
                ratio = 2 * self.lam * float(term.sum()) / entries
                changes[name][0].add_(math.log(ratio / _DROWNED))
        return changes

    def penalty(self, changes: Changes) -> float:
        """The weights over the noise."""
        return float(sum(term.sum() for term in self._terms(changes).values()))

    def values(self, candidates: list[Changes], pairs: int, generator: Generator) -> list[Tensor]:
        """What is to be small, by every pair of the same noise for all candidates."""
        origin, point = self.surface.value(), self.surface.point
        draws: list[list[float]] = [[] for _ in candidates]
        deviations = [self._deviations(changes) for changes in candidates]
        for _ in range(pairs):
            noise = self._noise(generator)
            for found, deviation in zip(draws, deviations, strict=True):
                shift = self._shift(deviation, noise)
                ends = [self.surface.value(point + sign * shift) for sign in (1, -1)]
                found.append(self._share * (sum(ends) / 2 - origin))
        return [
            torch.tensor(found, dtype=torch.float64) + self.penalty(changes)
            for found, changes in zip(draws, candidates, strict=True)
        ]

    def searched(self, start: Changes, steps: int, generator: Generator) -> Changes:
        """Go down the slope of the expectation; the mean of the later half of the way."""
        changes = {name: (rows.clone(), columns.clone()) for name, (rows, columns) in start.items()}
        point = self.surface.point
        flat = [part for parts in changes.values() for part in parts]
        mean = [torch.zeros_like(part) for part in flat]
        descent = torch.optim.Adam(flat, lr=_RATE, eps=1e-30)
        kept = 0
        for step in range(steps):
            deviations, noise = self._deviations(changes), self._noise(generator)
            shift = self._shift(deviations, noise)
            slopes = [self.surface.gradient(point + sign * shift) for sign in (1, -1)]
            if not all(torch.isfinite(slope).all() for slope in slopes):
                break
            parts = self.surface.split(self._share * (slopes[0] - slopes[1]) / 2)
            penalties = self._terms(changes)
            for name, (rows, columns) in changes.items():
                felt = parts[name].cpu().double() * deviations[name] * noise[name] / 2
                slope = self.layers[name].canonical(felt).sum(-1) - penalties[name]
                rows.grad, columns.grad = slope.sum(2, keepdim=True), slope.sum(1, keepdim=True)
            descent.param_groups[0]["lr"] = _RATE * (1 - step / steps)
            descent.step()
            if 2 * step >= steps - 1:
                kept += 1
                for total, part in zip(mean, flat, strict=True):
                    total += (part - total) / kept
        if not kept:
            return start
        halves = iter(mean)
        return {name: (next(halves), next(halves)) for name in changes}

    def _variances(self, changes: Changes) -> dict[str, Tensor]:
        return {
            name: v * (changes[name][0] + changes[name][1]).exp()
            for name, v in self.variances.items()
        }

    def _terms(self, changes: Changes) -> dict[str, Tensor]:
        """The weights over the noise, entry by entry; none where there is no noise."""
        variances = self._variances(changes)
        return {
            name: (squares / (2 * self.lam * variances[name])).where(variances[name] > 0, 0.0)
            for name, squares in self.squares.items()
        }

    def _deviations(self, changes: Changes) -> dict[str, Tensor]:
        """The standard deviation of every weight's noise, of the weights' shape."""
        return {
            name: layer.original(
                variances.sqrt()[..., None].expand(self._kernel(name))
            ).contiguous()
            for (name, variances), layer in zip(
                self._variances(changes).items(), self.layers.values(), strict=True
            )
        }

    def _kernel(self, name: str) -> tuple[int, ...]:
        taps = math.prod(self.layers[name].shape) // self.variances[name].numel()
        return (*self.variances[name].shape, taps)

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
        count = self.surface.objective.count
        return count / (count - samples_without_loss(self.surface))
