"""How often intervals hold the truth, in simulations of a fixed size."""

import math

import numpy as np
import pytest
from network_pools import grid, rng
from scipy import stats

from flatgauge.studies.statistics import correlate, granulated_kendall
from flatgauge.studies.statistics.bootstrap import correlations, draw_resamples, interval

#: What the coefficients are for normal pairs with correlation r.
TRUTH = {
    "pearson": lambda r: r,
    "spearman": lambda r: 6 / math.pi * math.asin(r / 2),
    "kendall": lambda r: 2 / math.pi * math.asin(r),
}


def pairs(r, size, source):
    x, noise = source.normal(size=(2, size))
    return x, r * x + math.sqrt(1 - r**2) * noise


def enough(hits, runs, level=0.95, slack=0.02):
    """No more misses than chance allows, for an interval that is right but for a small slack."""
    true = level - slack
    z = (hits - runs * true) / math.sqrt(runs * true * (1 - true))
    return z > -4


@pytest.mark.parametrize("kind", TRUTH)
@pytest.mark.parametrize(("size", "r"), [(8, 0.6), (30, 0.0), (30, 0.9)])
def test_intervals_hold_the_truth_as_often_as_they_say(kind, size, r):
    source, runs, hits, wide = rng(11), 150, 0, 0.0
    for _ in range(runs):
        found = correlate(*pairs(r, size, source), kind=kind, resamples=300, generator=source)
        hits += found.low <= TRUTH[kind](r) <= found.high
        wide += (found.high - found.low) / runs
    assert enough(hits, runs)
    assert wide < (1.6 if size == 8 else 0.9)  # and they say something


def accelerated(values, value, jackknife):
    """The bias-corrected accelerated interval, as the textbooks have it."""
    share = np.clip((values < value).mean() + (values == value).mean() / 2, 1e-4, 1 - 1e-4)
    bias, off = stats.norm.ppf(share), jackknife.mean() - jackknife
    bend = (off**3).sum() / (6 * (off**2).sum() ** 1.5)
    shifted = bias + stats.norm.ppf([0.025, 0.975])
    return np.quantile(values, stats.norm.cdf(bias + shifted / (1 - bend * shifted)))


def test_skewed_values_are_why_the_interval_is_not_the_accelerated_one():
    source, size, runs, r = rng(5), 100, 400, 0.9
    # Of two log-normal sides, by their moments.
    truth = (math.exp(r) - 1) / (math.e - 1)
    ours, theirs = [], []
    for _ in range(runs):
        x, y = np.exp(pairs(r, size, source))
        values = correlations(
            "pearson", draw_resamples(size, resamples=400, generator=source), x, y
        )
        value = correlations("pearson", np.ones((1, size)), x, y)[0]
        jackknife = correlations("pearson", 1 - np.eye(size), x, y)
        low, high = interval(values, level=0.95, units=size)
        ours.append(low <= truth <= high)
        low, high = accelerated(values, value, jackknife)
        theirs.append(low <= truth <= high)
    better, worse = (int((np.array(ours) > theirs).sum()), int((np.array(ours) < theirs).sum()))
    assert (better - worse) / math.sqrt(better + worse) > 2  # where only one of the two holds
    assert not enough(sum(theirs), runs)
    assert enough(sum(ours), runs, slack=0.07)  # neither is perfect here


def test_few_units_are_why_percentiles_are_widened():
    source, runs, ours, plain = rng(3), 300, 0, 0
    for _ in range(runs):
        x, y = pairs(0.6, 6, source)
        values = correlations("pearson", draw_resamples(6, resamples=300, generator=source), x, y)
        low, high = interval(values, level=0.95, units=6)
        ours += low <= 0.6 <= high
        low, high = np.nanquantile(values, [0.025, 0.975])
        plain += low <= 0.6 <= high
    assert enough(ours, runs)
    assert plain < ours


def test_ends_by_hand():
    # Three units: sqrt(3 / 2) * t(0.75, 2) = 1.2247 * 0.8165 = 1, and Phi(-1) = 0.158655.
    values = np.linspace(0.0, 1.0, 100_001)
    assert interval(values, level=0.5, units=3) == pytest.approx((0.158655, 0.841345), abs=1e-5)


def test_nothing_to_take_an_interval_of():
    assert all(map(math.isnan, interval(np.full(5, np.nan), level=0.9, units=9)))
    assert all(map(math.isnan, interval(np.arange(5.0), level=0.9, units=1)))


def networks(source):
    """Every seed moves all its networks a little, every network moves on its own."""
    frame = grid(8, a=[0, 1, 2], b=[0, 1, 2])
    shared = source.normal(size=8)[frame["seed"]]
    frame["gap"] = 0.5 * frame["a"] + source.normal(size=len(frame))
    frame["m"] = 0.5 * frame["gap"] + 0.5 * shared * frame["b"] + source.normal(size=len(frame))
    return frame


def test_intervals_over_seeds_hold_the_truth():
    source, runs = rng(7), 80
    every = [
        granulated_kendall(
            networks(source), "m", "gap", ["a", "b"], resamples=200, generator=source
        )
        for _ in range(runs)
    ]
    rest = [
        granulated_kendall(
            networks(source), "m", "gap", ["a", "b"], resamples=100, generator=source
        )
        for _ in range(120)
    ]
    truth = np.mean([found.value for found in rest])  # of others, to about 0.009
    assert enough(sum(found.low <= truth <= found.high for found in every), runs)
    assert np.mean([found.high - found.low for found in every]) < 0.5
