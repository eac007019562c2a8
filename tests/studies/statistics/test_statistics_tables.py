"""Tables of a study: every number where it belongs, every gap with its reason."""

import math

import numpy as np
import pandas as pd
import pytest
from network_pools import pool, rng

from flatgauge.studies.statistics import (
    before_after_table,
    conditional_information,
    confounding,
    correlate,
    correlation_table,
    granulated_kendall,
    sign_error,
)
from flatgauge.studies.statistics.tables import largest_change

MEASURES = ["good", "by_batch", "noise", "same"]
FACTORS = ["init", "batch"]
FAST = {"resamples": 200, "permutations": 100}


@pytest.fixture(scope="module")
def table():
    return correlation_table(
        pool(0),
        measures=MEASURES,
        target="gap",
        factors=FACTORS,
        confounders=["batch", "rate"],
        **FAST,
    )


def test_rows_and_columns(table):
    assert list(table.index) == MEASURES
    assert table.index.name == "measure"
    triples = ["pearson", "pearson_log", "spearman", "kendall", "granulated"]
    triples += ["partial[batch]", "partial[rate]", "partial[all]"]
    expected = {f"{name}{end}" for name in triples for end in ("", "_low", "_high")}
    expected |= {"granulated[init]", "granulated[batch]", "count", "notes"}
    expected |= {"information", "information_chance", "information_chance_high"}
    expected |= {"sign_error_mean", "sign_error_worst"}
    assert set(table.columns) == expected
    assert list(table.columns[-2:]) == ["count", "notes"]


def test_every_number_is_that_of_its_function(table):
    frame, row = pool(0), table.loc["good"]
    drawing = {"resamples": 200, "generator": rng()}
    for name, log in [("pearson", False), ("pearson", True), ("spearman", False)]:
        found = correlate(
            frame["good"], frame["gap"], kind=name, log=log, resamples=200, generator=rng()
        )
        column = f"{name}_log" if log else name
        assert tuple(row[[column, f"{column}_low", f"{column}_high"]]) == (
            found.value,
            found.low,
            found.high,
        )
    within = granulated_kendall(frame, "good", "gap", FACTORS, **drawing)
    assert row["granulated_low"] == within.low
    assert row["granulated[init]"] == within.details["by_factor"]["init"]
    told = conditional_information(frame, "good", "gap", FACTORS, permutations=100, generator=rng())
    assert (row["information"], row["information_chance"]) == (told.value, told.details["chance"])
    beside = confounding(frame, "good", "gap", ["batch", "rate"], resamples=200, generator=rng())
    assert row["partial[batch]_high"] == beside.confounders["batch"]["partial"].high
    assert row["sign_error_worst"] == sign_error(frame, "good", "gap", FACTORS).value


def test_gaps_have_reasons(table):
    numbers = table.drop(columns=["count", "notes"])
    assert numbers.loc["same"].isna().all()
    assert "no value, same: all the same" in table.loc["same", "notes"]
    assert table.loc["same", "notes"].count("all the same") == 1  # said once for all columns
    assert math.isnan(table.loc["noise", "pearson_log"])
    assert "pearson_log: no value, noise: not all positive" in table.loc["noise", "notes"]
    assert "partial[rate]: no value, rate: all the same" in table.loc["good", "notes"]
    assert (
        numbers.loc["good"]
        .drop(["partial[rate]", "partial[rate]_low", "partial[rate]_high"])
        .notna()
        .all()
    )


def test_a_row_does_not_depend_on_its_neighbours_and_the_frame_is_left_alone(table):
    frame = pool(0)
    alone = correlation_table(
        frame,
        measures=["noise"],
        target="gap",
        factors=FACTORS,
        confounders=["batch", "rate"],
        **FAST,
    )
    assert frame.equals(pool(0))
    assert alone.loc["noise"].equals(table.loc["noise"])
    again = correlation_table(
        frame, measures=["noise"], target="gap", factors=FACTORS, seed=1, **FAST
    )
    assert again.loc["noise", "spearman"] == table.loc["noise", "spearman"]
    assert again.loc["noise", "spearman_low"] != table.loc["noise", "spearman_low"]
    assert not [name for name in again if name.startswith("partial")]


def test_no_warnings_or_errors_on_the_oddest_columns():
    frame = pool(0)
    frame["odd"] = frame["noise"]
    frame.loc[0, "odd"], frame.loc[1, "odd"] = math.inf, np.nan
    frame["empty"] = np.nan
    found = correlation_table(
        frame, measures=["odd", "empty"], target="gap", factors=["init", "rate"], **FAST
    )
    assert found.loc["odd", "count"] == 44
    assert "pearson, pearson_log: 1 with an infinite `odd` left out" in found.loc["odd", "notes"]
    assert "`rate` has one level only" in found.loc["odd", "notes"]
    assert math.isnan(found.loc["odd", "granulated[rate]"])
    assert "fewer than 3 networks" in found.loc["empty", "notes"]


