"""Correlations against scipy, by hand, and on what has none."""

import math

import numpy as np
import pandas as pd
import pytest
from network_pools import rng
from scipy import stats

from flatgauge.studies.statistics import correlate
from flatgauge.studies.statistics.bootstrap import EXACT, correlations, draw_resamples, midranks

KINDS = {
    "pearson": lambda x, y: stats.pearsonr(x, y).statistic,
    "spearman": lambda x, y: stats.spearmanr(x, y).statistic,
    "kendall": lambda x, y: stats.kendalltau(x, y).statistic,
}


def samples(seed, size=25, *, ties=False):
    source = rng(seed)
    x = source.normal(size=size)
    y = x + source.normal(size=size)
    return (np.round(x), np.round(2 * y) / 2) if ties else (x, y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ties", [False, True])
def test_values_and_every_resample_are_scipys(kind, ties):
    x, y = samples(1, ties=ties)
    found = correlate(x, y, kind=kind, resamples=200, generator=rng())
    assert found.value == pytest.approx(KINDS[kind](x, y), rel=1e-12)
    assert found.low < found.value < found.high
    counts = draw_resamples(25, resamples=200, generator=rng())
    slow = []
    for row in counts:
        drawn = np.repeat(np.arange(25), row.astype(int))
        slow.append(KINDS[kind](x[drawn], y[drawn]))
    assert correlations(kind, counts, x, y) == pytest.approx(slow, rel=1e-10, abs=1e-12)


def test_many_points_are_sorted_and_few_are_counted_with_the_same_answer():
    x, y = samples(3, EXACT + 1, ties=True)
    counts = draw_resamples(EXACT + 1, resamples=3, generator=rng())
    sorted_out = correlations("kendall", counts, x, y)
    # One point less in the same order goes by the table of all pairs.
    counts[:, -1] = 0
    without = correlations("kendall", counts, x, y)
    assert correlations("kendall", counts[:, :-1], x[:-1], y[:-1]) == pytest.approx(without)
    assert sorted_out == pytest.approx(without, abs=1e-3)


def test_by_hand():
    x, y = [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]
    # Five of six pairs in order: (5 - 1) / 6; ranks off by one twice: 1 - 6 * 2 / (4 * 15).
    assert correlate(x, y, kind="kendall", generator=rng()).value == pytest.approx(4 / 6)
    assert correlate(x, y, kind="spearman", generator=rng()).value == pytest.approx(0.8)
    assert correlate(x, y, kind="pearson", generator=rng()).value == pytest.approx(0.8)


def test_ties_by_hand():
    # Six pairs, one tied in x, one in y: four in order, none against: 4 / sqrt(5 * 5).
    found = correlate([1, 1, 2, 3], [1, 2, 3, 3], kind="kendall", generator=rng())
    assert found.value == pytest.approx(4 / 5)


def test_ranks_of_a_resample_share_the_mean():
    counts = np.array([[2.0, 0.0, 1.0, 1.0]])
    assert midranks(counts, np.array([5.0, 1.0, 7.0, 5.0])).tolist() == [[2.0, 0.5, 4.0, 2.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_same_generator_same_answer_and_a_measure_turned_round_changes_sign(kind):
    x, y = samples(2)
    first = correlate(x, y, kind=kind, generator=rng(5))
    assert first == correlate(x, y, kind=kind, generator=rng(5))
    turned = correlate(-x, y, kind=kind, generator=rng(5))
    assert turned.value == pytest.approx(-first.value)
    assert (turned.low, turned.high) == pytest.approx((-first.high, -first.low))


def test_global_randomness_is_left_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    correlate(*samples(0), generator=rng())
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_size_and_distance_do_not_matter(size):
    x, y = samples(4)
    expected = KINDS["pearson"](x, y)
    found = correlate(size * x, y, generator=rng())
    assert found.value == pytest.approx(expected)
    assert found.low < expected < found.high
    assert correlate(x + 1e6, y, generator=rng()).value == pytest.approx(expected)


def test_logarithm():
    x, y = samples(5)
    found = correlate(10**x, y, log=True, generator=rng())
    assert found.value == pytest.approx(KINDS["pearson"](x, y))
    refused = correlate(x, y, log=True, names=("trace", "gap"), generator=rng())
    assert math.isnan(refused.value)
    assert refused.reason == "trace: not all positive"


def test_infinite_values_have_a_rank_but_no_distance():
    x, y = [1.0, 2.0, math.inf, 3.0, -math.inf, math.inf], [1.0, 3.0, 5.0, 2.0, 0.0, 4.0]
    for kind in ("spearman", "kendall"):
        found = correlate(x, y, kind=kind, generator=rng())
        assert found.value == pytest.approx(KINDS[kind]([2, 3, 5, 4, 1, 5], y))
        assert found.count == 6
    line = correlate(x, y, names=("trace", "gap"), generator=rng())
    assert line.count == 3
    assert line.value == pytest.approx(KINDS["pearson"]([1, 2, 3], [1, 3, 2]))
    assert "3 with an infinite `trace` left out" in line.notes


@pytest.mark.parametrize("kind", KINDS)
def test_missing_values_are_left_out_and_noted(kind):
    x, y = samples(6)
    gaps = x.copy()
    gaps[[3, 8]] = np.nan
    kept = np.delete(np.arange(25), [3, 8])
    found = correlate(pd.Series(gaps), pd.Series(y), kind=kind, names=("m", "g"), generator=rng())
    assert found.value == pytest.approx(KINDS[kind](x[kept], y[kept]))
    assert found.count == 23
    assert found.notes == ("2 without a value of `m` left out",)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        ([1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0], "x: all the same"),
        ([1.0, 2.0, 3.0], [7.0] * 3, "y: all the same"),
        ([1.0, 1.0 + 1e-15, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0], "x: all the same"),
        ([math.nan] * 4, [1.0, 2.0, 3.0, 4.0], "fewer than 3 networks"),
        ([1.0, 2.0], [1.0, 2.0], "fewer than 3 networks"),
        ([], [], "fewer than 3 networks"),
    ],
)
def test_no_correlation_says_why(kind, x, y, reason):
    found = correlate(x, y, kind=kind, generator=rng())
    assert math.isnan(found.value)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert found.reason == reason
    assert str(found) == f"—: {reason}"


@pytest.mark.parametrize("kind", KINDS)
def test_resamples_of_one_value_are_left_out_and_counted(kind):
    x, y = [1.0, 2.0, 3.0], [1.0, 3.0, 2.0]
    found = correlate(x, y, kind=kind, resamples=1000, generator=rng())
    counts = draw_resamples(3, resamples=1000, generator=rng())
    alone = int((counts.max(1) == 3).sum())  # the same network three times
    assert alone > 50
    assert f"{alone} of 1000 resamples had no value and were left out" in found.notes
    assert "the interval rests on 3 networks and is rough" in found.notes
    assert math.isfinite(found.low)


def test_a_perfect_order_is_not_certainty():
    found = correlate(range(20), range(20), kind="kendall", generator=rng())
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)
    assert any("not certainty" in note for note in found.notes)


def test_refusals():
    x, y = samples(0)
    with pytest.raises(ValueError, match="`kind='tau'` is not known; choose one of pearson"):
        correlate(x, y, kind="tau", generator=rng())
    with pytest.raises(ValueError, match="`level=95` must lie between 0 and 1"):
        correlate(x, y, level=95, generator=rng())
    with pytest.raises(ValueError, match=r"`resamples=10` is too few; give at least 100"):
        correlate(x, y, resamples=10, generator=rng())
    with pytest.raises(TypeError, match=r"`resamples=1000.0` must be an integer"):
        correlate(x, y, resamples=1000.0, generator=rng())
    with pytest.raises(TypeError, match=r"`generator` is a int; .* pass `generator=np.random"):
        correlate(x, y, generator=0)
    with pytest.raises(ValueError, match="differ in length: `x` has 24, `y` has 25"):
        correlate(x[1:], y, generator=rng())
    with pytest.raises(TypeError, match="`x` holds values that are not numbers"):
        correlate(["he", "xavier", "he"], [1, 2, 3], generator=rng())
    with pytest.raises(ValueError, match=r"`x` has shape \(5, 5\); give one number"):
        correlate(x.reshape(5, 5), y, generator=rng())
