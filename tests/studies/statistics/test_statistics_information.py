"""Conditional information against a literal count, by hand, and against chance."""

import math
from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest
from network_pools import by_hand, grid, pool, rng
from scipy import stats

from flatgauge.studies.statistics import conditional_information


def sign(number):
    return (number > 0) - (number < 0)


def literal(frame, measure, target, chosen):
    """I(V_mu; V_g | U_S) / H(V_g | U_S) from dictionaries of probabilities."""
    seen = Counter()
    for (_, one), (_, other) in permutations(list(frame.iterrows()), 2):
        told, true = sign(one[measure] - other[measure]), sign(one[target] - other[target])
        if true:
            known = tuple((one[name], other[name]) for name in chosen)
            seen[known, told, true] += 1
    total = sum(seen.values())
    p = {key: count / total for key, count in seen.items()}
    p_u, p_um, p_ug = Counter(), Counter(), Counter()
    for (u, m, g), share in p.items():
        p_u[u] += share
        p_um[u, m] += share
        p_ug[u, g] += share
    shared = sum(s * math.log(s * p_u[u] / (p_um[u, m] * p_ug[u, g])) for (u, m, g), s in p.items())
    entropy = -sum(s * math.log(s / p_u[u]) for (u, g), s in p_ug.items())
    return shared / entropy


@pytest.mark.parametrize("measure", ["good", "by_batch", "noise"])
@pytest.mark.parametrize("rounded", [False, True])
def test_value_is_the_definition(measure, rounded):
    frame = pool(1, seeds=3)
    if rounded:  # ties on both sides
        frame[measure] = frame[measure].round(0)
        frame["gap"] = frame["gap"].round(0)
    factors = ["init", "batch"]
    found = conditional_information(
        frame, measure, "gap", factors, permutations=100, generator=rng()
    )
    sets = [(), ("init",), ("batch",), ("init", "batch")]
    expected = {chosen: literal(frame, measure, "gap", chosen) for chosen in sets}
    assert dict(found.details["by_set"]) == pytest.approx(expected)
    assert found.value == pytest.approx(min(expected.values()))
    assert expected[found.details["worst_set"]] == pytest.approx(found.value)


def test_four_networks_by_hand():
    found = conditional_information(by_hand(), "measure", "gap", ["a", "b"], generator=rng())

    def bits(p):
        return -p * math.log2(p) - (1 - p) * math.log2(1 - p)

    # All pairs: one of six out of order. Given a: two pairs in order between equal levels; of
    # the four between different ones the measure always tells the same, the gap in three.
    # Given b: the gap between different levels is no question, and equal ones are in order.
    expected = {(): 1 - bits(1 / 6), ("a",): 1 / (1 + 2 * bits(1 / 4)), ("b",): 1.0}
    assert dict(found.details["by_set"]) == pytest.approx(expected)
    assert found.value == pytest.approx(0.34998, abs=1e-5)
    assert found.details["worst_set"] == ()
    assert found.notes == ("given `a` and `b` the order of all pairs is certain: set left out",)


def test_the_target_tells_all_about_itself_in_either_direction():
    frame = pool(2)
    frame["wrong"] = -frame["gap"]
    for measure in ("gap", "wrong"):
        found = conditional_information(frame, measure, "gap", ["init", "batch"], generator=rng())
        assert found.value == pytest.approx(1.0)
        assert found.details["chance"] < 0.5


def test_a_measure_without_information_is_at_chance_for_any_seed():
    above = 0
    for seed in range(40):
        frame = pool(seed, seeds=4)
        found = conditional_information(
            frame, "noise", "gap", ["batch"], permutations=100, generator=rng(seed)
        )
        above += found.value > found.details["chance_high"]
    # Each is above one time in twenty: 2 of 40, with a standard deviation of 1.4. The least of
    # several sets is no higher than any one of them, so there is no lower limit.
    assert above <= 8


