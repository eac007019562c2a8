"""Horizontal bars: one row per name, one colour per series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatgauge.report.plots.colours import colour
from flatgauge.report.plots.texts import plain_label, plain_text

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
    if ax is None:
        from matplotlib.figure import Figure

        height = 1.2 + 0.24 * len(names) * max(len(series), 1)
        ax = Figure(figsize=(6.4, height), layout="constrained").subplots()
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
    ax.spines[["top", "right"]].set_visible(False)
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
    figure = go.Figure(traces)
    figure.update_layout(
        height=_AROUND + _ROW * len(rows) * max(len(series), 1) ** 0.7,
        margin={"l": 8, "r": 24, "t": 28, "b": 48},
        bargap=0.35,
        showlegend=len(series) > 1,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis={"title": {"text": plain_text(label)}, "exponentformat": "power"},
        yaxis={"autorange": "reversed", "automargin": True, "type": "category"},
    )
    return figure
