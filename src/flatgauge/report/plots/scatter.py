"""Points with lines through them: measures against what they should follow.

One panel, or several that share their vertical axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.report.plots.cloud import Cloud, Key, key_of, y_limits
from flatgauge.report.plots.panel_layout import good_columns, panel_layout
from flatgauge.report.plots.points import add_colour_bar, draw_panel, panel_traces
from flatgauge.report.plots.texts import plain_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What the two columns of pairs are.
HEADS = ("as trained", "after random rescaling")


def plot(cloud: Cloud, ax: Axes | None = None, *, seed: int = 0) -> Axes:
    """Draw points and the line through them with matplotlib.

    Args:
        cloud: The points.
        ax: Where to; None makes a figure.
        seed: Of the redrawn points that the band comes from.

    Returns:
        The axes.
    """
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(5.2, 3.8), layout="constrained").subplots()
    key = key_of([cloud])
    scale = draw_panel(ax, cloud, key, np.random.default_rng(seed))
    ax.set_ylim(*y_limits([cloud]))
    ax.set_ylabel(plain_label(cloud.target))
    if key.smooth:
        add_colour_bar(ax, scale, key)
    if ax.get_legend_handles_labels()[0]:
        title = None if key.smooth else plain_label(key.factor) or None
        ax.legend(frameon=False, fontsize="small", title=title, title_fontsize="small")
    return ax


def figure(cloud: Cloud, *, seed: int = 0) -> Any:
    """Draw points and the line through them with plotly.

    Args:
        cloud: The points.
        seed: Of the redrawn points that the band comes from.

    Returns:
        The figure, without a ground of its own.
    """
    return panels_figure([cloud], seed=seed)


def plot_panels(clouds: Sequence[Cloud], *, columns: int | None = None, seed: int = 0) -> Figure:
    """Draw several panels with matplotlib.

    Args:
        clouds: The points of every panel, row by row.
        columns: How many stand beside each other; None for up to three.
        seed: Of the redrawn points that the bands come from.

    Returns:
        A figure as wide as a page of text.
    """
    from matplotlib.figure import Figure

    _check(clouds)
    columns = columns or good_columns(len(clouds))
    rows = math.ceil(len(clouds) / columns)
    found = Figure(figsize=(min(1.2 + 2.5 * columns, 7.6), 0.5 + 2.4 * rows))
    found.set_layout_engine("constrained")
    axes = found.subplots(rows, columns, sharey=True, squeeze=False)
    key, scale = key_of(clouds), None
    generator = np.random.default_rng(seed)
    for number, ax in enumerate(axes.flat):
        if number >= len(clouds):
            ax.remove()
            continue
        scale = draw_panel(ax, clouds[number], key, generator)
        ax.tick_params(labelsize="x-small")
        long = max(map(len, clouds[number].axis_label.split("\n"))) > 28
        ax.xaxis.label.set_fontsize("x-small" if long else "small")
        ax.set_title(plain_label(clouds[number].title), loc="left", fontsize="small")
    axes[0, 0].set_ylim(*y_limits(clouds))
    found.supylabel(plain_label(clouds[0].target), fontsize="small")
    drawn = [ax for number, ax in enumerate(axes.flat) if number < len(clouds)]
    if key.smooth and scale is not None:
        add_colour_bar(drawn, scale, key)
    _add_legend(found, drawn, key)
    return found


def _add_legend(found: Figure, axes: Sequence[Any], key: Key) -> None:
    """One legend for all panels, above them."""
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        found.legend(
            handles.values(),
            handles.keys(),
            loc="outside upper left",
            ncols=min(len(handles), 6),
            frameon=False,
            fontsize="small",
            title=None if key.smooth else plain_label(key.factor) or None,
            title_fontsize="small",
            alignment="left",
        )


def panels_figure(clouds: Sequence[Cloud], *, columns: int | None = None, seed: int = 0) -> Any:
    """Draw several panels with plotly.

    Args:
        clouds: The points of every panel, row by row.
        columns: How many stand beside each other; None for up to three.
        seed: Of the redrawn points that the bands come from.

    Returns:
        The figure, without a ground of its own. ``layout.meta["narrow"]`` is what changes in its
        layout where only one column has room.
    """
    import plotly.graph_objects as go

    _check(clouds)
    columns = columns or good_columns(len(clouds))
    key, generator = key_of(clouds), np.random.default_rng(seed)
    seen: set[str] = set()
    traces = []
    for number, cloud in enumerate(clouds):
        for trace in panel_traces(cloud, key, generator):
            group = trace.get("legendgroup")
            if group:
                trace["showlegend"] = group not in seen
                seen.add(group)
            traces.append(trace | {"xaxis": f"x{number + 1}", "yaxis": f"y{number + 1}"})
    layout = panel_layout(clouds, key, columns) | {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "showlegend": bool(seen),
    }
    if columns > 1:
        layout["meta"] = {"narrow": panel_layout(clouds, key, 1)}
    return go.Figure({"data": traces, "layout": layout})


def plot_pairs(pairs: Sequence[tuple[Cloud, Cloud]], *, seed: int = 0) -> Figure:
    """Draw pairs of panels with matplotlib: the same runs before and after something.

    Args:
        pairs: Two clouds each, beside each other.
        seed: Of the redrawn points that the bands come from.

    Returns:
        The figure: one row for each pair.
    """
    return plot_panels(_headed(pairs), columns=2, seed=seed)


def pairs_figure(pairs: Sequence[tuple[Cloud, Cloud]], *, seed: int = 0) -> Any:
    """Draw pairs of panels with plotly: the same runs before and after something.

    Args:
        pairs: Two clouds each, beside each other.
        seed: Of the redrawn points that the bands come from.

    Returns:
        The figure: one row for each pair.
    """
    return panels_figure(_headed(pairs), columns=2, seed=seed)


def _headed(pairs: Sequence[tuple[Cloud, Cloud]]) -> list[Cloud]:
    return [
        replace(cloud, title=f"{head}\n{cloud.title}" if cloud.title else head)
        for pair in pairs
        for head, cloud in zip(HEADS, pair, strict=True)
    ]


def _check(clouds: Sequence[Cloud]) -> None:
    if not clouds:
        raise ValueError("`clouds` is empty; a picture needs at least one cloud of points.")
    targets = dict.fromkeys(cloud.target for cloud in clouds)
    if len(targets) > 1:
        raise ValueError(
            f"the clouds have different targets ({', '.join(targets)}), but panels share one "
            "vertical axis; draw one picture for each target."
        )
