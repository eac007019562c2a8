"""Pictures of landscapes: what they show is what was computed."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from cases import build
from matplotlib.figure import Figure

import flatgauge as fg
from flatgauge.analysis.landscapes import Landscape
from flatgauge.report.plots.landscape import Heights, scale_of
from flatgauge.surface.examples import bowl

BOTH = {"sharp": [9.0, 9.0], "flat": [1.0, 1.0]}


def made(loss, beyond=None, accuracy=None, ticks=None) -> Landscape:
    loss = np.asarray(loss, float)
    beyond = np.zeros(loss.shape, bool) if beyond is None else np.asarray(beyond)
    return Landscape(
        space="weights",
        ticks=np.linspace(-1, 1, len(loss)) if ticks is None else ticks,
        loss=loss,
        accuracy=accuracy,
        beyond=beyond,
        directions=torch.zeros(loss.ndim, 2),
        title="The loss",
        words="directions",
    )


@pytest.fixture(scope="module")
def planes():
    surfaces = {name: bowl(curvatures) for name, curvatures in BOTH.items()}
    return fg.landscape(surfaces, space="weights", points=7, sigma=0.3)


@pytest.fixture(scope="module")
def lines():
    surfaces = {name: bowl(curvatures) for name, curvatures in BOTH.items()}
    return fg.landscape(surfaces, space="weights", dims=1, points=7, sigma=0.3)


def test_curves_share_their_axes(lines):
    ax = lines.plot()
    drawn = {line.get_label(): line.get_ydata() for line in ax.get_lines()}
    assert (drawn["sharp"] == lines["sharp"].loss).all()
    assert (drawn["flat"] == lines["flat"].loss).all()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["sharp", "flat"]
    assert lines.plot(log=True).get_yscale() == "log"
    found = lines.figure()
    assert [trace.name for trace in found.data] == ["sharp", "flat"]
    assert np.allclose(found.data[1].y, lines["flat"].loss)


def test_axes_that_are_given_are_used(lines, planes):
    ax = Figure().subplots()
    assert lines["flat"].plot(ax) is ax
    ax = Figure().subplots()
    assert planes.plot(ax) is ax  # both in one, as lines
    assert len(ax.collections) == 2


def test_planes_side_by_side_share_colours(planes):
    panels = [ax for ax in planes.plot().figure.axes if ax.get_title()]
    assert [ax.get_title() for ax in panels] == ["sharp", "flat"]
    assert len({ax.collections[0].get_clim() for ax in panels}) == 1
    found = planes.figure(kind="contour")
    assert np.allclose(found.data[0].z, planes["sharp"].loss.T)
    assert found.layout.coloraxis.cmax == max(one.loss.max() for one in planes.values())


def test_surfaces_side_by_side_share_heights(planes):
    panels = [ax for ax in planes.plot(kind="surface").figure.axes if ax.name == "3d"]
    assert len({ax.get_zlim() for ax in panels}) == 1
    found = planes.figure()
    assert {trace.type for trace in found.data} == {"surface"}
    assert found.layout.scene.zaxis.range == found.layout.scene2.zaxis.range


def test_grounds_are_transparent_and_fonts_free(lines, planes):
    for found in (lines.figure(), planes.figure(), planes.figure(kind="contour")):
        assert found.layout.paper_bgcolor == found.layout.plot_bgcolor == "rgba(0,0,0,0)"
        assert found.layout.font.color is None


def test_beyond_a_pole_is_apart_and_told():
    line = made([1.0, 2.0, 3.0, 9.0], [False, False, False, True])
    ax = line.plot()
    near, far = (one.get_ydata() for one in ax.get_lines()[:2])
    assert np.isnan(near).tolist() == [False, False, False, True]
    assert np.isnan(far).tolist() == [True, True, False, False]  # it starts where the other ends
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["beyond a pole"]
    assert "pole" in line.caption
    beyond = np.zeros((4, 4), bool)
    beyond[3] = True
    plane = made(np.arange(16.0).reshape(4, 4), beyond)
    legend = plane.plot().get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["beyond a pole"]
    found = plane.figure(kind="contour")
    assert found.data[1].name == "beyond a pole"
    assert np.isnan(np.asarray(found.data[0].z, float))[:, 3].all()
    plane.plot(kind="surface").figure.canvas.draw()


def test_an_infinite_loss_is_a_gap():
    line = made([1.0, np.inf, 3.0])
    assert np.isnan(line.plot().get_lines()[0].get_ydata()).tolist() == [False, True, False]
    assert "Where the loss is infinite there is a gap." in line.caption
    plane = made([[1.0, 2.0], [np.inf, 3.0]])
    assert np.isnan(np.asarray(plane.figure().data[0].z, float)).sum() == 1
    for kind in ("contour", "surface"):
        plane.plot(kind=kind, log=True).figure.canvas.draw()


def test_walls_are_cut_off_and_that_is_told():
    loss = np.ones(21)
    loss[:10], loss[0] = np.arange(10)[::-1] + 1.0, 1e6
    line = made(loss)
    top = line.plot().get_ylim()[1]
    assert 10 < top < 100
    assert "are cut off, unless the scale is logarithmic" in line.caption
    assert line.plot(log=True).get_ylim()[1] > 1e6
    bowl_shaped = made(np.linspace(-1, 1, 21) ** 2)
    assert "cut off" not in bowl_shaped.caption


@pytest.mark.parametrize("log", [False, True])
def test_scales_of_odd_heights(log):
    for values in ([np.inf, np.inf], [0.0, 0.0], [2.0, 2.0], [0.0, 1.0]):
        one = made(values)
        scale = scale_of([one.heights("loss")], "loss", log=log)
        assert np.isfinite(scale.ends).all()
        assert scale.ends[0] < scale.ends[1]
        one.plot(log=log).figure.canvas.draw()
        one.figure(log=log)


def test_the_first_direction_goes_to_the_right():
    loss = np.zeros((3, 3))
    loss[2, 1] = 5.0  # t1 = 1, t2 = 0
    found = made(loss).figure(kind="contour").data[0]
    assert found.z[1][2] == 5.0
    assert found.x[2] == 1.0


def test_accuracy_is_in_per_cent():
    line = made([1.0, 2.0], accuracy=np.array([0.5, 1.0]))
    ax = line.plot(what="accuracy")
    assert ax.get_lines()[0].get_ydata().tolist() == [50.0, 100.0]
    assert ax.get_ylabel() == "accuracy (%)"


def test_points_with_names_are_marked():
    surface = bowl([1.0, 2.0])
    ends = [{"weight": torch.tensor([[2.0, 0.0]])}, {"weight": torch.tensor([[0.0, 1.0]])}]
    texts = [text.get_text() for text in fg.landscape(surface, to=ends, points=3).plot().texts]
    assert texts == ["model", "to[0]", "to[1]"]
    texts = [text.get_text() for text in fg.landscape(surface, to=ends[0], points=3).plot().texts]
    assert texts == ["model", "to"]


def test_what_cannot_be_drawn(lines, planes):
    with pytest.raises(ValueError, match="`kind='surface'` cannot show a line; use 'curve'"):
        lines.plot(kind="surface")
    with pytest.raises(ValueError, match="cannot show a plane; use 'contour' or 'surface'"):
        planes.figure(kind="curve")
    with pytest.raises(ValueError, match="there is no accuracy"):
        lines.plot(what="accuracy")
    with pytest.raises(ValueError, match="`what='height'` must be 'loss' or 'accuracy'"):
        lines.plot(what="height")
    with pytest.raises(ValueError, match="2 surfaces do not fit into one `ax`"):
        planes.plot(Figure().add_subplot(projection="3d"), kind="surface")
    with pytest.raises(ValueError, match="needs axes with a third dimension"):
        planes["flat"].plot(Figure().subplots(), kind="surface")


def test_captions_say_what_is_seen(planes):
    caption = planes.caption
    assert caption.startswith(
        "At the same scale: sharp, flat. Mean mse of 2 samples at 7 × 7 points"
    )
    assert "from -1 to 1 along random directions in weight space (sigma = 0.3, seed = 0)" in caption
    case = build("mlp")
    found = fg.landscape(case.surface(), space="eigenvectors", dims=1, points=3)
    assert f"eigenvalue 1 = {found.details['eigenvalue 1']:.4g}" in found.caption


def test_files(tmp_path, lines):
    text = lines.to_html(tmp_path / "a.html").read_text()
    assert lines.caption in text
    assert not re.search(
        r"<(script|link|img)[^>]*(src|href)=\"(?!data:)", text
    )  # nothing from elsewhere
    assert lines.to_png(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_heights_know_nothing_of_networks():
    one = Heights("a", np.arange(3.0), np.array([1.0, 10.0, 100.0]), np.zeros(3, bool), {})
    scale = scale_of([one], "loss", log=True)
    assert one.heights_on(scale).tolist() == [0.0, 1.0, 2.0]
    assert scale.axis_label == "log₁₀ loss"
