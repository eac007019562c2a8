"""Normalized sharpness without a second-order approximation: the loss under noise itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor

from flatgauge.curvature.blocks import DEFAULT_PROBES, Blocks, block_curvature
from flatgauge.curvature.summary import select
from flatgauge.curvature.surrogate import caveats, samples_without_loss, under_surrogate
from flatgauge.estimators import Estimate
from flatgauge.estimators.probes import branches, required
from flatgauge.layers import Layer
from flatgauge.measures.normalized_sharpness import scaled
from flatgauge.measures.registry import measure
from flatgauge.surface import LossSurface

#: How far one step may move the logarithm of a scale, at first; it falls to zero.
_RATE = 0.1

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
    cost="one sweep, 2 × steps gradients, 6 × pairs forward passes",
    given_up={("surrogate", None): {"output_scale"}},
)
def normalized_sharpness_direct(
    surface: LossSurface,
    *,
    lam: float = 1e4,
    surrogate: str | None = "normalized_cross_entropy",
    layers: str | Sequence[str] | None = None,
    steps: int = 20,
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

    Invariance:
        layerwise, nodewise, rows, permutation, output_scale, output_shift. The search moves
        logarithms of scales, from the best to second order: powers of two change no bit.

    Cost:
        The sweep of ``normalized_sharpness``, two gradients per step, six passes per pair.

    Reference:
        [tsuzuku2019normalized], appendix D.

    Args:
        surface: Where to measure.
        lam: λ, what a rise of the loss weighs beside the weights; of the order of the number of
            samples.
        surrogate: ``"normalized_cross_entropy"``, or None for the surface's own loss.
        layers: Glob patterns of the layers to shake; None for all.
        steps: Of the search for better scales than the best to second order; 0 for none.
        pairs: Number of antithetic pairs for the value, at least 2.
        probes: Hessian products for the start, of layers that cannot be swept.
        generator: Source of randomness, required.

    Returns:
        The estimate with its standard error. The problem is not convex: the search may have missed
        better scales. Every choice is made on other noise than the value is taken on.

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
        >>> abs(found.value - found.details["second order"]) < 4 * found.stderr
        True
    """
    if not (math.isfinite(lam) and lam > 0):
        raise ValueError(f"`lam={lam!r}` must be a positive finite number.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"`steps={steps!r}` must be a whole number of at least 0.")
    if pairs < 2:
        raise ValueError(f"`pairs={pairs!r}` gives no standard error; draw at least 2 pairs.")
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
    nothing = shaken.unchanged()
    found = shaken.searched(steps, noise("search"))
    first, last = shaken.values([nothing, found], pairs, noise("choice"))
    better = bool(last.mean() < first.mean())
    (draws,) = shaken.values([found if better else nothing], pairs, noise("value"))
    details = {
        "second order": second_order,
        "penalty": shaken.penalty(found if better else nothing),
        "gain of the search": float(first.mean() - last.mean()) if better else 0.0,
    }
    options: dict[str, object] = {"lam": lam, "surrogate": surrogate}
    options |= {"steps": steps, "pairs": pairs} | ({} if layers is None else {"layers": layers})
    if not torch.isfinite(draws).all():
        note = "the loss overflows under the noise; take a larger `lam`"
        return Estimate(math.inf, converged=False, details=details, options=options, notes=(note,))
    stderr = float(draws.std()) / math.sqrt(pairs)
    value, notes = float(draws.mean()), caveats(surface, surrogate)
    if steps and not better:
        notes.append("the search found no better scales than its start")
    if value - details["penalty"] < -2 * stderr:
        notes.append(
            "the loss falls under the noise: the point is no minimum, and more `steps` find less"
        )
    return Estimate(value, stderr=stderr, details=details, options=options, notes=tuple(notes))


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

    def searched(self, steps: int, generator: Generator) -> Changes:
        """Go down the slope of the expectation; the mean of the later half of the way."""
        changes, point = self.unchanged(), self.surface.point
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
