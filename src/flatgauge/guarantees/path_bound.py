"""The PAC-Bayes bound (8) of Yi et al. 2019, under noise on the values of basis paths."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from flatgauge.guarantees.confidence import lower_mean, upper_mean
from flatgauge.guarantees.heldout import heldout_terms
from flatgauge.guarantees.scales import on_grid
from flatgauge.guarantees.setting import ASSUMED, Networks, Setting
from flatgauge.guarantees.terms import NotCoveredError, Term, total, verdict
from flatgauge.guarantees.told import told_outright
from flatgauge.path_space import BasisPaths, paths_of
from flatgauge.truncated import TruncatedNormal

#: Bits that name the prior's standard deviation: a power of two from 2^-128 up to 2^127.
_BITS = 8


def path_bound(setting: Setting, *, skeleton: str, frozen: str) -> list[Term]:
    r"""Bound the 0-1 error of the network with noise on its basis paths, with every term apart.

    Definition:
        .. math:: E_u[l(v + u)] \le \hat l(v) + |E_u[\hat l(v + u)] - \hat l(v)|
                  + 4 \sqrt{\tfrac1n (KL + \ln \tfrac{2n}{\delta'})}

    Args:
        setting: Where.
        skeleton: ``"strongest"`` or ``"diagonal"``.
        frozen: What frozen parameters count as.

    Returns:
        The terms.

    Raises:
        NotCoveredError: If parameters are frozen, as paths lead through them, or no path is there.
        UnsupportedGraphError: If the model has no basis paths.
    """
    surface, n = setting.surface, setting.data.samples
    still = [name for name, p in surface.model.named_parameters() if not p.requires_grad]
    if still:
        raise NotCoveredError(
            f"`{still[0]}` is frozen, but paths lead through all parameters, and this bound puts "
            "noise on all; call `model.requires_grad_(True)` and make the surface anew."
        )
    paths = paths_of(surface, skeleton)
    if not len(paths):
        raise NotCoveredError("the model has no basis paths: every path through it has value zero.")
    values = paths.values
    cut = paths.smallest / 2
    # Without hidden units there is no pole, and no size to go by but that of the weights.
    size = cut if math.isfinite(cut) else float(values.abs().mean()) or 1.0
    noise = TruncatedNormal(size, cut)
    wanted = math.sqrt(float(values.square().mean()) + noise.variance)
    prior = float(on_grid(np.array([wanted]), _BITS)[0][0])
    named = _named(setting, paths, frozen)
    divergence = [
        Term("KL of the paths", noise.divergence(values, prior), note="from the prior N(0, σ_P²)"),
        *named,
        Term("KL of σ_P", _BITS * math.log(2), note=f"{_BITS} bits name it among powers of two"),
    ]
    whole = math.fsum(term.value for term in divergence)
    half = setting.delta / 2
    root = 4 * math.sqrt((whole + math.log(2 * n / half)) / n)
    errors, seen = setting.errors(_networks(setting, paths, noise))
    kept = f"{len(paths)} basis paths, {paths.skeleton} skeleton, smallest |u_b| "
    terms = [
        Term("n", n, note="training samples with a label"),
        Term("basis paths", len(paths), note=kept + f"{paths.smallest:.3g}"),
        Term("σ", noise.sigma, note="size of the noise on every path"),
        Term("τ", noise.cut, note=_cut_note(paths)),
        Term("σ_P", prior, note="standard deviation of the prior"),
        *divergence,
        *_errors(setting, errors),
        Term(
            *("4 √((KL + ln(2n/δ)) / n)", root),
            part=True,
            note=f"of δ = {setting.delta:g}, half is spent here and half on the draws",
        ),
    ]
    bound = total(terms)
    note = f"{setting.confidence}; {ASSUMED}"
    terms += [Term("E_u l(v+u) at most", bound, note=note), verdict(bound)]
    return [*terms, *heldout_terms(setting.heldout, surface, seen, bound, setting.delta)]


def _cut_note(paths: BasisPaths) -> str:
    """Why noise is cut off."""
    if paths.hidden:
        return "noise is cut off at half of the smallest |u_b|, where the loss has a pole"
    return "there are no hidden units, so that there is no pole and nothing is cut off"


def _networks(setting: Setting, paths: BasisPaths, noise: TruncatedNormal) -> Networks:
    """Gives networks with noise on their paths."""
    surface, source = setting.surface, setting.source("paths")
    params = surface.params

    def draw() -> list[Tensor]:
        moved = paths.to_weights(paths.values + noise.draw(len(paths), source))
        return [moved[n].to(p) if n in moved else p for n, p in params.items()]

    return draw


def _named(setting: Setting, paths: BasisPaths, frozen: str) -> list[Term]:
    """What it costs to name what the coordinates leave open: it depends on the data, too."""
    units = paths.hidden + len(paths.dropped)
    signs = units * math.log(2)
    which = f"{paths.hidden} signs of free weights"
    if paths.dropped:
        signs = units * math.log(3)
        which += f", and which {len(paths.dropped)} of {units} units were left out"
    choices = 0.0
    if paths.skeleton != "diagonal":
        choices = float(np.log(paths.choices).sum())
    covered = {name for name, _ in paths.entries} | {edge.name for edge in paths.free}
    free = len(paths.free) + len(paths)
    told = told_outright(setting.surface, covered, frozen)
    inside = [p for n, p in setting.surface.model.named_parameters() if n in covered]
    rest = sum(p.numel() for p in inside) - free
    bits = told.bits + max(rest, 0) * max(8 * p.element_size() for p in inside)
    chosen = "the strongest edges in and out of every unit, among all there are"
    return [
        Term("KL of the signs", signs + math.log(2), note=f"{which}, and whether any was left out"),
        Term(
            *("KL of the skeleton", choices),
            note=chosen if choices else "the diagonal skeleton does not depend on the data",
        ),
        Term(
            *("KL told outright", bits * math.log(2)),
            note=f"what is no path: {told.note}; {max(rest, 0)} weights that no path leads through",
        ),
    ]


def _errors(setting: Setting, errors: Tensor) -> list[Term]:
    """The network's own error, the expected flatness, and what more the draws may have missed."""
    own, mean, count = setting.own_error(), float(errors.mean()), len(errors)
    each = setting.delta / 4
    most, least = upper_mean(mean, count, each), lower_mean(mean, count, each)
    flatness = abs(mean - own)
    largest = max(most - own, own - least, 0.0)
    smallest = 0.0 if least <= own <= most else min(abs(most - own), abs(least - own))
    return [
        Term("l(v) on the training data", own, part=True, note="the network's own error"),
        Term(
            *("F_PSI-expected", flatness, smallest, largest),
            part=True,
            note=f"|E l(v+u) - l(v)| from {count} draws; lower and upper with confidence "
            f"{1 - 2 * each:g}",
        ),
        Term(
            *("allowance for the draws", largest - flatness),
            part=True,
            note="how much larger it may be: inverted binary kl",
        ),
    ]
