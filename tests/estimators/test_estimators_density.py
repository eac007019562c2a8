"""The spectral density: quadrature by its definition, moments and shares that hold."""

import math

import numpy as np
import pytest
import torch
from prescribed import SPECTRA, eigenvalues, matrix_with, seeded

from flatgauge.estimators.density import share_between, spectral_density


def test_by_hand():
    spectrum = spectral_density(torch.diag(torch.tensor([1.0, 5.0])), probes=3, generator=seeded(0))
    starts = torch.stack([torch.randn(2, generator=g) for g in [seeded(0)] for _ in range(3)])
    shares = starts**2 / (starts**2).sum(dim=1, keepdim=True)
    torch.testing.assert_close(spectrum.nodes, torch.tensor([[1.0, 5.0]] * 3).double())
    torch.testing.assert_close(spectrum.weights, shares.double(), rtol=1e-5, atol=1e-6)
    assert (spectrum.size, spectrum.matvecs) == (2, 6)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_low_powers_are_integrated_without_error(steps):
    matrix = matrix_with(SPECTRA["power law"])
    spectrum = spectral_density(matrix, probes=2, steps=steps, generator=seeded(1))
    start = torch.randn(200, generator=seeded(1), dtype=torch.float64)
    start /= start.norm()
    power = start
    for order in range(1, 2 * steps):
        power = matrix @ power
        integral = (spectrum.weights[0] * spectrum.nodes[0] ** order).sum().item()
        assert integral == pytest.approx((start @ power).item(), rel=1e-9)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_weights_are_shares_and_nodes_lie_within_the_spectrum(spectrum):
    matrix = matrix_with(SPECTRA[spectrum])
    found = spectral_density(matrix, probes=3, steps=12, generator=seeded(0))
    assert (found.weights >= 0).all()
    torch.testing.assert_close(found.weights.sum(dim=1), torch.ones(3).double())
    expected = eigenvalues(matrix)
    slack = 1e-12 * np.abs(expected).max()
    low, high = found.extremes
    assert expected[-1] - slack <= low <= high <= expected[0] + slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spectrum", ["linear", "repeated"])
def test_moments_agree_within_their_own_error_for_any_seed(spectrum, dtype):
    values = SPECTRA.get(spectrum, np.linspace(-1, 2, 150))
    matrix = matrix_with(values, dtype)
    exact = [(values**order).mean() for order in (1, 2, 3)]
    for seed in range(50 if dtype == torch.float64 else 5):
        found = spectral_density(matrix, probes=20, steps=2, generator=seeded(seed))
        for order in (1, 2, 3):
            moment = found.moment(order)
            assert abs(moment.value - exact[order - 1]) < 5 * moment.stderr, (seed, order)
        assert found.mean == found.moment(1)
        assert found.mean.stderr < abs(exact[0])
        assert found.mean.matvecs == found.matvecs == 40


@pytest.mark.parametrize("spectrum", ["outliers", "network", "negative dominant", "power law"])
def test_shares_below_a_place_are_those_of_the_eigenvalues(spectrum):
    matrix = matrix_with(SPECTRA[spectrum])
    expected = eigenvalues(matrix)
    found = spectral_density(matrix, probes=30, steps=40, generator=seeded(0))
    grid = np.linspace(expected[-1] - 0.1, expected[0] + 0.1, 200).tolist()
    shares = np.array([share_between(found, -math.inf, x).value for x in grid])
    truth = (expected[:, None] <= np.array(grid)).mean(axis=0)
    # one probe is off by about 1 / sqrt(p); 30 of them by less, plus one node's own weight
    assert np.abs(shares - truth).mean() < 0.02
    assert (np.diff(shares) >= -1e-12).all()
    assert shares[[0, -1]].tolist() == pytest.approx([0.0, 1.0])


def test_shares_of_repeated_values_agree_within_their_error():
    matrix = torch.diag(torch.tensor([0.0] * 60 + [1.0] * 30 + [5.0] * 10).double())
    for seed in range(20):
        found = spectral_density(matrix, probes=20, generator=seeded(seed))
        assert found.matvecs == 3 * 20
        for x, expected in ((-1.0, 0.0), (0.5, 0.6), (3.0, 0.9), (9.0, 1.0)):
            share = share_between(found, -math.inf, x)
            assert abs(share.value - expected) <= 5 * share.stderr + 1e-9
            assert share.stderr < 0.05


def test_runs_of_different_lengths_are_filled_up_without_weight():
    matrix = torch.zeros(3, 3)
    matrix[0, 0] = 2.0
    found = spectral_density(matrix, probes=4, steps=3, generator=seeded(0))
    assert found.nodes.shape == found.weights.shape == (4, 2)
    assert found.matvecs == 8


def test_the_same_generator_gives_the_same_bits():
    matrix = matrix_with(SPECTRA["network"], torch.float32)
    one, two = (spectral_density(matrix, generator=seeded(4)) for _ in range(2))
    assert torch.equal(one.nodes, two.nodes)
    assert torch.equal(one.weights, two.weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"`spectral_density\(\)` draws random vectors and needs a generator; pass"),
        ({"probes": 1}, "`probes` is 1; an error bar needs `probes=2` or more"),
        ({"steps": 0}, "`steps` is 0; each start needs 1 product or more"),
    ],
)
def test_wrong_arguments_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        spectral_density(torch.eye(3), **options)


def test_wrong_questions_are_explained():
    found = spectral_density(torch.eye(3), generator=seeded(0))
    with pytest.raises(ValueError, match="`order` is 0; pass a power of 1 or more"):
        found.moment(0)
