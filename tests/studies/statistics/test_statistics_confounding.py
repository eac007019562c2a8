"""Partial correlations and differences of correlations."""

import math

import numpy as np
import pytest
from network_pools import pool, rng
from scipy import stats

from flatgauge.studies.statistics import (
    confounding,
    correlate,
    correlation_difference,
    partial_correlation,
)
from flatgauge.studies.statistics.bootstrap import draw_resamples


def literal(x, y, given):
    """Ranks, least squares, what is left over."""
    table = np.stack([np.ones(len(x)), *map(stats.rankdata, given)], 1)

    def rest(side):
        ranks = stats.rankdata(side)
        return ranks - table @ np.linalg.lstsq(table, ranks, rcond=None)[0]

    return stats.pearsonr(rest(x), rest(y)).statistic


def columns(seed, size=30, *, ties=False):
    source = rng(seed)
    x, y, z, w = source.normal(size=(4, size))
    found = (x + z, y + 0.3 * x + z + w, z, w)
    return tuple(np.round(2 * column) for column in found) if ties else found


@pytest.mark.parametrize("ties", [False, True])
def test_partial_correlation_is_the_definition(ties):
    x, y, z, w = columns(1, ties=ties)
    one = partial_correlation(x, y, {"z": z}, generator=rng())
    two = partial_correlation(x, y, {"z": z, "w": w}, generator=rng())
    assert one.value == pytest.approx(literal(x, y, [z]))
    assert two.value == pytest.approx(literal(x, y, [z, w]))
    assert one.low < one.value < one.high


def test_resamples_are_ranked_and_fitted_anew():
    x, y, z, _ = columns(2)
    found = partial_correlation(x, y, {"z": z}, resamples=100, level=0.5, generator=rng())
    slow = []
    for row in draw_resamples(30, resamples=100, generator=rng()):
        drawn = np.repeat(np.arange(30), row.astype(int))
        slow.append(literal(x[drawn], y[drawn], [z[drawn]]))
    reach = math.sqrt(30 / 29) * stats.t.ppf(0.75, 29)
    ends = np.quantile(slow, stats.norm.cdf([-reach, reach]))
    assert (found.low, found.high) == pytest.approx(tuple(ends))


def test_one_confounder_by_the_textbook_formula():
    x, y, z, _ = columns(3)
    a, b, c = (stats.spearmanr(*pair).statistic for pair in [(x, y), (x, z), (y, z)])
    expected = (a - b * c) / math.sqrt((1 - b**2) * (1 - c**2))
    assert partial_correlation(x, y, {"z": z}, generator=rng()).value == pytest.approx(expected)


def test_what_a_confounder_explains_goes_away_and_the_rest_stays():
    frame = pool(1, seeds=10)
    feigned = confounding(frame, "by_batch", "gap", ["batch", "noise"], generator=rng())
    assert feigned.plain.value > 0.7
    assert feigned.confounders["batch"]["with_target"].value > 0.7
    assert feigned.confounders["batch"]["with_measure"].value > 0.9
    assert abs(feigned.confounders["batch"]["partial"].value) < 0.35  # 90 networks
    assert feigned.confounders["noise"]["partial"].value > 0.7
    true = confounding(frame, "good", "gap", ["batch", "noise"], generator=rng())
    assert true.confounders["batch"]["partial"].low > 0.5
    assert true.together.low > 0.5


def test_confounders_that_say_the_same_count_once():
    x, y, z, _ = columns(4)
    one = partial_correlation(x, y, {"z": z}, generator=rng())
    twice = partial_correlation(x, y, {"z": z, "more": 3 * z, "less": -z}, generator=rng())
    assert (twice.value, twice.low, twice.high) == pytest.approx((one.value, one.low, one.high))


def test_nothing_is_left():
    x, y, _, _ = columns(5)
    found = partial_correlation(x, y, {"itself": x}, generator=rng())
    assert math.isnan(found.value)
    assert found.reason == "itself: nothing is left"