def test_a_measure_that_only_knows_a_factor_is_at_chance():
    frame = pool(3, seeds=8)
    assert stats.kendalltau(frame["by_batch"], frame["gap"]).statistic > 0.5
    found = conditional_information(frame, "by_batch", "gap", ["init", "batch"], generator=rng())
    assert found.details["by_set"][()] > 0.15
    assert found.details["by_set"][()] > 10 * found.details["chance_by_set"][()]
    assert "batch" in found.details["worst_set"]
    assert found.value < 0.1
    assert found.value < 3 * found.details["chance"]
    true = conditional_information(frame, "good", "gap", ["init", "batch"], generator=rng())
    assert true.value > 3 * true.details["chance_high"]


def test_few_networks_with_equal_settings_seem_to_tell_much():
    chances = []
    for seeds in (2, 4, 16):
        frame = grid(seeds, a=[0, 1, 2, 3])
        frame["gap"], frame["noise"] = rng(1).normal(size=(2, len(frame)))
        found = conditional_information(frame, "noise", "gap", ["a"], generator=rng())
        chances.append(found.details["chance_by_set"]["a",])
    assert chances[0] > 0.25
    assert chances[0] > 2 * chances[1] > 4 * chances[2]


def test_permutations_stay_among_networks_with_equal_settings():
    # The target is settled by the factor but for two networks of each level.
    frame = grid(2, a=[0, 1, 2])
    frame["gap"] = 10.0 * frame["a"] + frame["seed"]
    frame["measure"] = frame["gap"]
    found = conditional_information(frame, "measure", "gap", ["a"], generator=rng())
    # Between levels nothing is open, and the one pair within tells all in either direction.
    assert found.details["by_set"]["a",] == pytest.approx(1.0)
    assert found.details["chance_by_set"]["a",] == pytest.approx(1.0)
    assert found.details["chance_by_set"][()] < 0.6


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 9])
def test_sets_of_factors(largest):
    frame = grid(2, a=[0, 1], b=[0, 1], c=[0, 1], d=[5])
    frame["gap"], frame["measure"] = rng(2).normal(size=(2, len(frame)))
    found = conditional_information(
        frame, "measure", "gap", ["a", "b", "c", "d"], largest=largest, generator=rng()
    )
    sizes = range(min(largest, 3) + 1)
    assert list(found.details["by_set"]) == [s for size in sizes for s in combinations("abc", size)]


def test_infinite_and_missing_values():
    frame, finite = pool(4, seeds=3), pool(4, seeds=3)
    frame.loc[5, "good"], finite.loc[5, "good"] = math.inf, 1e300
    first = conditional_information(frame, "good", "gap", ["init"], generator=rng())
    assert first == conditional_information(finite, "good", "gap", ["init"], generator=rng())
    frame.loc[6, "good"] = np.nan
    less = conditional_information(frame, "good", "gap", ["init"], generator=rng())
    assert less.count == 26
    assert less.notes == ("1 without a value of `good` left out",)


def test_what_cannot_be_told_says_why():
    frame = pool(0, seeds=2)
    found = conditional_information(frame, "same", "gap", ["init"], generator=rng())
    assert math.isnan(found.value)
    assert math.isnan(found.details["chance"])
    assert found.reason == "same: all the same"
    assert conditional_information(frame, "gap", "same", ["init"], generator=rng()).reason


def test_refusals():
    frame = pool(0, seeds=2)
    with pytest.raises(ValueError, match="`largest=-1` must be a number of factors"):
        conditional_information(frame, "good", "gap", ["init"], largest=-1, generator=rng())
    with pytest.raises(ValueError, match="`permutations=5` is too few"):
        conditional_information(frame, "good", "gap", ["init"], permutations=5, generator=rng())
    with pytest.raises(KeyError, match="no column `sharpness`"):
        conditional_information(frame, "sharpness", "gap", ["init"], generator=rng())
    with pytest.raises(TypeError, match="`generator` is a int"):
        conditional_information(frame, "good", "gap", ["init"], generator=3)
