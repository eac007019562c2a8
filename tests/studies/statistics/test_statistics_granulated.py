"""Granulated Kendall and sign-errors against their definitions, literally."""

import math
from itertools import combinations, product

import numpy as np
import pytest
from network_pools import by_hand, grid, pool, rng
from scipy import stats

from flatgauge.studies.statistics import granulated_kendall, sign_error


def sign(number):
    return (number > 0) - (number < 0)


def tau(points):
    """Over all ordered pairs, as the paper writes it."""
    size = len(points)
    total = sum(
        sign(m - n) * sign(g - h)
        for i, (m, g) in enumerate(points)
        for j, (n, h) in enumerate(points)
        if i != j
    )
    return total / (size * (size - 1))


def literal(frame, measure, target, factors):
    """The paper's sums: one factor runs, all others and the seed stand still."""
    columns = [*factors, "seed"]
    networks = {
        tuple(row[name] for name in columns): (row[measure], row[target])
        for _, row in frame.iterrows()
    }
    found = {}
    for factor in factors:
        others = [name for name in columns if name != factor]
        cells = []
        for fixed in product(*(frame[name].unique() for name in others)):
            at = dict(zip(others, fixed, strict=True))
            keys = [
                tuple({**at, factor: level}[name] for name in columns)
                for level in frame[factor].unique()
            ]
            points = [networks[key] for key in keys if key in networks]
            if len(points) > 1:
                cells.append(tau(points))
        found[factor] = sum(cells) / len(cells)
    return found


@pytest.mark.parametrize("measure", ["good", "by_batch", "noise", "gap"])
@pytest.mark.parametrize("rounded", [False, True])
def test_value_is_the_definition(measure, rounded):
    frame = pool(1)
    if rounded:  # ties on both sides
        frame[measure] = frame[measure].round(0)
        frame["gap"] = frame["gap"].round(0)
    found = granulated_kendall(frame, measure, "gap", ["init", "batch"], generator=rng())
    expected = literal(frame, measure, "gap", ["init", "batch"])
    assert dict(found.details["by_factor"]) == pytest.approx(expected)
    assert found.value == pytest.approx(sum(expected.values()) / 2)
    assert dict(found.details["cells"]) == {"init": 15, "batch": 15}
    assert found.low <= found.value <= found.high


def test_runs_that_are_missing_make_smaller_cells():
    frame = pool(2).drop(index=[0, 7, 8, 20, 21])
    frame.loc[30, "good"] = np.nan
    found = granulated_kendall(frame, "good", "gap", ["init", "batch"], generator=rng())
    expected = literal(frame.drop(index=30), "good", "gap", ["init", "batch"])
    assert dict(found.details["by_factor"]) == pytest.approx(expected)
    assert found.count == 39
    assert "1 without a value of `good` left out" in found.notes


def test_four_networks_by_hand():
    frame = by_hand()
    found = granulated_kendall(frame, "measure", "gap", ["a", "b"], generator=rng())
    # One pair of six is out of order, but those two networks differ in both factors.
    assert stats.kendalltau(frame["measure"], frame["gap"]).statistic == pytest.approx(2 / 3)
    assert found.details["by_factor"] == {"a": 1.0, "b": 1.0}
    assert found.details["cells"] == {"a": 2, "b": 2}
    assert found.value == 1.0
    assert math.isnan(found.low)
    assert found.notes == ("no interval: there is one seed, so there is nothing to resample",)


def test_a_tie_counts_as_nothing():
    frame = by_hand()
    frame["measure"] = [1.0, 2.0, 1.0, 4.0]  # equal in the cell of b = 0
    found = granulated_kendall(frame, "measure", "gap", ["a", "b"], generator=rng())
    assert found.details["by_factor"] == {"a": 0.5, "b": 1.0}


