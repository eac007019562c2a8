"""Pictures of a study: points, lines, bands, colours, and panels that share an axis."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from study_data import MEASURES, rescaled_frame, study_frame

from flatgauge.report.plots.cloud import Cloud, key_of, line_through, x_limits, y_limits
from flatgauge.report.plots.scatter import (
    figure,
    pairs_figure,
    panels_figure,
    plot,
    plot_pairs,
    plot_panels,
)

FRAME = study_frame()


def cloud(measure="rho_sum", frame=FRAME, factor="batch", title="r = 0.91 [0.83, 0.96]"):
    return Cloud(
        frame[measure].to_numpy(float),
        frame["accuracy_gap"].to_numpy(float),
        measure,
        "accuracy_gap",
        tuple(frame.index),
        (frame["state"] == "reached").to_numpy(),
        title,
        tuple(frame[factor]) if factor else (),
        factor,
        "not reached",
    )


def by_hand(x, y, counted=None, groups=()):
    x, y = np.array(x, dtype=float), np.array(y, dtype=float)
    every = np.ones(len(x), dtype=bool)
    names = tuple(f"run {n}" for n in range(len(x)))
    mask = every if counted is None else np.array(counted)
    return Cloud(x, y, "x", "y", names, mask, groups=tuple(groups), factor="f" if groups else "")


def draw():
    return np.random.default_rng(0)


def test_the_axis_is_logarithmic_where_that_is_possible_and_useful():
    assert by_hand([1, 5, 11], [0, 0, 0]).log
    assert not by_hand([1, 5, 10], [0, 0, 0]).log
    assert not by_hand([-1, 5, 1000], [0, 0, 0]).log
    assert not by_hand([0, 5, 1000], [0, 0, 0]).log
    assert by_hand([1, 5, 1000], [0, 0, 0]).axis_label == "x (log scale)"
    assert by_hand([1, 2, np.inf], [0, 0, 0]).axis_label == "x\n1 of 3 not finite, not drawn"
    long = cloud("riemannian_max_eigenvalue_nodewise").axis_label
    assert long == "riemannian_max_\neigenvalue_nodewise (log scale)"


def test_the_line_is_that_of_least_squares_on_the_shown_scale():
    shown = cloud()
    kept = shown.counted & shown.there
    slope, start = np.polyfit(np.log10(shown.x[kept]), shown.y[kept], 1)
    line = line_through(shown, generator=draw())
    assert shown.log
    np.testing.assert_allclose(line.y, start + slope * np.log10(line.x), rtol=1e-10)
    straight = by_hand([1, 2, 3, 4], [1, 3, 2, 5])
    line = line_through(straight, generator=draw())
    slope, start = np.polyfit(straight.x, straight.y, 1)
    np.testing.assert_allclose(line.y, start + slope * line.x, rtol=1e-12)


def test_only_points_that_count_move_the_line():
    x, y = [1, 2, 3, 4, 2.5], [1, 3, 2, 5, 99]
    without = line_through(by_hand(x[:4], y[:4]), generator=draw())
    masked = line_through(by_hand(x, y, [True] * 4 + [False]), generator=draw())
    np.testing.assert_array_equal(without.y, masked.y)


def test_the_band_is_as_wide_as_theory_says():
    """For many points with equal noise the bootstrap band meets the textbook's."""
    source = np.random.default_rng(3)
    x = source.uniform(1, 2, 400)
    y = x + 0.1 * source.standard_normal(400)
    line = line_through(by_hand(x, y), generator=draw(), draws=2000)
    leverage = 1 / 400 + (line.x - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    np.testing.assert_allclose(line.high - line.low, 2 * 1.96 * 0.1 * np.sqrt(leverage), rtol=0.15)
    assert ((line.low < line.y) & (line.y < line.high)).all()


def test_the_band_comes_from_the_generator_alone():
    once, again = (line_through(cloud(), generator=draw()) for _ in range(2))
    other = line_through(cloud(), generator=np.random.default_rng(1))
    np.testing.assert_array_equal(once.low, again.low)
    assert (once.low != other.low).any()


def test_points_that_have_no_line_get_none():
    assert line_through(by_hand([1, 2], [1, 2]), generator=draw()) is None
    assert line_through(by_hand([2, 2, 2, 2], [1, 2, 3, 4]), generator=draw()) is None
    assert line_through(by_hand([np.nan] * 4, [1, 2, 3, 4]), generator=draw()) is None
    assert figure(by_hand([], [])).layout.xaxis.range == (0, 1)
    assert len(plot(by_hand([2, 2, 2], [1, 3, 2])).lines) == 0


def test_numbers_are_a_scale_of_colours_only_where_there_are_many():
    few = key_of([by_hand(range(6), range(6), groups=[8, 1, 1, 2, 4, 8])])
    assert (few.smooth, few.levels) == (False, (1.0, 2.0, 4.0, 8.0))
    many = key_of([by_hand(range(7), range(7), groups=[2**k for k in range(7)])])
    assert (many.smooth, many.log) == (True, True)
    assert many.ticks()[0] == 1
    assert many.ticks()[-1] == 64
    near = key_of([by_hand(range(7), range(7), groups=[1 + k / 7 for k in range(7)])])
    assert (near.smooth, near.log) == (True, False)
    words = key_of([by_hand(range(3), range(3), groups=["b", "a", "b"])])
    assert (words.smooth, words.levels) == (False, ("b", "a"))
    flags = key_of([by_hand(range(2), range(2), groups=[True, False])])
    assert (flags.smooth, flags.levels) == (False, (True, False))


def points(found):
    return [trace for trace in found.data if trace.mode == "markers"]


def test_every_run_is_drawn_once_in_its_group():
    found = points(figure(cloud()))
    assert [trace.name for trace in found] == ["64", "256", "1024", "4096", "not reached"]
    assert len({trace.marker.symbol for trace in found}) == 5
    assert len({trace.marker.color for trace in found}) == 5
    seen = {
        text.split("<br>")[0]: (x, y)
        for trace in found
        for text, x, y in zip(trace.text, trace.x, trace.y, strict=True)
    }
    assert seen == {run: (row["rho_sum"], row["accuracy_gap"]) for run, row in FRAME.iterrows()}
    assert found[-1].marker.symbol == "circle-open"
    assert found[-1].text[0].startswith(FRAME.index[-1])


def test_groups_beyond_the_colours_still_differ():
    words = [f"network {n}" for n in range(12)]
    found = points(figure(by_hand(range(12), range(12), groups=words)))
    assert len({(trace.marker.symbol, trace.marker.color) for trace in found}) == 12


@pytest.mark.parametrize("levels", [[1.0, 2.0], [float(k) for k in range(9)], [], ["a"]])
def test_points_without_a_group_are_not_lost(levels):
    groups = [*levels, np.nan, np.nan]
    found = points(figure(by_hand(range(len(groups)), range(len(groups)), groups=groups)))
    assert sum(len(trace.x) for trace in found) == len(groups)
    assert found[-1].name == ("nan" if levels == ["a"] else "not known")


def test_many_numbers_have_a_colour_bar():
    found = figure(cloud(factor="norm"))
    (smooth, out) = points(found)
    assert smooth.marker.coloraxis == "coloraxis"
    assert list(smooth.marker.color) == FRAME["norm"].tolist()[:-1]
    assert out.marker.color == "#808080"
    assert found.layout.coloraxis.colorbar.title.text == "norm"
    ax = plot(cloud(factor="norm"))
    assert len(ax.figure.axes) == 2
    assert ax.figure.axes[1].get_ylabel() == "norm"


def test_matplotlib_draws_the_same_points():
    ax = plot(cloud())
    assert ax.get_xscale() == "log"
    assert ax.get_title(loc="left") == "r = 0.91 [0.83, 0.96]"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        *("64", "256", "1024", "4096"),
        "not reached",
    ]
    offsets = np.vstack([np.asarray(c.get_offsets()) for c in ax.collections[1:]])
    np.testing.assert_array_equal(np.sort(offsets[:, 0]), np.sort(FRAME["rho_sum"]))
    assert not ax.collections[-1].get_facecolor().size  # Hollow.
    assert plot(cloud(), ax) is ax