@pytest.mark.parametrize("size", [0, 1, 2])
def test_pools_that_are_too_small_have_a_table_of_gaps(size):
    frame = pool(0).iloc[:size]
    found = correlation_table(
        frame, measures=["good"], target="gap", factors=FACTORS, confounders=["batch"], **FAST
    )
    assert found.drop(columns=["count", "notes"]).isna().all(axis=None)
    assert found.loc["good", "count"] == size
    assert found.loc["good", "notes"].endswith("no value, fewer than 3 networks")
    both = before_after_table(frame, frame, measures=["good"], target="gap", resamples=200)
    assert both.loc["good", ["before", "after", "lost", "itself"]].isna().all()


def test_gaps_of_pandas_are_gaps():
    frame = pool(0)
    frame["odd"] = frame["good"].astype(object)
    frame.loc[3, "odd"] = None
    frame["odder"] = frame["good"].astype("Float64")
    frame.loc[3, "odder"] = pd.NA
    found = correlation_table(
        frame, measures=["odd", "odder"], target="gap", factors=FACTORS, **FAST
    )
    numbers = found.drop(columns="notes")
    assert (found["count"] == 44).all()
    assert numbers.loc["odd"].equals(numbers.loc["odder"])
    assert "1 without a value of `odder` left out" in found.loc["odder", "notes"]


def rescaled(frame):
    after = frame.copy()
    after["good"] *= 1 + 1e-7
    after["noise"] = frame["noise"] + 0.5
    after["by_batch"] = rng(3).normal(size=len(frame))
    return after


def test_before_and_after():
    frame = pool(0)
    # The order of rows does not matter.
    after = rescaled(frame).sample(frac=1, random_state=0)
    found = before_after_table(frame, after, measures=MEASURES, target="gap", resamples=200)
    good, lost = found.loc["good"], found.loc["by_batch"]
    assert good["before"] == good["after"]
    assert (good["lost"], good["lost_low"], good["lost_high"]) == (0.0, 0.0, 0.0)
    assert good["itself"] == pytest.approx(1.0)
    assert good["largest_change"] == pytest.approx(1e-7, rel=1e-3)
    assert lost["before"] > 0.7
    assert lost["lost"] == pytest.approx(lost["before"] - lost["after"])
    assert lost["lost_low"] > 0
    assert abs(lost["itself"]) < 0.6
    assert (
        lost["before"]
        == correlate(
            frame["by_batch"], frame["gap"], kind="spearman", resamples=200, generator=rng()
        ).value
    )
    assert found.loc["same", "largest_change"] == 0.0
    assert "before: no value, before: all the same" in found.loc["same", "notes"]
    assert (found["count"] == 45).all()


def test_kinds_of_before_and_after():
    frame = pool(0)
    for kind in ("pearson", "kendall"):
        found = before_after_table(
            frame, rescaled(frame), measures=["noise"], target="gap", kind=kind, resamples=200
        )
        expected = correlate(
            frame["noise"], frame["gap"], kind=kind, resamples=200, generator=rng()
        )
        assert found.loc["noise", "before_low"] == expected.low


def test_largest_change_by_hand():
    def change(before, after):
        return largest_change(np.array(before), np.array(after))

    assert change([1.0, -2.0, 4.0], [1.5, -1.0, 4.0]) == pytest.approx(0.5)
    assert change([0.0, 1.0], [0.0, 1.0]) == 0.0
    assert change([0.0, 1.0], [1.0, 1.0]) == math.inf
    assert change([math.inf, 1.0], [math.inf, 3.0]) == pytest.approx(2.0)
    assert change([math.inf, 1.0], [5.0, 1.0]) == math.inf
    assert change([1.0, math.nan], [2.0, 1.0]) == pytest.approx(1.0)
    assert math.isnan(change([math.nan], [1.0]))


def test_refusals():
    frame = pool(0)
    with pytest.raises(ValueError, match="`measures` is empty"):
        correlation_table(frame, measures=[], target="gap", factors=FACTORS)
    with pytest.raises(TypeError, match="`measures='good'` must be a list"):
        before_after_table(frame, frame, measures="good", target="gap")
    with pytest.raises(TypeError, match="`factors='init'` must be a list"):
        correlation_table(frame, measures=["good"], target="gap", factors="init")
    with pytest.raises(KeyError, match="no column `accuracy_gap`"):
        correlation_table(frame, measures=["good"], target="accuracy_gap", factors=FACTORS)
    with pytest.raises(KeyError, match="no column `good`"):
        before_after_table(frame, frame.drop(columns="good"), measures=["good"], target="gap")
    with pytest.raises(ValueError, match=r"different rows \(45 and 44\); give the same networks"):
        before_after_table(frame, frame.iloc[1:], measures=["good"], target="gap")
    twice = frame.rename(index={1: 0})
    with pytest.raises(ValueError, match="a row's name occurs twice"):
        before_after_table(twice, frame, measures=["good"], target="gap")
