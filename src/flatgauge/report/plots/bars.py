"""Numbers by name: bars, values in order of size, and ratios to the flattest model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.report.plots.style import colour, new_axes, plain_label, plain_text, plotly_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Height of a row and of what surrounds them, in pixels.
_ROW, _AROUND = 24, 90

Series = Mapping[str, Sequence[float]]


def bars_axes(
    names: Sequence[str], series: Series, *, label: str, log: bool = False, ax: Axes | None = None
) -> Axes:
    """Draw bars with matplotlib.

    Args:
        names: Of the rows, from the top.
        series: Values by name of the series, one for each row; nan leaves a row empty.
        label: Of the axis of values.
        log: Whether that axis is logarithmic.
        ax: Where to draw; None for a new figure.

    Returns:
        The axes.
    """
    ax = new_axes(6.4, 1.2 + 0.24 * len(names) * max(len(series), 1), ax)
    width = 0.8 / max(len(series), 1)
    for number, (name, values) in enumerate(series.items()):
        places = [row + (number - (len(series) - 1) / 2) * width for row in range(len(names))]
        lengths = [float(value) for value in values]
        ax.barh(places, lengths, width, color=colour(number), label=plain_label(name))
    ax.set_yticks(range(len(names)), [plain_label(name) for name in names])
    ax.invert_yaxis()
    ax.set_xlabel(plain_label(label))
    if log:
        ax.set_xscale("log")
    if len(series) > 1:
        ax.legend()
    return ax


def bars_figure(names: Sequence[str], series: Series, *, label: str) -> Any:
    """Draw bars with plotly.

    Args:
        names: Of the rows, from the top.
        series: Values by name of the series, one for each row; nan leaves a row empty.
        label: Of the axis of values.

    Returns:
        The figure, without a ground of its own.
    """
    import plotly.graph_objects as go

    rows = [plain_text(name) for name in names]
    traces = [
        go.Bar(
            orientation="h",
            name=plain_text(name),
            y=rows,
            x=[float(value) if math.isfinite(value) else None for value in values],
            marker={"color": colour(number), "line": {"width": 0}},
            hovertemplate="%{y}: %{x:.6g}<extra></extra>",
        )
        for number, (name, values) in enumerate(series.items())
    ]
    layout = plotly_layout(
        height=_AROUND + _ROW * len(rows) * max(len(series), 1) ** 0.7,
        margin={"l": 8, "r": 24, "t": 28, "b": 48},
        bargap=0.35,
        showlegend=len(series) > 1,
        xaxis={"title": {"text": plain_text(label)}, "exponentformat": "power"},
        yaxis={"autorange": "reversed", "automargin": True, "type": "category"},
    )
    return go.Figure(traces, layout)


#: A curve of more points is thinned: at the top every value, below it evenly spread ranks.
MOST_POINTS = 400
_TOP = 100


def drawn_ranks(count: int, most: int = MOST_POINTS) -> NDArray[np.int64]:
    """The ranks at which a long curve is drawn.

    Args:
        count: How many values there are.
        most: How many points at most.

    Returns:
        Ranks from 0, the last among them.

    Example:
        >>> drawn_ranks(3).tolist(), len(drawn_ranks(10**6))
        ([0, 1, 2], 400)
    """
    if count <= most:
        return np.arange(count)
    top = np.arange(_TOP)
    rest = np.linspace(_TOP, count - 1, most - _TOP).round().astype(np.int64)
    return np.concatenate([top, rest])


def ranked_figure(series: Mapping[str, NDArray[np.float64]], *, label: str) -> Any:
    """Draw every series from its largest value to its smallest, with plotly.

    Args:
        series: Values by name; what is not finite is left out.
        label: Of the axis of values.

    Returns:
        The figure, without a ground of its own.
    """
    import plotly.graph_objects as go

    traces = []
    for number, (name, values) in enumerate(series.items()):
        order = np.argsort(-values, kind="stable")
        order = order[np.isfinite(values[order])]
        ranks = drawn_ranks(len(order))
        traces.append(
            go.Scatter(
                name=plain_text(name),
                x=(ranks + 1).tolist(),
                y=values[order[ranks]].tolist(),
                customdata=order[ranks].tolist(),
                mode="lines+markers" if len(ranks) <= 100 else "lines",
                line={"color": colour(number), "width": 1.5, "shape": "hv"},
                marker={"size": 4},
                hovertemplate="unit %{customdata}: %{y:.6g}<extra>%{fullData.name}</extra>",
            )
        )
    layout = plotly_layout(
        height=340,
        margin={"l": 8, "r": 24, "t": 36, "b": 48},
        showlegend=True,
        xaxis={"title": {"text": "unit, in order of size"}, "zeroline": False},
        yaxis={
            "title": {"text": plain_text(label)},
            "automargin": True,
            "exponentformat": "power",
        },
    )
    return go.Figure(traces, layout)


def plot_ratios(
    values: Mapping[str, Sequence[float]],
    errors: Mapping[str, Sequence[float]],
    models: Sequence[str],
    *,
    marked: Sequence[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """Draw a dot for every model and measure, at its value over the smallest of the models'.

    Args:
        values: By measure, one for every model.
        errors: How far they may be off, alike.
        models: Their names.
        marked: Measures whose names are written in bold.
        ax: Where to draw; None for a figure of its own.

    Returns:
        The axes.
    """
    shown = [name for name, row in values.items() if all(0 < v < math.inf for v in row)]
    ax = new_axes(7.2, 1.6 + 0.24 * max(len(shown), 4), ax)
    places = range(len(shown))
    for number, model in enumerate(models):
        smallest = [min(values[name]) for name in shown]
        ratios = [values[n][number] / least for n, least in zip(shown, smallest, strict=True)]
        bars = [errors[n][number] / least for n, least in zip(shown, smallest, strict=True)]
        # An error that reaches below zero has no place on a log scale.
        below = [min(bar, 0.9 * ratio) for bar, ratio in zip(bars, ratios, strict=True)]
        ax.errorbar(
            ratios,
            places,
            xerr=[below, bars],
            fmt="o",
            markersize=5,
            elinewidth=1,
            color=colour(number),
            label=plain_label(model),
        )
    ax.set_xscale("log")
    ax.set_yticks(places, shown)
    for label in ax.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() in marked else "normal")
    ax.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    ax.grid(True, axis="x", alpha=0.3)
    missing = [name for name in values if name not in shown]
    ax.set_xlabel("times the flattest" + (f"\nno ratio: {', '.join(missing)}" if missing else ""))
    if shown and len(models) > 1:
        ax.legend(frameon=False, fontsize="small")
    return ax
