"""Studies as they are declared, and what is read from their rows."""

from __future__ import annotations

import csv
import math
import pickle

import pandas as pd
import pytest
from small_studies import TINY, tiny_study

import flatgauge as fg
from flatgauge.studies import PoolResult, PublishedNumber
from flatgauge.studies.published import PRESETS, STUDIES, published_study


class TestDeclared:
    def test_all_combinations_of_factors_and_seeds(self) -> None:
        runs = tiny_study(factors={"batch, rate": [(4, 0.1), (8, 0.2)], "width": [1.0, 2.0]}).runs()
        found = [(r.batch, r.rate, r.width, r.seed) for r in runs.values()]
        assert found == [
            (b, rate, w, s) for b, rate in ((4, 0.1), (8, 0.2)) for w in (1.0, 2.0) for s in (0, 1)
        ]
        assert next(iter(runs)).startswith("batch-4_width-1.0_seed-0_")

    def test_seeds_by_name(self) -> None:
        runs = tiny_study(factors={"batch": [4]}, seeds=[5, 9]).runs()
        assert [recipe.seed for recipe in runs.values()] == [5, 9]

    def test_a_declaration_comes_back(self) -> None:
        study = tiny_study(measures={"hessian_trace": {"tolerance": 0.1}}, measured=30)
        again = fg.Study.from_dict(study.declaration())
        assert again.declaration() == study.declaration()
        assert again.runs() == study.runs()

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"factors": {"colour": [1]}}, "names 'colour', which is no factor"),
            ({"factors": {"seed": [1]}}, "names 'seed', which is no factor"),
            ({"factors": {"batch": "many"}}, "give a list of its values"),
            ({"factors": {"batch": []}}, "give a list of its values"),
            (
                {"factors": {"batch, rate": [(1, 2, 3)]}},
                r"give 2 values together, as \(batch, rate",
            ),
            ({"factors": {}}, "must name at least one field of a recipe"),
            ({"factors": ["batch"]}, "must name at least one field of a recipe"),
            ({"factors": {"batch": [8, 16, 8]}}, "has a value twice"),
            ({"factors": {"batch": [8], "rate, batch": [(0.1, 4)]}}, "sets `batch` twice"),
            ({"factors": {"init": ["default", "kaiming"]}}, "use one of default, xavier_normal"),
            ({"factors": {"network": ["mpl-6"]}}, "`mpl-6` is not known as a network"),
            ({"confounders": ["rates"]}, "names 'rates'; use some of samples"),
            ({"confounders": ["init"]}, "names 'init'; use some of samples"),
            ({"landscapes": ["maps"]}, "names 'maps'; use some of"),
            ({"measured": True}, "at least 1, or None"),
            ({"seeds": 2.5}, "`seeds=2.5` must be at least 1, or a list"),
            ({"seeds": 0}, "`seeds=0` must be at least 1"),
            ({"seeds": [1, 1]}, "each once"),
            ({"target": "luck"}, "use one of accuracy_gap"),
            ({"measured": 0}, "at least 1, or None"),
            ({"measures": ["flatness"]}, "flatness"),
            ({"factors": {"rescaling": ["twice"]}}, "cannot be read"),
        ],
    )
    def test_what_means_nothing_is_refused_before_training(self, changes, told: str) -> None:
        with pytest.raises(ValueError, match=told):
            tiny_study(**changes)

    def test_measures_that_can_be_read_once_only(self) -> None:
        study = tiny_study(measures=(name for name in ("hessian_trace", "rho_sum")))
        assert list(study.declaration()["measures"]) == ["hessian_trace", "rho_sum"]

    def test_one_name_is_no_list(self) -> None:
        with pytest.raises(
            TypeError, match=r"`confounders='rate'` must be a list; give \['rate'\]"
        ):
            tiny_study(confounders="rate")

    def test_a_recipe_is_needed(self) -> None:
        with pytest.raises(TypeError, match=r"make one with fg.Recipe\("):
            tiny_study(recipe={"batch": 3})


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> PoolResult:
    recipe = TINY.but(rescaling="layers 5..25", network="mlp-5-4", epochs=6)
    return tiny_study(
        recipe=recipe,
        factors={"rate": [0.05, 0.1, 0.2]},
        measures=["kappa_trace_sum", "hessian_trace"],
        published=[
            PublishedNumber(
                source="A", what="a", published="1", statistic="mean", column="test_loss"
            ),
            PublishedNumber(
                source="B",
                what="b",
                published="2",
                statistic="pearson",
                column="kappa_trace_sum[fc2.weight]",
            ),
            PublishedNumber(
                source="C", what="c", published="0", statistic="change", column="hessian_trace"
            ),
        ],
        landscapes=("layers",),
    ).run(tmp_path_factory.mktemp("found"))


