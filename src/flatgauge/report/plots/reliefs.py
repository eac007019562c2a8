"""Heights over a plane, as surfaces in space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.report.plots.colours import HEIGHTS
from flatgauge.report.plots.contours import add_bar, few_ticks
from flatgauge.report.plots.heights import ColourScale, Heights
from flatgauge.report.plots.texts import plain_label, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(heights: Sequence[Heights], scale: ColourScale, ax: Axes | None = None) -> Axes:
    """Draw surfaces with matplotlib.

    Args:
        heights: One per panel.
        scale: Of heights and colours, which all panels share.
        ax: Where to, for one surface; None makes a figure with one panel for each.

    Returns:
        The axes; of several panels the first.

    Raises:
        ValueError: If `ax` has no third dimension, or there are several surfaces for one.
    """
    panels: list[Any] = [ax]
    if ax is None:
        from matplotlib.figure import Figure

        count = len(heights)
        made = Figure(figsize=(4.2 * count + 0.6, 4.0), layout="constrained")
        space = {"projection": "3d"}
        panels = list(made.subplots(1, count, squeeze=False, subplot_kw=space)[0])
    elif len(heights) > 1:
        raise ValueError(
            f"{len(heights)} surfaces do not fit into one `ax`; leave it out for a figure with "
            "one panel for each, or use `kind='contour'`."
        )
    elif ax.name != "3d":
        raise ValueError(
            "a surface needs axes with a third dimension; make them with "
            "`figure.add_subplot(projection='3d')`, or use `kind='contour'`."
        )
    low, high = scale.ends
    for one, panel in zip(heights, panels, strict=True):
        x, y = np.meshgrid(one.ticks, one.ticks, indexing="ij")
        drawn = panel.plot_surface(
            x,
            y,
            scale.cut_off(one.shown(scale)),
            cmap=HEIGHTS,
            vmin=low,
            vmax=high,
            rcount=len(one.ticks),
            ccount=len(one.ticks),
            linewidth=0.15,
            edgecolor=(1, 1, 1, 0.35),
            antialiased=True,
        )
        panel.set(xlabel="t₁", ylabel="t₂", title=plain_label(one.name), zlim=(low, high))
        panel.view_init(elev=28, azim=-55)
        few_ticks(panel)
        for axis in (panel.xaxis, panel.yaxis, panel.zaxis):
            axis.pane.set_alpha(0.0)
    add_bar(panels, drawn, scale, shrink=0.6, pad=0.06)
    first: Axes = panels[0]
    return first


def figure(heights: Sequence[Heights], scale: ColourScale) -> Any:
    """Draw surfaces with plotly.

    Args:
        heights: One per panel.
        scale: Of heights and colours, which all panels share.

    Returns:
        The figure.
    """
    from plotly.subplots import make_subplots

    count, (low, high) = len(heights), scale.ends
    found = make_subplots(
        1,
        count,
        specs=[[{"type": "scene"}] * count],
        subplot_titles=[plain_text(one.name) for one in heights],
        horizontal_spacing=0.02,
    )
    for number, one in enumerate(heights, start=1):
        found.add_surface(
            x=one.ticks,
            y=one.ticks,
            z=scale.cut_off(one.shown(scale)).T,
            coloraxis="coloraxis",
            contours={
                "z": {
                    "show": True,
                    "color": "rgba(255,255,255,0.4)",
                    "width": 1,
                    "start": low,
                    "end": high,
                    "size": (high - low) / 15,
                }
            },
            hovertemplate="t₁ %{x:.3g}<br>t₂ %{y:.3g}<br>%{z:.4g}<extra></extra>",
            row=1,
            col=number,
        )
    side = {"backgroundcolor": "rgba(0,0,0,0)", "gridcolor": "rgba(128,128,128,0.4)"}
    found.update_scenes(
        xaxis={"title": {"text": "t₁"}, **side},
        yaxis={"title": {"text": "t₂"}, **side},
        # Beside each other there is no room for heights: their colours tell them.
        zaxis={
            "title": {"text": scale.axis_label if count == 1 else ""},
            "showticklabels": count == 1,
            "range": [low, high],
            **side,
        },
        aspectmode="cube",
        camera={"eye": {"x": 1.6, "y": -2.05, "z": 1.3}},
    )
    found.update_layout(
        coloraxis={
            "colorscale": HEIGHTS,
            "cmin": low,
            "cmax": high,
            "colorbar": {"title": {"text": scale.axis_label}, "len": 0.8, "nticks": 7},
        },
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"t": 40, "r": 10, "l": 10, "b": 10},
        height=460,
    )
    return found