def test_a_measure_that_follows_one_factor_only_is_found_out():
    frame = pool(3, seeds=10)
    plain = stats.kendalltau(frame["by_batch"], frame["gap"]).statistic
    found = granulated_kendall(frame, "by_batch", "gap", ["init", "batch"], generator=rng())
    assert plain > 0.5
    assert found.details["by_factor"]["batch"] > 0.7
    assert (
        abs(found.details["by_factor"]["init"]) < 0.35
    )  # 30 cells of 3 pairs: 3.3 standard errors
    true = granulated_kendall(frame, "good", "gap", ["init", "batch"], generator=rng())
    assert true.details["by_factor"]["init"] > 0.8
    assert true.low > found.high


def test_a_factor_can_hide_that_a_measure_is_wrong():
    frame = grid(4, a=[0, 1], b=[0, 1, 2], c=[0, 1, 2])
    frame["gap"] = 100 * frame["a"] + frame["b"] + 3 * frame["c"]
    frame["measure"] = 100 * frame["a"] - frame["b"] - 3 * frame["c"]
    found = granulated_kendall(frame, "measure", "gap", ["a", "b", "c"], generator=rng())
    assert stats.spearmanr(frame["measure"], frame["gap"]).statistic > 0.4
    assert found.details["by_factor"] == {"a": 1.0, "b": -1.0, "c": -1.0}
    assert found.value == pytest.approx(-1 / 3)


def test_a_factor_with_one_level_has_no_cells():
    frame = pool(0)
    found = granulated_kendall(frame, "good", "gap", ["init", "rate"], generator=rng())
    assert set(found.details["by_factor"]) == {"init"}
    assert found.details["cells"]["rate"] == 0
    assert "`rate` has one level only" in found.notes


def test_seeds_that_are_not_shared_leave_no_cells():
    frame = pool(0)
    frame["seed"] = range(len(frame))
    found = granulated_kendall(frame, "good", "gap", ["init", "batch"], generator=rng())
    assert math.isnan(found.value)
    assert found.reason == "no two networks differ in one factor alone"
    assert "no two networks differ in `init` alone" in found.notes
    across = granulated_kendall(
        frame, "good", "gap", ["init", "batch"], seed_column=None, generator=rng()
    )
    assert across.details["cells"] == {"init": 3, "batch": 3}
    assert across.details["by_factor"]["batch"] > 0.9
    assert "no interval: seeds are not told apart, so there is nothing to resample" in across.notes


def test_a_level_that_occurs_twice_is_not_compared_with_itself():
    frame = by_hand()
    frame.loc[4] = {"a": 0, "b": 0, "seed": 0, "measure": 9.0, "gap": 0.0}
    found = granulated_kendall(frame, "measure", "gap", ["a", "b"], generator=rng())
    # In b = 0: the first and the third network agree, the new and the third do not.
    assert found.details["by_factor"]["a"] == pytest.approx((0 + 1) / 2)


def test_what_varies_by_design_may_be_missing_or_a_word():
    frame = pool(0)
    frame["momentum"] = frame["init"].map({"a": np.nan, "b": 0.5, "c": 0.9})
    by_word = granulated_kendall(frame, "good", "gap", ["init", "batch"], generator=rng())
    by_gap = granulated_kendall(frame, "good", "gap", ["momentum", "batch"], generator=rng())
    assert by_word.value == by_gap.value


@pytest.mark.parametrize("ask", [granulated_kendall, sign_error])
def test_infinite_measures_are_ordered(ask):
    frame, finite = pool(4), pool(4)
    finite.loc[3, "good"] = 1e300
    frame.loc[3, "good"] = math.inf
    drawn = {"generator": rng()} if ask is granulated_kendall else {}
    first = ask(frame, "good", "gap", ["init", "batch"], **drawn)
    drawn = {"generator": rng()} if ask is granulated_kendall else {}
    assert first == ask(finite, "good", "gap", ["init", "batch"], **drawn)


