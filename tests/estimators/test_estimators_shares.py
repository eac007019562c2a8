"""Shares of eigenvalues and densities on a signed logarithmic axis, against dense spectra."""

import math

import numpy as np
import pytest
import torch
from prescribed import SPECTRA, matrix_with, seeded

from flatgauge.estimators.density import (
    SymlogAxis,
    log_density,
    log_grid,
    resolution,
    share_between,
    spectral_density,
    symlog_axis,
)

EDGES = [(-math.inf, -0.1), (-math.inf, 0.0), (-0.01, 0.01), (0.3, 2.5), (1.0, math.inf)]


def true_shares(matrix, probes, seed, low, high) -> np.ndarray:
    """What each probe truly has between two ends, from all eigenvectors."""
    source = seeded(seed)
    values, vectors = np.linalg.eigh(matrix.numpy())
    inside = (low <= values) & (values <= high)
    found = []
    for _ in range(probes):
        start = torch.randn(len(values), generator=source, dtype=torch.float64).numpy()
        found.append(((vectors.T @ start) ** 2)[inside].sum() / (start**2).sum())
    return np.array(found)


@pytest.mark.parametrize("steps", [3, 10, 40])
@pytest.mark.parametrize("spectrum", ["network", "outliers", "repeated", "power law", "low rank"])
def test_the_bound_holds_what_quadrature_is_off(spectrum, steps):
    matrix = matrix_with(SPECTRA[spectrum])
    for seed in range(3):
        found = spectral_density(matrix, probes=4, steps=steps, generator=seeded(seed))
        for low, high in EDGES:
            share = share_between(found, low, high)
            true = true_shares(matrix, 4, seed, low, high).mean()
            assert abs(share.value - true) <= share.bound + 1e-12, (seed, low, high)


def test_bounds_are_not_idle():
    matrix = matrix_with(SPECTRA["network"])
    found = spectral_density(matrix, probes=4, steps=60, generator=seeded(0))
    assert share_between(found, 0.5, math.inf).bound < 1e-3  # eigenvalues that stand out
    assert share_between(found, -math.inf, -0.1).bound < 1e-2
    assert share_between(found, 0.0, math.inf).bound > 0.01  # amid the bulk


def test_shares_agree_with_the_spectrum_within_their_errors_for_any_seed():
    values = SPECTRA["network"]
    matrix = matrix_with(values)
    for seed in range(8):
        found = spectral_density(matrix, probes=16, steps=20, generator=seeded(seed))
        near = share_between(found, -0.05, 0.05)
        true = (np.abs(values) <= 0.05).mean()
        assert abs(near.value - true) < 5 * near.stderr + near.bound, seed
        assert near.error < 0.2


def test_more_steps_tell_eigenvalues_nearer_to_zero():
    matrix = matrix_with(SPECTRA["network"])
    few, many = (
        resolution(spectral_density(matrix, probes=4, steps=n, generator=seeded(0)))
        for n in (10, 60)
    )
    assert many < few
    closed = spectral_density(matrix_with(SPECTRA["low rank"]), generator=seeded(0))
    assert resolution(closed) == closed.rounding  # four eigenvalues, all of them found


def test_a_matrix_of_zeros_has_all_of_them_at_zero():
    found = spectral_density(torch.zeros(9, 9), generator=seeded(0))
    assert resolution(found) == 0.0
    assert share_between(found, 0.0, 0.0).value == 1.0
    curve = log_density(found, symlog_axis(found), np.linspace(-2, 2, 801), width=0.1)
    assert torch.trapezoid(curve.values, curve.grid).item() == pytest.approx(9, rel=1e-6)


def test_ends_in_the_wrong_order():
    found = spectral_density(torch.eye(3), generator=seeded(0))
    with pytest.raises(ValueError, match=r"`low=2.0` must not lie above `high=1.0`"):
        share_between(found, 2.0, 1.0)


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_curve_integrates_to_the_size(spectrum):
    matrix = matrix_with(SPECTRA[spectrum])
    found = spectral_density(matrix, probes=3, steps=12, generator=seeded(1))
    for axis in (symlog_axis(found), SymlogAxis(1e-9), SymlogAxis(1.0)):
        places = log_grid([found], axis, 0.06)
        curve = log_density(found, axis, places, width=0.06)
        assert (curve.values >= 0).all()
        area = torch.trapezoid(curve.values, curve.grid).item()
        assert area == pytest.approx(len(matrix), rel=1e-4)


def test_known_eigenvalues_are_bells_at_their_places():
    matrix = torch.diag(torch.tensor([1e-3] * 6 + [-1.0, 100.0]).double())
    found = spectral_density(matrix, probes=50, generator=seeded(0))
    axis = symlog_axis(found)
    assert axis.unit == 1e-3
    peaks = axis.place([-1.0, 1e-3, 100.0])
    curve = log_density(found, axis, peaks, width=0.06)
    bell = 1 / (0.06 * math.sqrt(2 * math.pi))
    expected = torch.tensor([1.0, 6.0, 1.0]).double() * bell
    assert ((curve.values - expected).abs() < 4 * curve.stderr + 0.01 * expected).all()
    between = log_density(found, axis, axis.place([-0.03, 1.0]), width=0.06)
    assert between.values.max() < 1e-6


def test_a_node_between_others_is_spread_between_them():
    # Three steps see a bulk from -1e-3 to 1e-3 as one node: what is drawn must span it.
    bulk = np.linspace(-1e-3, 1e-3, 300)
    matrix = torch.diag(torch.from_numpy(np.r_[bulk, 5.0, 10.0]))
    found = spectral_density(matrix, probes=4, steps=3, generator=seeded(0))
    axis = SymlogAxis(1e-6)
    curve = log_density(found, axis, axis.place([-3e-4, 3e-4]), width=0.06)
    assert (curve.values > 5).all()


def test_a_width_of_zero():
    found = spectral_density(torch.eye(3), generator=seeded(0))
    with pytest.raises(ValueError, match=r"`width=0` must be a positive number of decades"):
        log_density(found, SymlogAxis(1.0), np.zeros(1), width=0)


def test_the_axis_is_its_own_inverse_and_counts_decades():
    axis = SymlogAxis(1e-4)
    values = np.array([-1e5, -1.0, -1e-4, 0.0, 1e-12, 3.0])
    np.testing.assert_allclose(axis.value(axis.place(values)), values, rtol=1e-12, atol=1e-18)
    assert axis.place(10.0) - axis.place(1.0) == pytest.approx(1, abs=1e-7)
    with pytest.raises(ValueError, match=r"`unit=0.0` must be a positive finite number"):
        SymlogAxis(0.0)


@pytest.mark.parametrize(
    ("unit", "low", "high", "expected"),
    [
        (1.0, 0.5, 2000.0, [10.0, 100.0, 1000.0]),
        (1.0, -30.0, 0.2, [-10.0, 0.0]),
        (1e-6, -1e-3, 1e6, [-1e-4, 0.0, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6]),
    ],
)
def test_ticks_are_even_and_few(unit, low, high, expected):
    assert SymlogAxis(unit).ticks(low, high) == pytest.approx(expected)
