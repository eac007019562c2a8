"""The confidence that bounds state is seen to hold, and wrong formulas are seen to fail."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binom

from flatgauge.analysis.bounds.pac_bayes import lambda_grid
from flatgauge.analysis.bounds.terms import binary_divergence, lower_mean, upper_mean

RATES = [0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99]


def failure(count, rate, bound):
    """How often a bound that is computed from the mean of coins lies below their rate, exactly."""
    heads = np.arange(count + 1)
    below = np.array([bound(k / count) < rate for k in heads])
    return float(binom.pmf(heads, count, rate)[below].sum())


def test_divergence_by_hand():
    assert binary_divergence(0.5, 0.25) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert binary_divergence(0.0, 0.2) == pytest.approx(-math.log(0.8))
    assert binary_divergence(0.3, 0.3) == 0.0
    assert binary_divergence(0.5, 0.0) == binary_divergence(0.5, 1.0) == math.inf


def test_bounds_of_a_mean_by_hand():
    assert upper_mean(0.0, 100, 0.05) == pytest.approx(1 - 0.05**0.01, rel=1e-12)
    assert lower_mean(1.0, 100, 0.05) == pytest.approx(0.05**0.01, rel=1e-12)
    assert upper_mean(1.0, 7, 0.5) == 1.0
    assert lower_mean(0.0, 7, 0.5) == 0.0


@pytest.mark.parametrize("found", [0.0, 0.1, 0.37, 0.9])
def test_both_sides_mirror_each_other_and_solve_the_equation(found):
    upper, lower = upper_mean(found, 20, 0.1), lower_mean(1 - found, 20, 0.1)
    assert upper == pytest.approx(1 - lower, abs=1e-12)
    assert binary_divergence(found, upper) == pytest.approx(math.log(10) / 20, rel=1e-9)


@pytest.mark.parametrize("delta", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("count", [1, 5, 30, 200])
def test_a_mean_is_covered_as_promised(count, delta):
    for rate in RATES:
        assert failure(count, rate, lambda p: upper_mean(p, count, delta)) <= delta


def test_a_tighter_bound_of_a_mean_would_be_caught():
    worst = max(failure(30, rate, lambda p: upper_mean(p, 30, 0.2**0.5)) for rate in RATES)
    assert worst > 0.2


def test_means_of_other_numbers_than_coins_are_covered():
    drawn = np.random.default_rng(0).beta(0.3, 1.2, size=(4000, 12))
    failed = np.mean([upper_mean(float(row.mean()), 12, 0.3) < 0.2 for row in drawn])
    assert 0 < failed <= 0.3


def step(found, lam, samples, delta, *, psi=1.0):
    """The bound of one classifier that was fixed before the data: KL is zero."""
    return found + (-math.log(delta) + psi * lam**2 / (2 * samples)) / lam


@pytest.mark.parametrize("samples", [20, 200])
@pytest.mark.parametrize("delta", [0.2, 0.5])
def test_the_step_of_the_bound_holds_for_every_lambda(samples, delta):
    for lam in lambda_grid(samples):
        for rate in RATES:
            assert failure(samples, rate, lambda p, t=lam: step(p, t, samples, delta)) <= delta


def test_without_psi_the_step_would_fail():
    assert failure(200, 0.5, lambda p: step(p, 400.0, 200, 0.2, psi=0.0)) > 0.2


@pytest.mark.parametrize("samples", [20, 200])
def test_the_best_of_all_lambda_holds_at_its_price(samples):
    grid, delta = lambda_grid(samples), 0.5

    def best(found):
        return min(step(found, lam, samples, delta / len(grid)) for lam in grid)

    assert all(failure(samples, rate, best) <= delta for rate in RATES)


def test_the_grid_knows_the_number_of_samples_alone():
    grid = lambda_grid(50_000)
    assert grid[0] == pytest.approx(math.sqrt(100_000))
    assert 50_000 < grid[-1] <= 100_000
    assert all(b == 2 * a for a, b in pairwise(grid))
    assert lambda_grid(1) == [math.sqrt(2)]


def test_the_published_mcallester_step_holds():
    """Bound (8) with KL = 0, beside the sharper known one (Maurer 2004) that implies it."""
    for n in (1, 5, 50, 500):
        for delta in (0.05, 0.5):
            published = 4 * math.sqrt(math.log(2 * n / delta) / n)
            maurer = math.sqrt(math.log(2 * math.sqrt(n) / delta) / (2 * n))
            assert published >= maurer
            for rate in RATES:
                assert failure(n, rate, lambda p, t=published: p + t) <= delta


def test_the_price_of_naming_a_classifier_is_needed_and_enough():
    """The best of 64 coins, picked by the sample: KL from the uniform prior is ln 64."""
    count, samples, delta, runs = 64, 100, 0.5, 4000
    lam, rate = 2 * math.sqrt(2 * samples), 0.5
    best = np.random.default_rng(0).binomial(samples, rate, (runs, count)).min(1) / samples

    def failed(divergence):
        slack = (divergence - math.log(delta) + lam**2 / (2 * samples)) / lam
        return float((best + slack < rate).mean())

    assert failed(math.log(count)) <= delta
    tight = (lam**2 / (8 * samples) - math.log(delta)) / lam  # Hoeffding's Ψ, and no price.
    assert float((best + tight < rate).mean()) > delta
