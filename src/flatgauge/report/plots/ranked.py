"""Many values in order of size: one curve for each series."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.report.plots.colours import colour
from flatgauge.report.plots.texts import plain_text

#: A curve of more points is thinned: at the top every value, below it evenly spread ranks.
MOST_POINTS = 400
_TOP = 100


def thinned(count: int, most: int = MOST_POINTS) -> NDArray[np.int64]:
    """The ranks at which a long curve is drawn.

    Args:
        count: How many values there are.
        most: How many points at most.

    Returns:
        Ranks from 0, the last among them.

    Example:
        >>> thinned(3).tolist(), len(thinned(10**6))
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
        ranks = thinned(len(order))
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
    figure = go.Figure(traces)
    figure.update_layout(
        height=340,
        margin={"l": 8, "r": 24, "t": 36, "b": 48},
        showlegend=True,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis={"title": {"text": "unit, in order of size"}, "zeroline": False},
        yaxis={
            "title": {"text": plain_text(label)},
            "automargin": True,
            "exponentformat": "power",
        },
    )
    return figure
