"""PAC-Bayes bounds on the 0-1 error of a network under noise, with every term apart.

A `BoundContext` enters, a list of terms leaves. `normalized_bound` (Tsuzuku et al. 2019) puts the
noise of normalized sharpness on the weights; `path_bound` (Yi et al. 2019, (8)) puts noise on the
values of basis paths. Both draw networks, and add to their error what naming the noise costs.
`layer_noise` gives the noise on a layer: variances are products of a scale per row and one per
column, from a finite set, so that naming them costs bits; `description_length` counts the numbers
that have no noise and are named outright.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Generator, Tensor

from flatgauge.analysis.bounds.terms import (
    ASSUMED,
    NORMALIZED,
    BoundContext,
    Networks,
    NotCoveredError,
    Term,
    error_terms,
    held_out_terms,
    total,
    vacuous_term,
)
from flatgauge.curvature.block_diagonal import block_curvature, samples_without_loss, with_surrogate
from flatgauge.curvature.blocks import Block
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.estimators.linalg import TruncatedNormal
from flatgauge.estimators.matrix_scaling import Array, minimize_scaled_sum
from flatgauge.graph.layers import Layer
from flatgauge.measures.normalized_sharpness import best_scales
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.basis_paths import BasisPaths, surface_paths

#: The priors of `normalized_bound`, as wide as the noise, as published, or as wide as makes the
#: divergence smallest: what is said of each, the divergence, and what names it.
PRIORS = {
    "paper": (
        "σ_P = σ, as published: the prior is as wide as the noise",
        "Σ W²/(2σ²)",
        "rows and columns of all layers",
    ),
    "optimal": (
        "σ_P² = τ_l σ² with τ_l next to 1 + mean of W²/σ² over the layer: the smallest",
        "Σ_l ½ n_l (ln τ_l + (1 + m_l)/τ_l − 1)",
        "rows and columns of all layers, and one τ_l for each layer",
    ),
}

#: Draws per λ, from which the best λ is guessed; the bound itself takes fresh ones.
_PILOT = 8

#: Bits that name the standard deviation of the prior of `path_bound`: a power of two from 2^-128
#: up to 2^127.
_BITS = 8

#: The scales of the set lie between this power of two and its inverse.
_LOWEST = -128

#: Bits of a set with one scale per octave, and the most that a float64 resolves.
FEWEST_BITS, MOST_BITS = 8, 48

#: What an entry without curvature (or without weight) counts as having: this share of what makes
#: it cost as much as an entry of the layer costs on average.
_SHARE = 0.1

#: What frozen parameters count as: named outright, or given before the data were seen.
FROZEN = ("told", "given")


# -- noise with scales from a finite set, and numbers named outright ---------------------------


@dataclass(frozen=True)
class LayerNoise:
    """The noise on one layer: variances are products of rows and columns.

    Attributes:
        rows: Scales of its output units (groups, out).
        columns: Scales of its input units (groups, in).
        squares: Of the weights, summed over the kernel (groups, out, in).
        filled: Whether entries without curvature or weight had to be given some.
        clipped: How many scales lay beyond the ends of the finite set.
    """

    layer: Layer
    rows: Array
    columns: Array
    squares: Array
    filled: bool
    clipped: int = 0

    def round_scales(self, factor: float, bits: int) -> LayerNoise:
        """The noise times a factor, with all scales taken from the finite set."""
        rows, clipped_rows = on_grid(self.rows * factor, bits)
        columns, clipped_columns = on_grid(self.columns, bits)
        return replace(self, rows=rows, columns=columns, clipped=clipped_rows + clipped_columns)

    @property
    def count(self) -> int:
        """The number of scales."""
        return self.rows.size + self.columns.size

    @cached_property
    def variances(self) -> Array:
        """The variances (groups, out, in)."""
        products: Array = self.rows[:, :, None] * self.columns[:, None, :]
        return products

    @cached_property
    def divergence(self) -> float:
        """KL of the weights under this noise from zero under the same."""
        return float((self.squares / self.variances).sum()) / 2

    def smallest_divergence(self, bits: int) -> float:
        """Return the smallest KL of the weights under this noise from zero under wider noise.

        With a prior of variances τ σ², one τ for the layer, and m the mean of W² / σ² over its n
        weights, the divergence is ½ n (ln τ + (1 + m) / τ − 1). It is smallest at τ = 1 + m; where
        all σ are one number, that is σ_P² = σ² + ‖W‖² / n. Here τ − 1 comes from the finite set;
        the price of naming it is left out.
        """
        weights = math.prod(self.layer.shape)
        mean = 2 * self.divergence / weights
        if not mean:
            return 0.0  # The least of the set is as good as τ = 1.
        over = float(on_grid(np.array([mean]), bits)[0][0])
        # ln τ − 1 + 1 / τ loses its digits where τ is next to one.
        return weights / 2 * (math.log1p(over) + (mean - over) / (1 + over))

    def deviations(self) -> Tensor:
        """The standard deviation of every weight, of the parameter's shape."""
        roots = torch.from_numpy(np.sqrt(self.variances))
        taps = math.prod(self.layer.shape) // roots.numel()
        return self.layer.original(roots[..., None].expand(*roots.shape, taps)).contiguous()


