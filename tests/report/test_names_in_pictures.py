"""Names of the user's in pictures: shown as they are, never read as markup or formulas."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from flatgauge.estimators.density import SymlogAxis
from flatgauge.report.plots.bars import bars_axes, bars_figure, plot_ratios
from flatgauge.report.plots.history import plot_history
from flatgauge.report.plots.landscape import KINDS, ColourScale, Heights
from flatgauge.report.plots.spectrum import SpectrumLine, figure_of_lines, plot_lines

#: A link for plotly; for matplotlib the beginning of a formula that has no end.
LINK = '<a href="https://example.org">x</a>'
FORMULA = r"_$\frac{$"

SCALE = ColourScale("loss", 0.0, 1.0, log=False, cut=False)


def heights(name: str, dims: int) -> Heights:
    ticks = np.linspace(-1.0, 1.0, 3)
    values = np.linspace(0.0, 1.0, 3**dims).reshape((3,) * dims)
    return Heights(name, ticks, values, np.zeros((3,) * dims, bool), {name: (0.0,) * dims})


def lines(name: str) -> list[SpectrumLine]:
    axis = SymlogAxis(0.1)
    eigenvalues = np.array([-1.0, 0.5, 1.0])
    places, ones = axis.place(eigenvalues), np.ones(3)
    top = np.array([1.0])
    return [SpectrumLine(name, places, eigenvalues, ones, ones, top, top, -1.0, 0.01, 0.5)] * 2


FIGURES = {
    "curves": lambda name: KINDS["curve"][2]([heights(name, 1)] * 2, SCALE),
    "contours": lambda name: KINDS["contour"][2]([heights(name, 2)] * 2, SCALE),
    "reliefs": lambda name: KINDS["surface"][2]([heights(name, 2)] * 2, SCALE),
    "spectra": lambda name: figure_of_lines(lines(name), SymlogAxis(0.1)),
    "bars": lambda name: bars_figure([name], {name: [1.0]}, label=name),
}

AXES = {
    "curves": lambda name: KINDS["curve"][1]([heights(name, 1)] * 2, SCALE),
    "contours": lambda name: KINDS["contour"][1]([heights(name, 2)] * 2, SCALE),
    "reliefs": lambda name: KINDS["surface"][1]([heights(name, 2)] * 2, SCALE),
    "spectra": lambda name: plot_lines(lines(name), SymlogAxis(0.1), title=name),
    "bars": lambda name: bars_axes([name], {name: [1.0], "b": [2.0]}, label=name),
    "courses": lambda name: plot_history([1, 2], {name: [1.0, 2.0]}, label=name),
}


@pytest.mark.parametrize("kind", FIGURES)
def test_plotly_makes_no_link_of_a_name(kind):
    text = json.dumps(json.loads(FIGURES[kind](LINK).to_json()), ensure_ascii=False)
    assert "<a" not in text
    assert "&lt;a href" in text


@pytest.mark.parametrize("kind", AXES)
def test_matplotlib_reads_no_formula_in_a_name(kind):
    ax = AXES[kind](FORMULA)
    ax.figure.savefig(io.BytesIO(), format="svg")
    legend = ax.get_legend()
    if legend is not None:
        assert any(r"\$" in text.get_text() for text in legend.get_texts())


def test_a_comparison_is_drawn_with_any_name():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    plot_ratios({"m": [1.0, 2.0]}, {"m": [0.1, 0.1]}, [FORMULA, "b"], ax=ax)
    ax.figure.savefig(io.BytesIO(), format="svg")