class TestPoolResult:
    def test_gaps_are_differences(self, found: PoolResult) -> None:
        frame = found.to_frame()
        assert len(frame) == 6
        losses, accuracies = frame["test_loss"], frame["train_accuracy"]
        assert (frame["loss_gap"] == losses - frame["train_loss"]).all()
        assert (frame["accuracy_gap"] == accuracies - frame["test_accuracy"]).all()

    def test_layers_add_up_to_the_sum(self, found: PoolResult) -> None:
        layers = found.layer_frame()
        sums = layers[layers["measure"] == "kappa_trace_sum"].groupby("run")["value"].sum()
        whole = found.to_frame()["kappa_trace_sum"]
        assert sums.loc[whole.index].tolist() == pytest.approx(whole.tolist())

    def test_the_invariant_measure_does_not_notice(self, found: PoolResult) -> None:
        table = found.before_after
        assert table.loc["kappa_trace_sum", "largest_change"] < 1e-5
        assert table.loc["hessian_trace", "largest_change"] > 10

    def test_correlations_are_those_of_the_statistics(self, found: PoolResult) -> None:
        frame = found.included_frame
        wanted = frame["hessian_trace"].corr(frame["loss_gap"])
        assert found.correlations.loc["hessian_trace", "pearson"] == pytest.approx(wanted)
        column = found.layer_frame().query("layer == 'fc1.weight' and measure == 'kappa_trace_sum'")
        wanted = column.set_index("run")["value"].corr(frame["loss_gap"])
        layered = found.layer_correlations.loc[("kappa_trace_sum", "fc1.weight"), "pearson"]
        assert layered == pytest.approx(wanted)

    def test_cells_are_means_over_seeds(self, found: PoolResult) -> None:
        cells, frame = found.cells(), found.to_frame()
        assert list(cells.index) == [0.05, 0.1, 0.2]
        values = frame[frame["rate"] == 0.1]["test_accuracy"]
        assert cells.loc[0.1, ("test_accuracy", "mean")] == pytest.approx(values.mean())
        assert cells.loc[0.1, ("test_accuracy", "std")] == pytest.approx(values.std())
        assert list(cells[("networks", "")]) == [2, 2, 2]

    def test_published_numbers_stand_beside_ours(self, found: PoolResult) -> None:
        table, frame = found.compare_published().set_index("source"), found.to_frame()
        assert list(table["published"]) == ["1", "2", "0"]
        losses = frame["test_loss"]
        assert table.loc["A", "ours"] == f"{losses.mean():.4g} ± {losses.std():.2g} (n = 6)"
        assert table.loc["B", "ours"].endswith("(n = 6)")
        changes = (found.rescaled_frame()["hessian_trace"] / frame["hessian_trace"] - 1).abs()
        assert table.loc["C", "ours"] == f"{changes.median():.1e} (n = 6)"

    def test_words(self, found: PoolResult) -> None:
        text = repr(found)
        assert "6 networks mlp-5-4 on 60 training samples of digits" in text
        assert "3 values of rate, 2 seeds" in text
        assert "Beside the paper" in text
        assert max(map(len, text.splitlines())) < 140

    def test_files(self, found: PoolResult) -> None:
        page = found.write(command="flatgauge study mine")
        text = page.read_text()
        assert "flatgauge study mine" in text
        assert "random directions" in text or "layer" in text
        with open(page.parent / "results.csv") as file:
            rows = list(csv.DictReader(file))
        frame = found.to_frame()
        assert [row["run"] for row in rows] == list(frame.index)
        values = [float(row["hessian_trace"]) for row in rows]
        assert values == pytest.approx(frame["hessian_trace"].tolist(), rel=1e-12)
        names = {path.name for path in page.parent.glob("*.csv")}
        assert names == {
            *("results.csv", "rescaled.csv", "layers.csv", "correlations.csv"),
            *("layer_correlations.csv", "before_after.csv", "published.csv"),
        }