def test_panels_share_their_vertical_axis_and_stand_in_rows():
    clouds = [cloud(name) for name in MEASURES]
    found = plot_panels(clouds)
    assert len(found.axes) == 6
    assert {ax.get_ylim() for ax in found.axes} == {y_limits(clouds)}
    labels = [ax.get_xlabel().replace("_\n", "_") for ax in found.axes]
    assert [label.split()[0] for label in labels] == MEASURES
    assert len(found.legends) == 1
    assert found.get_figwidth() < 8
    drawn = panels_figure(clouds).layout
    assert {drawn[f"yaxis{n}"].range for n in range(1, 7)} == {y_limits(clouds)}
    assert drawn.xaxis4.domain == drawn.xaxis.domain
    assert drawn.yaxis4.domain[1] < drawn.yaxis.domain[0]
    assert [note.text for note in drawn.annotations] == [cloud().title] * 6
    shown = [trace.name for trace in panels_figure(clouds).data if trace.showlegend]
    assert len(shown) == 5


def axis(way, number):
    return f"{way}axis{number if number > 1 else ''}"


def test_where_there_is_no_room_panels_stand_in_one_column():
    narrow = panels_figure([cloud(name) for name in MEASURES]).layout.meta["narrow"]
    assert all(narrow[axis("x", n)]["domain"] == [0, 1.0] for n in range(1, 7))
    floors = [narrow[axis("y", n)]["domain"] for n in range(1, 7)]
    assert all(above[0] > below[1] for above, below in pairwise(floors))
    assert all(narrow[axis("y", n)]["showticklabels"] for n in range(1, 7))
    assert set(narrow) <= set(panels_figure([cloud(name) for name in MEASURES]).to_dict()["layout"])
    assert figure(cloud()).layout.meta is None


