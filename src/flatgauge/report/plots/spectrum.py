"""Densities of eigenvalues over a signed logarithmic axis, drawn over each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.estimators.density import Array, SymlogAxis
from flatgauge.report.plots.style import (
    GRID,
    colour,
    dashes,
    new_axes,
    plain_label,
    plain_text,
    plotly_layout,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

#: The lowest height that is drawn, in units of the bell of one eigenvalue.
_FLOOR = 0.1

#: Height of a row of marks, as a part of the picture's.
_ROW = 0.045

#: How much is seen of what is not known, and of the mark of the smallest eigenvalue.
_FAINT, _PALE = 0.6, 0.55

_GREY = "#888888"

#: What plotly's axes have in common.
_GRID = {**GRID, "linecolor": _GREY, "showline": True}


@dataclass(frozen=True)
class SpectrumLine:
    """One density, and the eigenvalues to mark.

    Attributes:
        name: What it is called; empty if there is nothing to tell it from.
        places: Where on the axis, in decades.
        eigenvalues: What stands there.
        values: Eigenvalues per decade.
        stderr: Standard error of the values.
        top: The largest eigenvalues.
        bounds: Of their errors.
        smallest: The smallest eigenvalue that was seen.
        resolution: What is nearer to zero is drawn faintly, as its shape is not known.
        single: The height of the bell of one eigenvalue.
    """

    name: str
    places: Array
    eigenvalues: Array
    values: Array
    stderr: Array
    top: Array
    bounds: Array
    smallest: float
    resolution: float
    single: float

    def parts(self, floor: float) -> tuple[Array, Array]:
        """The values where they are known, and where they are not; nothing elsewhere."""
        drawn = np.maximum(self.values, floor / 2)  # A logarithmic axis cannot hold zero.
        known = np.abs(self.eigenvalues) >= self.resolution
        joint = np.zeros_like(known)  # Where both are drawn, so that no gap is seen.
        joint[1:] = known[1:] != known[:-1]
        return np.where(known | joint, drawn, np.nan), np.where(~known | joint, drawn, np.nan)

    def band(self, floor: float) -> tuple[Array, Array]:
        """One standard error below and above, as far as the axis can hold it."""
        low, high = self.values - self.stderr, self.values + self.stderr
        return np.maximum(low, floor / 2), np.maximum(high, floor / 2)

    @property
    def label(self) -> str:
        """Its name with the largest eigenvalue."""
        shared = f"λ₁ = {_short(self.top[0])}" if len(self.top) else ""
        return ", ".join(part for part in (self.name, shared) if part)


def plot_lines(
    lines: Sequence[SpectrumLine], axis: SymlogAxis, *, title: str, ax: Axes | None = None
) -> Axes:
    """Draw densities with matplotlib.

    Args:
        lines: The densities.
        axis: The axis that they are given on.
        title: Over the picture.
        ax: Where; a figure of its own by default.

    Returns:
        The axes; x is the eigenvalue itself.
    """
    ax = new_axes(6.4, 3.6, ax)
    floor, ceiling = _heights(lines)
    for number, line in enumerate(lines):
        _draw(ax, line, number, floor)
    ax.axhline(lines[0].single, color=_GREY, linewidth=0.7, linestyle=":", zorder=0)
    ax.annotate(
        "one\neigenvalue",
        (1, lines[0].single),
        (3, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        fontsize=7,
        color=_GREY,
    )
    low, high = float(lines[0].eigenvalues[0]), float(lines[0].eigenvalues[-1])
    ticks = axis.ticks(low, high)
    ax.set_xscale("asinh", linear_width=2 * axis.unit)
    ax.set_xticks(ticks, labels=[f"${_power(tick, '-', '^{', '}')}$" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlim(low, high)
    ax.set_yscale("log")
    ax.set_ylim(floor, ceiling)
    ax.set(title=plain_label(title), xlabel="eigenvalue", ylabel="eigenvalues per decade")
    if any(line.label for line in lines):
        ax.legend(frameon=False, fontsize="small")
    return ax


def _draw(ax: Axes, line: SpectrumLine, number: int, floor: float) -> None:
    """Band, curve and marks of one density, with matplotlib."""
    shade, (dash, _) = colour(number), dashes(number)
    ax.fill_between(line.eigenvalues, *line.band(floor), color=shade, alpha=0.25, linewidth=0)
    known, rest = line.parts(floor)
    ax.plot(line.eigenvalues, rest, color=shade, linewidth=1.0, alpha=_FAINT)
    ax.plot(
        line.eigenvalues,
        known,
        color=shade,
        linestyle=dash,
        linewidth=1.5,
        label=plain_label(line.label),
    )
    foot, across = 0.012 + _ROW * number, ax.get_xaxis_transform()
    tips = foot, foot + 0.8 * _ROW
    ax.vlines(line.top, *tips, color=shade, linewidth=1.0, transform=across)
    ax.vlines(line.smallest, *tips, color=shade, linewidth=1.0, alpha=_PALE, transform=across)


def figure_of_lines(lines: Sequence[SpectrumLine], axis: SymlogAxis) -> Figure:
    """Draw densities with plotly.

    Args:
        lines: The densities.
        axis: The axis that they are given on.

    Returns:
        The figure, without a ground of its own.
    """
    from plotly import graph_objects as go

    floor, ceiling = _heights(lines)
    figure = go.Figure()
    for number, line in enumerate(lines):
        for trace in (*_curves(line, number, floor), _marks(line, number, axis)):
            figure.add_trace(trace)
    figure.add_hline(y=lines[0].single, line={"color": _GREY, "width": 1, "dash": "dot"})
    figure.add_annotation(
        text="one<br>eigenvalue",
        showarrow=False,
        font={"size": 10, "color": _GREY},
        align="left",
        xref="paper",
        x=1,
        xanchor="left",
        y=math.log10(lines[0].single),
    )
    layout = plotly_layout(
        margin={"l": 60, "r": 64, "t": 36, "b": 50},
        legend={"x": 1, "xanchor": "right", "y": 1},
        xaxis=_across(lines[0], axis) | _GRID,
        yaxis={
            "title": "eigenvalues per decade",
            "type": "log",
            "range": [math.log10(floor), math.log10(ceiling)],
            "exponentformat": "power",
            "dtick": 1,
        }
        | _GRID,
        yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    )
    return figure.update_layout(layout)


def _across(line: SpectrumLine, axis: SymlogAxis) -> dict[str, Any]:
    """The horizontal axis, for plotly."""
    ticks = axis.ticks(float(line.eigenvalues[0]), float(line.eigenvalues[-1]))
    return {
        "title": "eigenvalue",
        "tickvals": axis.place(ticks).tolist(),
        "ticktext": [_power(tick, "−", "<sup>", "</sup>") for tick in ticks],
        "range": [float(line.places[0]), float(line.places[-1])],
    }


def _curves(line: SpectrumLine, number: int, floor: float) -> list[Any]:
    """Band and curve of one density, for plotly."""
    from plotly import graph_objects as go

    shade, (_, dash) = colour(number), dashes(number)
    group = {"legendgroup": str(number), "showlegend": False}
    (low, high), (known, rest) = line.band(floor), line.parts(floor)
    band = go.Scatter(
        x=np.concatenate([line.places, line.places[::-1]]),
        y=np.concatenate([high, low[::-1]]),
        fill="toself",
        fillcolor=_clear(shade),
        line={"width": 0},
        hoverinfo="skip",
        **group,
    )
    shared = {
        "x": line.places,
        "mode": "lines",
        "customdata": np.stack([line.eigenvalues, line.stderr], axis=1),
        "hovertemplate": "%{y:.3g} ± %{customdata[1]:.1g} per decade at %{customdata[0]:.3g}"
        "<extra></extra>",
    }
    thin, bold = {"color": shade, "width": 1.2}, {"color": shade, "width": 2, "dash": dash}
    faint = go.Scatter(y=rest, opacity=_FAINT, line=thin, **shared, **group)
    named = group | {"showlegend": bool(line.label), "name": plain_text(line.label)}
    return [band, faint, go.Scatter(y=known, line=bold, **shared, **named)]


def _marks(line: SpectrumLine, number: int, axis: SymlogAxis) -> Any:
    """The eigenvalues of one density that are marked, for plotly."""
    from plotly import graph_objects as go

    texts = [
        f"λ{k + 1} = {value:.6g} ± {bound:.1g}"
        for k, (value, bound) in enumerate(zip(line.top, line.bounds, strict=True))
    ]
    texts.append(f"smallest seen {line.smallest:.6g}")
    return go.Scatter(
        x=axis.place(np.append(line.top, line.smallest)),
        y=np.full(len(texts), 0.012 + _ROW * (number + 0.5)),
        yaxis="y2",
        mode="markers",
        marker={
            "symbol": "line-ns-open",
            "size": 11,
            "color": colour(number),
            "line": {"width": 1.5},
            "opacity": [1.0] * len(line.top) + [_PALE],
        },
        text=[plain_text(f"{line.name}: {text}" if line.name else text) for text in texts],
        hovertemplate="%{text}<extra></extra>",
        legendgroup=str(number),
        showlegend=False,
    )


def _heights(lines: Sequence[SpectrumLine]) -> tuple[float, float]:
    """The lowest and highest value to draw."""
    floor = _FLOOR * lines[0].single
    return floor, 2 * max(floor, *(float((line.values + line.stderr).max()) for line in lines))


def _short(value: float) -> str:
    """Three digits, without an exponent where it reads well."""
    return f"{float(f'{value:.3g}'):g}"


def _power(value: float, minus: str, opening: str, closing: str) -> str:
    """A power of ten with its sign; zero is 0."""
    if value == 0:
        return "0"
    exponent = str(round(math.log10(abs(value)))).replace("-", minus)
    return f"{minus if value < 0 else ''}10{opening}{exponent}{closing}"


def _clear(shade: str) -> str:
    """A colour that lets others show through."""
    red, green, blue = (int(shade[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.25)"