def test_a_confounder_that_does_not_vary():
    x, y, z, _ = columns(6)
    alone = partial_correlation(x, y, {"rate": np.ones(30)}, generator=rng())
    assert alone.reason == "rate: all the same"
    beside = partial_correlation(x, y, {"rate": np.ones(30), "z": z}, generator=rng())
    assert beside.value == partial_correlation(x, y, {"z": z}, generator=rng()).value
    assert "`rate` is all the same: left out" in beside.notes
    same = partial_correlation(np.ones(30), y, {"rate": np.ones(30), "z": z}, generator=rng())
    assert same.reason == "x: all the same"


def test_a_confounder_that_does_not_vary_in_some_resamples():
    x, y, _, _ = columns(7, size=8)
    rare = np.zeros(8)
    rare[0] = 1.0
    found = partial_correlation(x, y, {"rare": rare}, generator=rng())
    assert found.value == pytest.approx(literal(x, y, [rare]))
    assert math.isfinite(found.low)


def test_too_few_networks():
    x, y, z, w = (column[:4] for column in columns(8))
    found = partial_correlation(x, y, {"z": z, "w": w}, generator=rng())
    assert found.reason == "fewer than 5 networks"
    none = partial_correlation([], [], {"z": []}, generator=rng())
    assert none.reason == "fewer than 3 networks"


@pytest.mark.parametrize("kind", ["pearson", "spearman", "kendall"])
def test_differences_are_of_the_correlations_on_the_same_resamples(kind):
    x, y, z, _ = columns(9)
    found = correlation_difference(x, z, y, kind=kind, generator=rng())
    of = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}
    first, second = of[kind](x, y).statistic, of[kind](z, y).statistic
    assert (found.details["first"], found.details["second"]) == pytest.approx((first, second))
    assert found.value == pytest.approx(first - second)
    assert found.low < found.value < found.high
    turned = correlation_difference(z, x, y, kind=kind, generator=rng())
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))
    assert turned.details["better"] == pytest.approx(1 - found.details["better"])


def test_pairing_sees_what_two_intervals_do_not():
    source = rng(2)
    target, common, more = source.normal(size=(3, 400))
    good, worse = target + common, target + common + 0.7 * more
    one, other = (correlate(side, target, generator=rng()) for side in (good, worse))
    assert one.low < other.high
    found = correlation_difference(good, worse, target, kind="pearson", generator=rng())
    assert found.low > 0
    assert found.details["better"] > 0.95


def test_a_measure_against_itself():
    x, y, _, _ = columns(10)
    found = correlation_difference(x, x, y, generator=rng())
    assert (found.value, found.low, found.high, found.details["better"]) == (0.0, 0.0, 0.0, 0.5)
    assert found.notes == ("no resample tells the two apart",)


def test_a_difference_that_does_not_exist():
    x, y, _, _ = columns(11)
    names = ("trace", "norm", "gap")
    found = correlation_difference(x, np.ones(30), y, names=names, generator=rng())
    assert math.isnan(found.value)
    assert found.reason == "norm: all the same"
    x[:3], y[4] = np.nan, np.nan
    left = correlation_difference(x, x**2, y, names=names, generator=rng())
    assert left.count == 26


def test_refusals():
    x, y, _, _ = columns(0)
    frame = pool(0)
    with pytest.raises(ValueError, match="`given` is empty; name at least one column"):
        partial_correlation(x, y, {}, generator=rng())
    with pytest.raises(ValueError, match="`confounders` is empty"):
        confounding(frame, "good", "gap", [], generator=rng())
    with pytest.raises(TypeError, match="`confounders='rate'` must be a list"):
        confounding(frame, "good", "gap", "rate", generator=rng())
    with pytest.raises(TypeError, match="`init` holds values that are not numbers"):
        confounding(frame, "good", "gap", ["init"], generator=rng())
    with pytest.raises(KeyError, match="no column `norm`"):
        confounding(frame, "good", "gap", ["norm"], generator=rng())
    with pytest.raises(ValueError, match="`kind='rank'` is not known"):
        correlation_difference(x, x, y, kind="rank", generator=rng())
