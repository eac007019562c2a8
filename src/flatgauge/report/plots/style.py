"""What all pictures share: colours, dashes, shapes, plain names, and the styles of both libraries.

`new_axes` makes matplotlib's axes, `plotly_layout` the part of plotly's layouts that is the same
everywhere: transparent ground, quiet grid, legend above.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: A ground that lets that of the page through, light or dark.
CLEAR = "rgba(0,0,0,0)"

#: Lines of a grid that are seen on light and on dark ground.
GRID: dict[str, Any] = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False}

#: A legend in a line above the picture.
LEGEND: dict[str, Any] = {
    "orientation": "h",
    "x": 0,
    "y": 1.02,
    "yanchor": "bottom",
    "bgcolor": CLEAR,
}


def new_axes(width: float, height: float, ax: Axes | None = None) -> Axes:
    """Axes of this size in inches in a figure of their own, or those that are given."""
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(width, height), layout="constrained").subplots()
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plotly_layout(**more: Any) -> dict[str, Any]:
    """A layout for plotly with this in it."""
    return {"paper_bgcolor": CLEAR, "plot_bgcolor": CLEAR, "legend": LEGEND, **more}


def height_colours(label: str, low: float, high: float, **bar: Any) -> dict[str, Any]:
    """Plotly's scale of colours for heights, with its bar."""
    found = {"title": {"text": label}, "nticks": 7, **bar}
    return {"colorscale": HEIGHTS, "cmin": low, "cmax": high, "colorbar": found}


#: One per thing that is compared; told apart also by people who do not see all colours, and on
#: light and dark ground alike (Okabe and Ito, 2008, without black and yellow).
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")

#: How lines are broken, for matplotlib and plotly: where they coincide, all of them are seen.
_DASHES: tuple[tuple[Any, str], ...] = (
    ("-", "solid"),
    ((0, (4, 2)), "dash"),
    ((0, (6, 2, 1, 2)), "dashdot"),
    ((0, (1, 1.5)), "dot"),
)

#: Shapes of points, for matplotlib and plotly. One more than there are colours, so that things
#: beyond the sixth still differ from all before them.
_SHAPES = (
    ("o", "circle"),
    ("s", "square"),
    ("^", "triangle-up"),
    ("D", "diamond"),
    ("v", "triangle-down"),
    ("X", "x"),
    ("P", "cross"),
)

#: For heights; perceptually even.
HEIGHTS = "viridis"


def colour(number: int) -> str:
    """The colour of the n-th thing that is compared."""
    return SERIES[number % len(SERIES)]


def dashes(number: int) -> tuple[Any, str]:
    """How the line of the n-th thing that is compared is broken."""
    return _DASHES[number % len(_DASHES)]


def shape(number: int) -> tuple[str, str]:
    """The shape of the points of the n-th thing that is compared."""
    return _SHAPES[number % len(_SHAPES)]


def plain_text(text: str) -> str:
    """A text that plotly shows as it is: it reads some HTML in labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def plain_label(text: str) -> str:
    """A text that matplotlib shows as it is: it reads formulas between dollar signs."""
    escaped = text.replace("$", r"\$")
    return f"\u200b{escaped}" if escaped.startswith("_") else escaped


def picture_forms() -> list[str]:
    """The endings that matplotlib knows: png, pdf, svg and others."""
    from matplotlib.figure import Figure

    return sorted(Figure().canvas.get_supported_filetypes())


def write_picture(path: str | Path, figure: Any, *, dpi: int) -> Path:
    """Write a figure of matplotlib, whole or not at all; the ending gives the format."""
    contents = io.BytesIO()
    figure.savefig(contents, format=Path(path).suffix[1:].lower() or "png", dpi=dpi)
    return atomic_write(path, contents.getvalue())
