"""The PAC-Bayes bound of Tsuzuku et al. 2019, under the noise of normalized sharpness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from flatgauge.curvature.blocks import block_curvature
from flatgauge.curvature.surrogate import samples_without_loss, under_surrogate
from flatgauge.guarantees.confidence import lower_mean, upper_mean
from flatgauge.guarantees.heldout import heldout_terms
from flatgauge.guarantees.scales import Noise, Variances, noise_of
from flatgauge.guarantees.setting import ASSUMED, Networks, Setting
from flatgauge.guarantees.terms import NotCoveredError, Term, total, verdict
from flatgauge.guarantees.told import Told, told_outright
from flatgauge.guarantees.zero_one import NORMALIZED
from flatgauge.surface import LossSurface

#: The priors: as wide as the noise, as published, or as wide as makes the divergence smallest.
PRIORS = ("paper", "optimal")

#: Draws per λ, from which the best λ is guessed; the bound itself takes fresh ones.
_PILOT = 8


_FORMULAS = {"paper": "Σ W²/(2σ²)", "optimal": "Σ_l ½ n_l (ln τ_l + (1 + m_l)/τ_l − 1)"}

_PRIOR_NOTES = {
    "paper": "σ_P = σ, as published: the prior is as wide as the noise",
    "optimal": "σ_P² = τ_l σ² with τ_l next to 1 + mean of W²/σ² over the layer: the smallest",
}

_SCALE_NOTES = {
    "paper": "rows and columns of all layers",
    "optimal": "rows and columns of all layers, and one τ_l for each layer",
}


@dataclass(frozen=True)
class _Candidate:
    """The bound for one λ, before anything is drawn."""

    lam: float
    noise: dict[str, Variances]
    terms: tuple[Term, ...]

    @property
    def known(self) -> float:
        """What is added to the error of the noisy network."""
        return total(self.terms)


def lambda_grid(samples: int) -> list[float]:
    """The λ that are tried: √(2m), doubled until 2m.

    Above 2m, Ψ / λ alone is more than 1; below √(2m), a larger λ is better whatever the data are.

    Args:
        samples: m.

    Returns:
        The grid; it depends on nothing but m.
    """
    start = math.sqrt(2 * samples)
    return [start * 2**k for k in range(int(math.log2(2 * samples) / 2) + 1)]


def normalized_bound(
    setting: Setting, *, bits: int, frozen: str, surrogate: str | None, prior: str
) -> list[Term]:
    r"""Bound the 0-1 error of the network under noise, with every term apart.

    Definition:
        .. math:: L_D(Q) \le L_S(Q) + \frac{1}{\lambda} \Big(
                  \mathrm{KL} + (\text{scales} \cdot \text{bits} + \text{told})
                  \ln 2 + \ln \frac{|\Lambda|}{\delta'} + \frac{\lambda^2}{2m} \Big)

    Args:
        setting: Where.
        bits: Of the hyperprior, per scale.
        frozen: What frozen parameters count as.
        surrogate: The loss whose curvature shapes the noise.
        prior: One of `PRIORS`.

    Returns:
        The terms.

    Raises:
        NotCoveredError: If the model has no layers.
    """
    surface, samples = setting.surface, setting.data.samples
    shaped_by = _shaping(setting, surrogate)
    blocks = block_curvature(
        under_surrogate(surface, shaped_by), ("diagonal",), generator=setting.source("curvature")
    )
    if not blocks.layers:
        raise NotCoveredError(
            "the model has no layers (parameters contracted with an activation), so that there are "
            "no weights to put noise on; this bound needs at least one linear layer or convolution."
        )
    noise = {name: noise_of(block) for name, block in blocks.layers.items()}
    told = told_outright(surface, noise, frozen)
    grid = lambda_grid(samples)
    candidates = [_candidate(lam, grid, setting, noise, told, bits, prior) for lam in grid]
    best = _best(setting, candidates)
    points = _points(surface, best.noise, setting.source("networks"))
    errors, seen = setting.errors(points)
    notes = _noise_notes(noise, best, shaped_by, surrogate, all(b.exact for b in blocks.values()))
    terms = [*_facts(setting, best, grid, noise, told, bits, prior, notes)]
    terms += [*_errors(setting, errors), *best.terms]
    whole = total(terms)
    terms.append(Term("L_D(Q) at most", whole, note=f"{setting.confidence}; {ASSUMED}"))
    terms.append(verdict(whole))
    return [*terms, *heldout_terms(setting.heldout, surface, seen, whole, setting.delta)]


def _shaping(setting: Setting, surrogate: str | None) -> str | None:
    """The loss to shape the noise by: the surface's own where normalized logits say nothing."""
    if surrogate == NORMALIZED and setting.data.classes == 2:
        return None  # Two normalized logits are always 1 and -1: nothing is curved.
    try:
        samples_without_loss(under_surrogate(setting.surface, surrogate))
    except ValueError:  # Constant logits have no normalized loss.
        return None
    return surrogate


def _candidate(
    lam: float,
    grid: Sequence[float],
    setting: Setting,
    noise: dict[str, Noise],
    told: Told,
    bits: int,
    prior: str,
) -> _Candidate:
    """What is known of the bound for one λ before networks are drawn."""
    # Best scales for λ = 1/2 are found; for other λ all variances change alike (eq. 17).
    variances = {n: layer.rounded(1 / math.sqrt(2 * lam), bits) for n, layer in noise.items()}
    weights = _divergence(variances, bits, prior)
    scales = _scales(noise, prior) * bits * math.log(2)
    named = told.bits * math.log(2)
    half = setting.delta / 2
    terms = (
        Term("(B) weights / λ", weights / lam, part=True, note=f"{_FORMULAS[prior]} / λ"),
        Term("(B) scales / λ", scales / lam, part=True, note="scales × bits × ln 2 / λ"),
        Term("(B) told outright / λ", named / lam, part=True, note=f"{told.note}: without noise"),
        Term(
            *("ln(1/δ) / λ", -math.log(half) / lam),
            part=True,
            note=f"of δ = {setting.delta:g}, half is spent here and half on the draws",
        ),
        Term(
            *("price of the grid / λ", math.log(len(grid)) / lam),
            part=True,
            note=f"a union bound over {len(grid)} λ, fixed by the number of samples alone",
        ),
        Term(
            *("Ψ / λ", lam / (2 * setting.data.samples)),
            part=True,
            note="λ / (2m) as published; Hoeffding's lemma gives λ / (8m)",
        ),
    )
    return _Candidate(lam, variances, terms)


def _divergence(noise: dict[str, Variances], bits: int, prior: str) -> float:
    """KL of the noisy weights from a prior, without the price of naming its scales."""
    layers = noise.values()
    if prior == "paper":
        return math.fsum(layer.divergence for layer in layers)
    return math.fsum(layer.widened(bits) for layer in layers)


def _scales(noise: dict[str, Noise], prior: str) -> int:
    """How many scales the prior is named by."""
    rows_and_columns = sum(layer.count for layer in noise.values())
    return rows_and_columns + (len(noise) if prior == "optimal" else 0)


def _best(setting: Setting, candidates: list[_Candidate]) -> _Candidate:
    """The λ that looks best; however it is picked, the bound holds for all λ of the grid."""
    open_to = [c for c in candidates if c.known < 1]
    if len(open_to) < 2:
        return min(candidates, key=lambda candidate: candidate.known)

    def guessed(candidate: _Candidate) -> float:
        source = setting.source("pilot")  # The same draws for every λ.
        points = _points(setting.surface, candidate.noise, source)
        errors = [float(setting.data.wrong(points()).double().mean()) for _ in range(_PILOT)]
        return candidate.known + math.fsum(errors) / _PILOT

    return min(open_to, key=guessed)


def _points(surface: LossSurface, noise: dict[str, Variances], source: Generator) -> Networks:
    """Gives networks drawn around the surface's own: the values of its parameters."""
    params = surface.params
    deviations = {name: layer.deviations() for name, layer in noise.items()}

    def draw() -> list[Tensor]:
        moved = dict(params)
        for name, deviation in deviations.items():
            normal = torch.randn(deviation.shape, generator=source, dtype=torch.float64)
            weight = params[name]
            moved[name] = (weight.cpu().double() + deviation * normal).to(weight)
        return [moved[name] for name in surface.names]

    return draw


def _errors(setting: Setting, errors: Tensor) -> list[Term]:
    """The network's own error, what noise adds to it, and what more the draws may have missed."""
    own = setting.own_error()
    mean, count, half = float(errors.mean()), len(errors), setting.delta / 2
    most, least = upper_mean(mean, count, half), lower_mean(mean, count, half)
    return [
        Term("L_S(f)", own, part=True, note="the network's own error on its training data"),
        Term(
            *("(C) L_S(Q) - L_S(f)", mean - own, least - own, most - own),
            part=True,
            note=f"from {count} draws; lower and upper each with confidence {1 - half:g}",
        ),
        Term(
            *("allowance for the draws", most - mean),
            part=True,
            note="how far the mean of the draws may lie below L_S(Q): inverted binary kl",
        ),
    ]


def _facts(
    setting: Setting,
    best: _Candidate,
    grid: Sequence[float],
    noise: dict[str, Noise],
    told: Told,
    bits: int,
    prior: str,
    notes: str,
) -> list[Term]:
    """What the terms are made of."""
    count = _scales(noise, prior)
    inside = f"one of {len(grid)} from {grid[0]:.4g} to {grid[-1]:.4g}"
    hyperprior = f"uniform over {2**bits} variances evenly spaced in logarithm, 2^-128 to 2^128"
    return [
        Term("m", setting.data.samples, note="training samples with a label"),
        Term("λ", best.lam, note=inside),
        Term(
            "KL of the weights",
            _divergence(best.noise, bits, prior),
            note=f"under `prior={prior!r}`; {notes}",
        ),
        *(
            Term(f"KL of the weights, prior {kind}", _divergence(best.noise, bits, kind), note=text)
            for kind, text in _PRIOR_NOTES.items()
        ),
        Term("scales", count, note=_SCALE_NOTES[prior]),
        Term("bits per scale", bits, note=f"hyperprior: {hyperprior}"),
        Term("numbers told outright", told.numbers, note=told.note),
    ]


def _noise_notes(
    noise: dict[str, Noise],
    best: _Candidate,
    shaped_by: str | None,
    surrogate: str | None,
    exact: bool,
) -> str:
    """What was chosen for the noise; any choice is allowed."""
    loss = shaped_by or "the surface's own loss"
    notes = [f"noise per row and column, shaped by the curvature of {loss}"]
    if shaped_by != surrogate:
        notes.append(f"{surrogate} has no curvature for two classes or constant logits")
    if not exact:
        notes.append("some of it was estimated")
    filled = [f"`{name}`" for name, layer in noise.items() if layer.filled]
    if filled:
        notes.append(
            f"rows or columns of {', '.join(filled)} have no best scale (no curvature, or no "
            "weights); they have noise in proportion to their weights"
        )
    clipped = sum(layer.clipped for layer in best.noise.values())
    if clipped:
        notes.append(f"{clipped} scales lie beyond the hyperprior's set and were put at its ends")
    return "; ".join(notes)