def on_grid(scales: Array, bits: int) -> tuple[Array, int]:
    """Return the nearest members of a set of 2^bits numbers, and how many scales lay beyond it.

    The set is 2^(k / s) from 2^-128 up to 2^128, with s = 2^(bits − 8) steps per octave. Four
    times a number goes to four times its member, bit for bit.

    Example:
        >>> on_grid(np.array([1.0, 3.1, 0.2]), 8)
        (array([1.  , 4.  , 0.25]), 0)
    """
    mantissas, exponents = np.frexp(scales)
    steps = 2 ** (bits - FEWEST_BITS)
    logs = np.rint(np.log2(mantissas) * steps).astype(np.int64)  # Of the mantissa alone.
    places = exponents.astype(np.int64) * steps + logs
    lowest, highest = _LOWEST * steps, -_LOWEST * steps - 1
    clipped = int(((places < lowest) | (places > highest)).sum())
    places = places.clip(lowest, highest)
    values: Array = np.ldexp(2.0 ** ((places % steps) / steps), places // steps)
    return values, clipped


def layer_noise(block: Block) -> LayerNoise:
    """Return the noise of normalized sharpness on a layer, for λ = 1/2, from a block's diagonal.

    Where no best scales exist (a row without curvature would take infinite noise, a column
    without weights none), entries without curvature are given a little, so that noise is of the
    weights' own size there, and entries without weight likewise. What is chosen here decides how
    good a bound is, not whether it holds.
    """
    layer = block.layer
    assert layer is not None
    squares = layer.canonical(block.weight.square()).sum(-1).cpu().numpy()
    products = best_scales(block).products
    filled = not (products > 0).all()
    if filled:
        diagonal = block.values["diagonal"].clamp_min(0)
        if block.rounding is not None:
            diagonal = diagonal.where(diagonal > block.rounding, 0.0)
        curvature = layer.canonical(diagonal).sum(-1).cpu().numpy()
        products = _fill_zeros(curvature, squares, taps=block.weight.numel() // squares.size)
    rows, columns = _factorize(products)
    return LayerNoise(layer, rows, columns, squares, filled)


def _fill_zeros(curvature: Array, squares: Array, taps: int) -> Array:
    """The best products where every entry with curvature or weight has both."""
    roots = np.sqrt(curvature) * np.sqrt(squares)
    typical = _SHARE * float(roots[roots > 0].mean()) if (roots > 0).any() else float(taps)
    # Rescaling multiplies curvature and divides squares: so it does with what is filled in.
    with np.errstate(divide="ignore", over="ignore"):
        ahead = np.where((curvature == 0) & (squares > 0), typical * (typical / squares), curvature)
        back = np.where((squares == 0) & (curvature > 0), typical * (typical / curvature), squares)
    most = 1e300
    return minimize_scaled_sum(np.minimum(ahead, most), np.minimum(back, most)).products


def _factorize(products: Array) -> tuple[Array, Array]:
    """Rows and columns whose products these are; tiny ones for those that have none."""
    rows = np.full(products.shape[:2], 2.0**_LOWEST)
    columns = np.full((len(products), products.shape[2]), 2.0**_LOWEST)
    for group, matrix in enumerate(products):
        left = (matrix > 0).any(1)
        while left.any():  # One connected part after the other: they share no row and no column.
            first = int(left.argmax())
            there = matrix[first] > 0
            column = int(there.argmax())
            members = matrix[:, column] > 0
            # Relative to its first row: a division by a power of four is exact.
            rows[group, members] = matrix[members, column] / matrix[first, column]
            columns[group, there] = matrix[first, there]
            left &= ~members
    return rows, columns


@dataclass(frozen=True)
class DescriptionLength:
    """Numbers that a bound names one by one: how many, the bits that they take, and which."""

    numbers: int
    bits: int
    note: str


def description_length(
    surface: LossSurface, noisy: Collection[str], frozen: str
) -> DescriptionLength:
    """Count what the model reads except parameters under noise, and the bits of their dtypes."""
    graph = sweep_of(surface).plan.graph
    read = {name for node, name in graph.parameter_names.items() if node.users}
    trained = set(surface.names)
    found: dict[str, list[Tensor]] = {
        "trained parameters": [],
        "frozen parameters": [],
        "stored numbers": [],
    }
    for name, parameter in surface.model.named_parameters():
        if name in read and name not in noisy and (name in trained or frozen == "told"):
            found["trained parameters" if name in trained else "frozen parameters"].append(
                parameter
            )
    stored = {name for node, name in graph.buffer_names.items() if node.users}
    for name, buffer in surface.model.named_buffers():
        if name in stored and buffer.is_floating_point():
            found["stored numbers"].append(buffer)
    counts = {kind: sum(tensor.numel() for tensor in tensors) for kind, tensors in found.items()}
    note = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "nothing"
    if frozen == "given":
        note += "; frozen parameters count as given before the data were seen (`frozen='given'`)"
    everything = [tensor for tensors in found.values() for tensor in tensors]
    bits = sum(tensor.numel() * 8 * tensor.element_size() for tensor in everything)
    return DescriptionLength(sum(counts.values()), bits, note)


# -- noise of normalized sharpness -------------------------------------------------------------


def lambda_grid(samples: int) -> list[float]:
    """The λ that are tried: √(2m), doubled until 2m; they depend on nothing but m."""
    # Above 2m, Ψ / λ alone is more than 1; below √(2m), a larger λ is better whatever the data are.
    start = math.sqrt(2 * samples)
    return [start * 2**k for k in range(int(math.log2(2 * samples) / 2) + 1)]


@dataclass(frozen=True)
class _Candidate:
    """The bound for one λ before any draw; `terms` are added to the error of the noisy network."""

    lam: float
    noise: dict[str, LayerNoise]
    bits: int
    terms: tuple[Term, ...] = ()

    @property
    def known_error(self) -> float:
        """What is added to the error of the noisy network, summed."""
        return total(self.terms)

    def divergence(self, prior: str) -> float:
        """KL of the noisy weights from a prior, without the price of naming its scales."""
        if prior == "paper":
            return math.fsum(layer.divergence for layer in self.noise.values())
        return math.fsum(layer.smallest_divergence(self.bits) for layer in self.noise.values())

    def scales(self, prior: str) -> int:
        """How many scales a prior is named by."""
        rows_and_columns = sum(layer.count for layer in self.noise.values())
        return rows_and_columns + (len(self.noise) if prior == "optimal" else 0)

    def networks(self, surface: LossSurface, source: Generator) -> Networks:
        """Draw networks around the surface's own: the values of its parameters."""
        params = surface.params
        deviations = {name: layer.deviations() for name, layer in self.noise.items()}

        def draw() -> list[Tensor]:
            moved = dict(params)
            for name, deviation in deviations.items():
                normal = torch.randn(deviation.shape, generator=source, dtype=torch.float64)
                weight = params[name]
                moved[name] = (weight.cpu().double() + deviation * normal).to(weight)
            return [moved[name] for name in surface.names]

        return draw


def normalized_bound(
    context: BoundContext, *, bits: int, frozen: str, surrogate: str | None, prior: str
) -> list[Term]:
    r"""Return the terms of a bound on the 0-1 error of the network under noise, each apart.

    Definition:
        .. math:: L_D(Q) \le L_S(Q) + \frac{1}{\lambda} \Big(
                  \mathrm{KL} + (\text{scales} \cdot \text{bits} + \text{rest})
                  \ln 2 + \ln \frac{|\Lambda|}{\delta'} + \frac{\lambda^2}{2m} \Big)

    Raises:
        NotCoveredError: If the model has no layers.
    """
    surface, samples = context.surface, context.data.samples
    shaped_by = _shaping_loss(context, surrogate)
    blocks = block_curvature(
        with_surrogate(surface, shaped_by), ("diagonal",), generator=context.source("curvature")
    )
    if not blocks.layers:
        raise NotCoveredError(
            "the model has no layers (parameters contracted with an activation), so that there are "
            "no weights to put noise on; this bound needs at least one linear layer or convolution."
        )
    noise = {name: layer_noise(block) for name, block in blocks.layers.items()}
    rest = description_length(surface, noise, frozen)
    grid = lambda_grid(samples)
    # Best scales for λ = 1/2 are found; for other λ all variances have one factor more (eq. 17).
    candidates = [
        _Candidate(
            lam,
            {n: one.round_scales(1 / math.sqrt(2 * lam), bits) for n, one in noise.items()},
            bits,
        )
        for lam in grid
    ]
    best = _best(
        context, [_price_candidate(one, context, rest, prior, len(grid)) for one in candidates]
    )
    errors, seen = context.draw_errors(best.networks(surface, context.source("networks")))
    notes = _noise_notes(best, shaped_by, surrogate, all(b.exact for b in blocks.values()))
    notes = f"under `prior={prior!r}`; {notes}"
    inside = f"one of {len(grid)} from {grid[0]:.4g} to {grid[-1]:.4g}"
    hyperprior = f"uniform over {2**bits} variances evenly spaced in logarithm, 2^-128 to 2^128"
    terms = [
        Term("m", samples, note="training samples with a label"),
        Term("λ", best.lam, note=inside),
        Term("KL of the weights", best.divergence(prior), note=notes),
        *(
            Term(f"KL of the weights, prior {kind}", best.divergence(kind), note=about)
            for kind, (about, _, _) in PRIORS.items()
        ),
        Term("scales", best.scales(prior), note=PRIORS[prior][2]),
        Term("bits per scale", bits, note=f"hyperprior: {hyperprior}"),
        Term("numbers told outright", rest.numbers, note=rest.note),
        *error_terms(context, errors, absolute=False),
        *best.terms,
    ]
    bound = total(terms)
    terms += [
        Term("L_D(Q) at most", bound, note=f"{context.confidence}; {ASSUMED}"),
        vacuous_term(bound),
    ]
    return [*terms, *held_out_terms(context, seen, bound)]


def _shaping_loss(context: BoundContext, surrogate: str | None) -> str | None:
    """The loss to shape the noise by: the surface's own where normalized logits say nothing."""
    if surrogate == NORMALIZED and context.data.classes == 2:
        return None  # Two normalized logits are always 1 and -1: nothing is curved.
    try:
        samples_without_loss(with_surrogate(context.surface, surrogate))
    except ValueError:  # Constant logits have no normalized loss.
        return None
    return surrogate


def _price_candidate(
    candidate: _Candidate, context: BoundContext, rest: DescriptionLength, prior: str, tried: int
) -> _Candidate:
    """A candidate with all that is known of its bound before networks are drawn."""
    lam, half = candidate.lam, context.delta / 2
    scales = candidate.scales(prior) * candidate.bits * math.log(2)
    terms = (
        Term(
            *("(B) weights / λ", candidate.divergence(prior) / lam),
            part=True,
            note=f"{PRIORS[prior][1]} / λ",
        ),
        Term("(B) scales / λ", scales / lam, part=True, note="scales × bits × ln 2 / λ"),
        Term(
            *("(B) told outright / λ", rest.bits * math.log(2) / lam),
            part=True,
            note=f"{rest.note}: without noise",
        ),
        Term(
            *("ln(1/δ) / λ", -math.log(half) / lam),
            part=True,
            note=f"of δ = {context.delta:g}, half is spent here and half on the draws",
        ),
        Term(
            *("price of the grid / λ", math.log(tried) / lam),
            part=True,
            note=f"a union bound over {tried} λ, fixed by the number of samples alone",
        ),
        Term(
            *("Ψ / λ", lam / (2 * context.data.samples)),
            part=True,
            note="λ / (2m) as published; Hoeffding's lemma gives λ / (8m)",
        ),
    )
    return replace(candidate, terms=terms)


def _best(context: BoundContext, candidates: list[_Candidate]) -> _Candidate:
    """The λ that looks best; however it is picked, the bound holds for all λ of the grid."""
    promising = [c for c in candidates if c.known_error < 1]
    if len(promising) < 2:
        return min(candidates, key=lambda candidate: candidate.known_error)

    def guess(candidate: _Candidate) -> float:
        # The same draws for every λ.
        draw = candidate.networks(context.surface, context.source("pilot"))
        return (
            candidate.known_error + math.fsum(context.error(draw()) for _ in range(_PILOT)) / _PILOT
        )

    return min(promising, key=guess)


def _noise_notes(
    best: _Candidate, shaped_by: str | None, surrogate: str | None, exact: bool
) -> str:
    """What was chosen for the noise; any choice is allowed."""
    loss = shaped_by or "the surface's own loss"
    notes = [f"noise per row and column, shaped by the curvature of {loss}"]
    if shaped_by != surrogate:
        notes.append(f"{surrogate} has no curvature for two classes or constant logits")
    if not exact:
        notes.append("some of it was estimated")
    filled = [f"`{name}`" for name, layer in best.noise.items() if layer.filled]
    if filled:
        notes.append(
            f"rows or columns of {', '.join(filled)} have no best scale (no curvature, or no "
            "weights); they have noise in proportion to their weights"
        )
    clipped = sum(layer.clipped for layer in best.noise.values())
    if clipped:
        notes.append(f"{clipped} scales lie beyond the hyperprior's set and were put at its ends")
    return "; ".join(notes)


# -- noise on basis paths ----------------------------------------------------------------------


def path_bound(context: BoundContext, *, skeleton: str, frozen: str) -> list[Term]:
    r"""Return the terms of a bound on the 0-1 error of the network with noise on its basis paths.

    Definition:
        .. math:: E_u[l(v + u)] \le \hat l(v) + |E_u[\hat l(v + u)] - \hat l(v)|
                  + 4 \sqrt{\tfrac1n (KL + \ln \tfrac{2n}{\delta'})}

    Raises:
        NotCoveredError: If parameters are frozen, as paths lead through them, or no path is there.
    """
    surface, n = context.surface, context.data.samples
    still = [name for name, p in surface.model.named_parameters() if not p.requires_grad]
    if still:
        raise NotCoveredError(
            f"`{still[0]}` is frozen, but paths lead through all parameters, and this bound puts "
            "noise on all; call `model.requires_grad_(True)` and make a new surface."
        )
    paths = surface_paths(surface, skeleton)
    if not len(paths):
        raise NotCoveredError("the model has no basis paths: every path through it has value zero.")
    values, cut = paths.values, paths.smallest / 2
    # Without hidden units there is no pole, and no size to go by but that of the weights.
    size = cut if math.isfinite(cut) else float(values.abs().mean()) or 1.0
    noise = TruncatedNormal(size, cut)
    wanted = math.sqrt(float(values.square().mean()) + noise.variance)
    prior = float(on_grid(np.array([wanted]), _BITS)[0][0])
    divergence = [
        Term("KL of the paths", noise.divergence(values, prior), note="from the prior N(0, σ_P²)"),
        *_naming_terms(context, paths, frozen),
        Term("KL of σ_P", _BITS * math.log(2), note=f"{_BITS} bits name it among powers of two"),
    ]
    whole = math.fsum(term.value for term in divergence)
    root = 4 * math.sqrt((whole + math.log(2 * n / (context.delta / 2))) / n)
    errors, seen = context.draw_errors(_path_networks(context, paths, noise))
    basis = (
        f"{len(paths)} basis paths, {paths.skeleton} skeleton, smallest |u_b| {paths.smallest:.3g}"
    )
    cut_note = "there are no hidden units, so that there is no pole and nothing is cut off"
    if paths.hidden:
        cut_note = "noise is cut off at half of the smallest |u_b|, where the loss has a pole"
    terms = [
        Term("n", n, note="training samples with a label"),
        Term("basis paths", len(paths), note=basis),
        Term("σ", noise.sigma, note="size of the noise on every path"),
        Term("τ", noise.cut, note=cut_note),
        Term("σ_P", prior, note="standard deviation of the prior"),
        *divergence,
        *error_terms(context, errors, absolute=True),
        Term(
            *("4 √((KL + ln(2n/δ)) / n)", root),
            part=True,
            note=f"of δ = {context.delta:g}, half is spent here and half on the draws",
        ),
    ]
    bound = total(terms)
    terms += [
        Term("E_u l(v+u) at most", bound, note=f"{context.confidence}; {ASSUMED}"),
        vacuous_term(bound),
    ]
    return [*terms, *held_out_terms(context, seen, bound)]


def _path_networks(context: BoundContext, paths: BasisPaths, noise: TruncatedNormal) -> Networks:
    """Draw networks with noise on their paths."""
    params, source = context.surface.params, context.source("paths")

    def draw() -> list[Tensor]:
        moved = paths.to_weights(paths.values + noise.draw(len(paths), source))
        return [moved[n].to(p) if n in moved else p for n, p in params.items()]

    return draw


def _naming_terms(context: BoundContext, paths: BasisPaths, frozen: str) -> list[Term]:
    """What it costs to name what the coordinates leave open: it depends on the data, too."""
    units = paths.hidden + len(paths.dropped)
    signs, which = units * math.log(2), f"{paths.hidden} signs of free weights"
    if paths.dropped:
        signs = units * math.log(3)
        which += f", and which {len(paths.dropped)} of {units} units were left out"
    choices = 0.0 if paths.skeleton == "diagonal" else float(np.log(paths.choices).sum())
    covered = {name for name, _ in paths.entries} | {edge.name for edge in paths.free}
    outside = description_length(context.surface, covered, frozen)
    inside = [p for n, p in context.surface.model.named_parameters() if n in covered]
    rest = max(sum(p.numel() for p in inside) - len(paths.free) - len(paths), 0)
    bits = outside.bits + rest * max(8 * p.element_size() for p in inside)
    chosen = "the strongest edges in and out of every unit, among all there are"
    return [
        Term("KL of the signs", signs + math.log(2), note=f"{which}, and whether any was left out"),
        Term(
            *("KL of the skeleton", choices),
            note=chosen if choices else "the diagonal skeleton does not depend on the data",
        ),
        Term(
            *("KL told outright", bits * math.log(2)),
            note=f"what is no path: {outside.note}; {rest} weights that no path leads through",
        ),
    ]
