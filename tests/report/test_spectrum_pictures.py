"""Pictures of spectra: what is drawn is what was computed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

import flatgauge as fg
from flatgauge.surface.examples import bowl


@pytest.fixture(scope="module")
def pair():
    one, other = bowl([100.0, 1.0, 1.0, 0.0]), bowl([1e5, 3.0, 0.01, 0.0])
    return fg.spectrum({"one": one, "other": other}, top=2, probes=4)


def test_matplotlib_draws_on_the_axes_it_is_given(pair):
    ax = Figure().add_subplot()
    assert pair["one"].plot(ax) is ax
    assert ax.get_title() == pair["one"].title == "Spectrum of H"
    assert (ax.get_xscale(), ax.get_yscale()) == ("asinh", "log")
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["λ₁ = 100"]


def test_both_curves_are_drawn_at_the_eigenvalues(pair):
    ax = pair.plot()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["one, λ₁ = 100", "other, λ₁ = 100000"]
    for line, label in zip(pair.lines(), labels, strict=True):
        (drawn,) = (item for item in ax.get_lines() if item.get_label() == label)
        known = ~np.isnan(drawn.get_ydata())
        np.testing.assert_array_equal(drawn.get_xdata(), line.eigenvalues)
        np.testing.assert_array_equal(
            np.array(drawn.get_ydata())[known], np.maximum(line.values, 0.05 * line.single)[known]
        )
    low, high = ax.get_xlim()
    assert low < 0 < 1e5 < high
    ax.figure.canvas.draw()  # nothing warns


def test_plotly_has_the_same_numbers(pair):
    figure = pair.figure()
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
    marks = [trace for trace in figure.data if trace.mode == "markers"]
    assert len(marks) == 2
    assert pair.axis.value(marks[0].x)[:2] == pytest.approx([100.0, 1.0], rel=1e-9)
    assert marks[1].text[0].startswith("other: λ1 = 100000 ± ")
    assert marks[0].text[2].startswith("one: smallest seen")
    named = [trace for trace in figure.data if trace.showlegend]
    assert [trace.name for trace in named] == ["one, λ₁ = 100", "other, λ₁ = 100000"]
    assert "10<sup>4</sup>" in figure.layout.xaxis.ticktext
    assert figure.layout.font.color is None


def test_a_spectrum_without_marks_has_no_legend():
    found = fg.spectrum(bowl([1.0, 2.0]), top=0)
    assert found.plot().get_legend() is None
    assert not any(trace.showlegend for trace in found.figure().data)


def test_the_page_is_one_file_with_nothing_from_outside(pair, tmp_path):
    for drawn in (pair, pair["one"]):
        path = drawn.to_html(tmp_path / "spectrum.html")
        page = path.read_text()
        assert not re.search(r"<script[^>]*src=", page)
        markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
        assert not re.search(r"(src|href)=.?(https?:)?//|@import|url\(", markup)
        assert drawn.title in page
        assert "smallest seen" in page
        assert "prefers-color-scheme: dark" in page


def test_captions_and_notes_are_told(pair):
    assert "eigenvalues lie in a decade" in pair.caption
    assert pair.notes == pair["one"].notes == ()
