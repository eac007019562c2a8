"""The width of the prior: the published one, and the one that makes the divergence smallest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bound_problems import terms
from cases import build
from test_bounds_invariance import rescaled
from torch import Tensor
from torch.distributions import Normal, kl_divergence

import flatgauge as fg
from flatgauge.analysis.bounds.pac_bayes import PRIORS, layer_noise
from flatgauge.curvature.block_diagonal import block_curvature, with_surrogate


def literal(weight: Tensor, deviation: Tensor, factor: float) -> float:
    """KL of N(W, σ²) from N(0, τ σ²), weight by weight."""
    prior = Normal(torch.zeros_like(weight), math.sqrt(factor) * deviation)
    return float(kl_divergence(Normal(weight, deviation), prior).sum())


@pytest.mark.parametrize("case", ["mlp", "grouped and dilated conv"])
@pytest.mark.parametrize("lam", [8.0, 1e4])
def test_the_divergence_is_the_smallest_over_all_widths(case, lam):
    surface = with_surrogate(build(case).surface(), "normalized_cross_entropy")
    for block in block_curvature(surface, ("diagonal",)).layers.values():
        noise = layer_noise(block).round_scales(1 / math.sqrt(2 * lam), 20)
        weight, deviation = block.weight, noise.deviations()
        assert literal(weight, deviation, 1.0) == pytest.approx(noise.divergence, rel=1e-9)
        widths = np.exp(np.linspace(-2, 12, 400))
        least = min(literal(weight, deviation, width) for width in widths)
        fine = noise.smallest_divergence(40)
        assert least * (1 - 1e-9) >= fine
        best = 1 + float((weight / deviation).square().mean())
        assert fine == pytest.approx(literal(weight, deviation, best), rel=1e-9)
        assert fine == pytest.approx(weight.numel() / 2 * math.log(best), rel=1e-9)
        # One width per octave costs little more, and never as much as the published width.
        assert fine <= noise.smallest_divergence(8) <= fine + 0.03 * weight.numel()
        assert noise.smallest_divergence(8) <= noise.divergence * (1 + 1e-12)


def test_with_one_deviation_per_tensor_the_best_variance_is_the_sum_of_two():
    """σ_P² = σ² + ‖W‖² / n."""
    weight, deviation = torch.tensor([1.0, -2.0, 0.5]).double(), 0.3 * torch.ones(3).double()
    best = deviation[0] ** 2 + weight.square().mean()
    least = min(literal(weight, deviation, factor) for factor in np.linspace(1.0, 60.0, 4000))
    found = literal(weight, deviation, float(best / deviation[0] ** 2))
    assert found <= least
    assert found == pytest.approx(least, rel=1e-5)
    assert found < literal(weight, deviation, 1.0) / 4  # as published


def test_both_priors_are_shown_and_their_scales_paid():
    surface = build("mlp").surface()
    paper, optimal = (
        terms(fg.bounds(surface, only="normalized", draws=3, prior=prior), "normalized")
        for prior in PRIORS
    )
    assert optimal.value["scales"] == paper.value["scales"] + 3  # one width for each layer
    for frame, prior in ((paper, "paper"), (optimal, "optimal")):
        assert f"`prior='{prior}'`" in frame.note["KL of the weights"]
        used = frame.value[f"KL of the weights, prior {prior}"]
        assert frame.value["KL of the weights"] == used
        lam = frame.value["λ"]
        assert frame.value["(B) weights / λ"] == pytest.approx(used / lam)
        price = frame.value["scales"] * frame.value["bits per scale"] * math.log(2)
        assert frame.value["(B) scales / λ"] == pytest.approx(price / lam)
        parts = frame[frame.part].value.sum()
        assert frame.value["L_D(Q) at most"] == pytest.approx(parts, rel=1e-12)
        both = [frame.value[f"KL of the weights, prior {one}"] for one in PRIORS]
        assert both[1] < both[0]


def test_powers_of_two_change_no_bit_of_the_optimal_prior():
    one, other = (
        fg.bounds(surface, only="normalized", draws=2, prior="optimal")
        for surface in rescaled(build("mlp"), powers=True)
    )
    assert np.array_equal(one.value, other.value, equal_nan=True)
