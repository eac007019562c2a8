"""What bounds are made of: finite sets of scales, divergences, noise, numbers told outright."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import build
from scipy.integrate import quad
from scipy.stats import norm, truncnorm
from torch import nn

from flatgauge import LossSurface
from flatgauge.analysis.bounds.pac_bayes import description_length, layer_noise, on_grid
from flatgauge.curvature.block_diagonal import block_curvature, with_surrogate
from flatgauge.estimators.linalg import TruncatedNormal
from flatgauge.measures.normalized_sharpness import best_scales


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("bits", [8, 9, 12])
def test_scales_come_from_a_set_of_the_stated_size(bits):
    members = set()
    steps = 2 ** (bits - 8)
    for octave in range(-130, 131):
        for k in range(steps):
            members |= set(on_grid(np.array([2.0 ** (octave + k / steps)]), bits)[0].tolist())
    assert len(members) == 2**bits
    drawn = np.exp(np.random.default_rng(0).normal(0, 30, 500))
    assert set(on_grid(drawn, bits)[0].tolist()) <= members


def test_the_nearest_scale_is_taken():
    drawn = np.exp(np.random.default_rng(0).normal(0, 10, 500))
    for bits in (8, 10, 20):
        found, clipped = on_grid(drawn, bits)
        assert clipped == 0
        assert np.abs(np.log2(found / drawn)).max() <= 0.5001 / 2 ** (bits - 8)


def test_four_times_a_number_goes_to_four_times_its_scale_bit_for_bit():
    drawn = np.exp(np.random.default_rng(1).normal(0, 5, 500))
    for bits in (8, 11, 31, 48):
        for power in (-20, -2, 2, 14):
            moved = on_grid(np.ldexp(drawn, power), bits)[0]
            assert (moved == np.ldexp(on_grid(drawn, bits)[0], power)).all()


def test_numbers_beyond_the_set_are_counted():
    found, clipped = on_grid(np.array([1e-300, 1.0, 1e300]), 8)
    assert found.tolist() == [2.0**-128, 1.0, 2.0**127]
    assert clipped == 2


@pytest.mark.parametrize("surrogate", [None, "normalized_cross_entropy"])
@pytest.mark.parametrize("case", ["mlp", "grouped and dilated conv"])
def test_variances_are_the_products_of_normalized_sharpness(case, surrogate):
    surface = with_surrogate(build(case).surface(), surrogate)
    blocks = block_curvature(surface, ("diagonal",)).layers
    assert surrogate or not all(layer_noise(block).filled for block in blocks.values())
    for block in blocks.values():
        noise, products = layer_noise(block), best_scales(block).products
        found = noise.round_scales(1 / math.sqrt(2 * 8.0), 40)
        assert np.isfinite(found.variances).all()
        assert (found.variances > 0).all()
        if not noise.filled:
            assert found.variances == pytest.approx(products / 4, rel=1e-8)
        assert found.deviations().shape == block.weight.shape
        literal = (block.weight.square() / (2 * found.deviations().square())).sum()
        assert found.divergence == pytest.approx(float(literal), rel=1e-10)


def test_the_divergence_of_two_normals_with_one_variance():
    mean, deviation = 1.3, 0.7
    q, p = norm(mean, deviation), norm(0.0, deviation)
    numeric = quad(lambda x: q.pdf(x) * (q.logpdf(x) - p.logpdf(x)), -10, 12)[0]
    assert numeric == pytest.approx(mean**2 / (2 * deviation**2), rel=1e-8)


def dead_layer(weights, inputs):
    """A linear layer of three classes on given inputs."""
    model = nn.Linear(weights.shape[1], 3, bias=False).double()
    model.weight.data.copy_(weights)
    labels = torch.arange(len(inputs)) % 3
    surface = LossSurface(model, "cross_entropy", (inputs, labels))
    return block_curvature(surface, ("diagonal",))["weight"]


def test_columns_without_curvature_or_weights_have_finite_noise():
    inputs = torch.randn(30, 4, generator=seeded(), dtype=torch.float64)
    inputs[:, 1] = 0.0  # Nothing ever comes in here.
    weights = torch.randn(3, 4, generator=seeded(1), dtype=torch.float64)
    weights[:, 2] = 0.0
    inputs[:, 3] = 0.0
    weights[:, 3] = 0.0  # And here there is nothing at all.
    noise = layer_noise(dead_layer(weights, inputs))
    assert noise.filled
    found = noise.round_scales(1.0, 20)
    assert np.isfinite(found.variances).all()
    assert (found.variances > 0).all()
    assert np.isfinite(found.divergence)
    alive, dead = found.variances[0, :, 0], found.variances[0, :, 1]
    assert (dead > 1e-3 * alive).all()
    assert found.variances[0, :, 3].max() < 1e-30


def test_filled_noise_follows_powers_of_two():
    inputs = torch.randn(30, 4, generator=seeded(), dtype=torch.float64)
    inputs[:, 1] = 0.0
    weights = torch.randn(3, 4, generator=seeded(1), dtype=torch.float64)
    weights[:, 2] = 0.0
    factors = torch.tensor([2.0, 0.125, 64.0, 1.0], dtype=torch.float64)
    one = layer_noise(dead_layer(weights, inputs)).round_scales(0.3, 9)
    other = layer_noise(dead_layer(weights / factors, inputs * factors)).round_scales(0.3, 9)
    assert (other.variances == one.variances / factors.square().numpy()).all()
    assert other.divergence == one.divergence


def test_a_layer_without_any_curvature_has_layer_noise_its_own_size():
    weights = torch.randn(3, 4, generator=seeded(1), dtype=torch.float64)
    noise = layer_noise(dead_layer(weights, torch.zeros(30, 4, dtype=torch.float64)))
    found = noise.round_scales(1.0, 20)
    assert 0.1 < found.variances.mean() / float(weights.square().mean()) < 10


@pytest.mark.parametrize(("sigma", "cut"), [(1.0, 0.5), (0.3, 1.0), (2.0, 1e-4), (1.0, math.inf)])
def test_truncated_noise_is_what_it_says(sigma, cut):
    noise = TruncatedNormal(sigma, cut)
    known = truncnorm(-cut / sigma, cut / sigma, scale=sigma)
    assert noise.mass == pytest.approx(norm.cdf(cut / sigma) - norm.cdf(-cut / sigma), rel=1e-9)
    assert noise.variance == pytest.approx(min(known.var(), cut**2 / 3), rel=1e-6)
    drawn = noise.draw(20_000, seeded())
    assert drawn.abs().max() <= cut
    assert float(drawn.square().mean()) == pytest.approx(noise.variance, rel=0.05)
    assert abs(float(drawn.mean())) < 5 * math.sqrt(noise.variance / 20_000)


@pytest.mark.parametrize("prior", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("sigma", "cut"), [(1.0, 0.5), (0.3, 1.0), (0.5, math.inf)])
def test_divergence_of_truncated_noise_is_the_integral(sigma, cut, prior):
    centres = torch.tensor([0.0, 0.4, -1.7], dtype=torch.float64)
    noise = TruncatedNormal(sigma, cut)
    reach = min(cut, 12 * sigma)

    def numeric(v):
        mass = norm.cdf(cut / sigma) - norm.cdf(-cut / sigma)

        def integrand(u):
            q = norm.pdf(u, scale=sigma) / mass
            return q * (math.log(q) - norm.logpdf(v + u, scale=prior))

        return quad(integrand, -reach, reach, epsabs=1e-12)[0]

    expected = sum(numeric(float(v)) for v in centres)
    assert noise.divergence(centres, prior) == pytest.approx(expected, rel=1e-7)


def test_divergence_with_the_noise_as_prior_by_hand():
    noise = TruncatedNormal(0.5, 0.5)
    centre = torch.tensor([1.0, 2.0])
    by_hand = -2 * math.log(math.erf(math.sqrt(0.5))) + 5 / (2 * 0.25)
    assert noise.divergence(centre, 0.5) == pytest.approx(by_hand, rel=1e-12)


def test_numbers_told_outright_are_counted_with_their_bits():
    case = build("residual with batch-norm")
    noisy = {"stem.weight", "conv.weight", "head.weight"}
    told = description_length(case.surface(), noisy, "told")
    # γ and β of two batch-norms over three channels, three biases; two means and variances.
    assert told.numbers == 12 + 3 + 12
    assert told.bits == 64 * told.numbers
    assert told.note == "15 trained parameters and 12 stored numbers"
    case.model.float()
    assert description_length(case.surface(), noisy, "told").bits == 32 * 27


def test_frozen_parameters_are_told_unless_they_were_given():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    inputs = torch.randn(20, 4, generator=seeded())
    surface = LossSurface(model, "cross_entropy", (inputs, torch.arange(20) % 3))
    assert description_length(surface, {"2.weight"}, "told").numbers == 25 + 3
    given = description_length(surface, {"2.weight"}, "given")
    assert given.numbers == 3
    assert "given before the data were seen" in given.note


def test_a_parameter_that_is_not_read_costs_nothing():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.idle = nn.Linear(2, 3, bias=False), nn.Parameter(torch.ones(7))

        def forward(self, x):
            return self.layer(x)

    inputs = torch.randn(9, 2, generator=seeded())
    surface = LossSurface(Idle(), "cross_entropy", (inputs, torch.arange(9) % 3))
    told = description_length(surface, {"layer.weight"}, "told")
    assert (told.numbers, told.note) == (0, "nothing")