def literal_errors(frame, measure, target, factors):
    """Pairs that differ in one factor, sorted by its two levels."""
    errors = {}
    for (_, one), (_, other) in combinations(frame.iterrows(), 2):
        apart = [name for name in [*factors, "seed"] if one[name] != other[name]]
        if len(apart) == 1 and apart[0] != "seed":
            agree = sign(one[measure] - other[measure]) * sign(one[target] - other[target])
            key = (apart[0], frozenset([one[apart[0]], other[apart[0]]]))
            errors.setdefault(key, []).append((1 - agree) / 2)
    return {key: sum(found) / len(found) for key, found in errors.items()}


@pytest.mark.parametrize("measure", ["good", "by_batch", "noise"])
def test_sign_errors_are_the_definition(measure):
    frame = pool(5)
    frame[measure] = frame[measure].round(1)
    found = sign_error(frame, measure, "gap", ["init", "batch"])
    expected = literal_errors(frame, measure, "gap", ["init", "batch"])
    shown = {
        (name, frozenset([a, b])): e for (name, a, b), e in found.details["by_environment"].items()
    }
    assert shown == pytest.approx(expected)
    assert found.value == pytest.approx(max(expected.values()))
    assert found.details["mean"] == pytest.approx(sum(expected.values()) / len(expected))
    assert found.details["by_environment"][found.details["worst"]] == found.value


def test_sign_errors_find_the_environment_where_a_measure_fails():
    frame = grid(3, a=[0, 1, 2], b=[0, 1])
    frame["gap"] = frame["a"] + 10 * frame["b"]
    frame["measure"] = np.where(frame["a"] == 2, -1.0, frame["a"]) + 10 * frame["b"]
    found = sign_error(frame, "measure", "gap", ["a", "b"])
    assert found.details["by_environment"] == {
        ("a", 0, 1): 0.0,
        ("a", 0, 2): 1.0,
        ("a", 1, 2): 1.0,
        ("b", 0, 1): 0.0,
    }
    assert (found.value, found.details["mean"]) == (1.0, 0.5)


@pytest.mark.parametrize("measure", ["same"])
def test_what_has_no_order_says_so(measure):
    frame = pool(0)
    for found in (
        granulated_kendall(frame, measure, "gap", ["init"], generator=rng()),
        sign_error(frame, measure, "gap", ["init"]),
    ):
        assert found.reason == "same: all the same"
    frame["seed"] = range(len(frame))
    alone = sign_error(frame, "good", "gap", ["init", "rate"])
    assert math.isnan(alone.value)
    assert alone.reason == "no two networks differ in one factor alone"
    assert "`rate` has one level only" in alone.notes


def test_the_frame_is_left_alone_and_the_answer_is_the_same_again():
    frame = pool(0)
    before = frame.copy()
    first = granulated_kendall(frame, "good", "gap", ["init", "batch"], generator=rng(9))
    assert frame.equals(before)
    assert first == granulated_kendall(frame, "good", "gap", ["init", "batch"], generator=rng(9))


def test_refusals():
    frame = pool(0)
    with pytest.raises(KeyError, match=r"no column `speed`; it has init, batch"):
        granulated_kendall(frame, "good", "gap", ["speed"], generator=rng())
    with pytest.raises(TypeError, match=r"`factors='init'` must be a list .* give \['init'\]"):
        granulated_kendall(frame, "good", "gap", "init", generator=rng())
    with pytest.raises(ValueError, match="`factors` is empty; name at least one column"):
        sign_error(frame, "good", "gap", [])
    with pytest.raises(ValueError, match="names a column twice; name each once"):
        sign_error(frame, "good", "gap", ["init", "init"])
    with pytest.raises(ValueError, match="`seed` is both a factor and the seed"):
        sign_error(frame, "good", "gap", ["init", "seed"])
    with pytest.raises(TypeError, match="`init` holds values that are not numbers"):
        sign_error(frame, "init", "gap", ["batch"])
    with pytest.raises(TypeError, match="`generator` is a NoneType"):
        granulated_kendall(frame, "good", "gap", ["init"], generator=None)