def test_pairs_stand_beside_each_other_on_scales_of_their_own():
    after = rescaled_frame()
    pairs = [(cloud(name), cloud(name, after)) for name in ("rho_sum", "hessian_trace")]
    found = plot_pairs(pairs)
    titles = [ax.get_title(loc="left").split("\n")[0] for ax in found.axes]
    assert titles == ["as trained", "after random rescaling"] * 2
    assert found.axes[0].get_xlim() == found.axes[1].get_xlim()
    assert found.axes[3].get_xlim()[1] > 100 * found.axes[2].get_xlim()[1]
    drawn = pairs_figure(pairs).layout
    assert drawn.xaxis3.domain == drawn.xaxis.domain
    assert drawn.annotations[1].text == "after random rescaling<br>r = 0.91 [0.83, 0.96]"
    assert drawn.xaxis4.range == x_limits(pairs[1][1])


def test_grounds_are_clear():
    layout = panels_figure([cloud()]).layout
    assert (layout.paper_bgcolor, layout.plot_bgcolor) == ("rgba(0,0,0,0)", "rgba(0,0,0,0)")


def test_names_are_shown_as_they_are():
    evil = "<b>x</b>"
    names = tuple(evil for _ in FRAME.index)
    found = figure(replace(cloud(), names=names, label=evil, target=evil, title=evil))
    assert "<b>" not in found.to_json()
    assert points(found)[0].text[0] == "&lt;b&gt;x&lt;/b&gt;<br>batch: 64"


def test_wrong_clouds_are_refused():
    with pytest.raises(ValueError, match="a cloud of 3 points in `x`, but `y` has 2; give one of"):
        Cloud(np.ones(3), np.ones(2), "x", "y", ("a", "b", "c"), np.ones(3, dtype=bool))
    with pytest.raises(ValueError, match="`clouds` is empty; a picture needs at least one"):
        panels_figure([])
    other = replace(cloud(), target="loss_gap")
    with pytest.raises(ValueError, match=r"different targets .accuracy_gap, loss_gap.*one picture"):
        plot_panels([cloud(), other])