def test_what_differs_by_design_is_told_as_such(tmp_path) -> None:
    study = tiny_study(
        factors={"samples": [40, None], "epochs, loss_goal": [(1, 1e-9), (99, 2.2)]},
        measures=["expected_sharpness"],
        measured=50,
        seeds=1,
    )
    found = study.run(tmp_path)
    assert list(found.to_frame()["epochs"]) == [1, 99, 1, 99]
    assert list(found.to_frame()["trained_epochs"])[::2] == [1, 1]
    assert max(found.to_frame()["trained_epochs"]) < 99
    assert found.to_frame()["steps"].iloc[1] < 99 * 3
    first = repr(found).splitlines()[2]
    assert first.startswith("4 networks mlp-6 on training samples of digits; measured on 50")
    assert first.endswith("2 values of samples × 2 values of epochs with loss_goal, 1 seed.")
    assert "2 did not reach a goal of its own within its epochs" in repr(found)
    # None, for all samples, is a kind like every other.
    assert list(found.cells()["networks", ""]) == [1, 1]


def test_a_published_number_without_numbers_is_a_dash() -> None:
    frame = pd.DataFrame({"a": [1.0, 1.0, 1.0], "gap": [1.0, 2.0, 3.0], "b": [math.nan] * 3})
    for column, statistic in (("a", "pearson"), ("b", "mean"), ("none", "mean"), ("a", "change")):
        number = PublishedNumber(
            source="", what="", published="", statistic=statistic, column=column
        )
        assert number.compute(frame, None, "gap") == "—"


def test_a_published_number_of_an_unknown_statistic_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of mean, pearson, spearman, change"):
        PublishedNumber(source="", what="", published="", statistic="median", column="a")


class TestPublished:
    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("name", STUDIES)
    def test_every_study_can_be_declared(self, name: str, preset: str) -> None:
        for part, study in published_study(name, preset).items():
            assert study.name == f"{name}/{part}"
            assert study.question
            # Processes that share the work are sent the study.
            assert pickle.loads(pickle.dumps(study)).declaration() == study.declaration()
            assert len(study.runs()) >= 4 or part == "cifar10-plainnet"
            if preset == "quick":
                assert study.recipe.data in ("digits", "noise")

    def test_the_published_settings(self) -> None:
        fc = published_study("batch-size", "paper")["mnist-fc"]
        kinds = {(r.batch, r.rate, r.optimizer, r.network) for r in fc.runs().values()}
        assert kinds == {(256, 1e-4, "adam", "mlp-5x512"), (5000, 1e-3, "adam", "mlp-5x512")}
        lenet = published_study("init-batch", "paper")["cifar10-lenet"].runs().values()
        assert len(lenet) == 4 * 4 * 9
        assert {(r.batch, r.rate) for r in lenet} == {
            *((4, 0.001), (32, 0.008), (64, 0.02), (512, 0.1)),
        }
        wide = published_study("random-labels", "paper")["cifar10-wrn"].runs().values()
        assert {r.random_labels for r in wide} == {k / 10 for k in range(11)}

    def test_names_that_are_unknown(self) -> None:
        with pytest.raises(ValueError, match="did you mean `batch-size`"):
            published_study("batchsize")
        with pytest.raises(ValueError, match="use one of quick, medium, paper"):
            published_study("batch-size", "huge")
