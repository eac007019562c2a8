"""Heights over a line, as curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.report.plots.colours import colour, dashes
from flatgauge.report.plots.heights import ColourScale, Heights
from flatgauge.report.plots.texts import plain_label, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEYOND = "beyond a pole"


def plot(heights: Sequence[Heights], scale: ColourScale, ax: Axes | None = None) -> Axes:
    """Draw curves with matplotlib.

    Args:
        heights: One per curve.
        scale: Of the vertical axis.
        ax: Where to; None makes a figure.

    Returns:
        The axes.
    """
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(5.2, 3.4), layout="constrained").subplots()
    for number, one in enumerate(heights):
        near, far = _parts(one, scale)
        ax.plot(
            one.ticks,
            near,
            color=colour(number),
            linestyle=dashes(number)[0],
            linewidth=1.8,
            label=plain_label(one.name) or None,
        )
        if one.beyond.any():
            ax.plot(one.ticks, far, color=colour(number), linewidth=1.2, linestyle=":")
    if any(one.beyond.any() for one in heights):
        ax.plot([], [], color="grey", linewidth=1.2, linestyle=":", label=BEYOND)
    ax.set_ylim(*_limits(scale))  # First, as a logarithmic axis must find positive ends.
    ax.set_yscale("log" if scale.log else "linear")
    for label, (where, *_) in _marks(heights).items():
        ax.axvline(where, color="grey", linewidth=0.8, linestyle="--", zorder=0)
        if label:
            ax.annotate(
                plain_label(label),
                (where, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize="small",
            )
    ax.set_xlabel("t")
    ax.set_ylabel(scale.label)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False)
    return ax


def figure(heights: Sequence[Heights], scale: ColourScale) -> Any:
    """Draw curves with plotly.

    Args:
        heights: One per curve.
        scale: Of the vertical axis.

    Returns:
        The figure.
    """
    import plotly.graph_objects as go

    found = go.Figure()
    for number, one in enumerate(heights):
        near, far = _parts(one, scale)
        look, name = {"color": colour(number), "width": 2.5}, plain_text(one.name)
        broken = look | {"dash": dashes(number)[1]}
        found.add_scatter(x=one.ticks, y=near, mode="lines", name=name, line=broken)
        if one.beyond.any():
            dots = look | {"dash": "dot", "width": 1.5}
            other = f"{name}, {BEYOND}" if name else BEYOND
            found.add_scatter(x=one.ticks, y=far, mode="lines", name=other, line=dots)
    for label, (where, *_) in _marks(heights).items():
        found.add_vline(where, line={"color": "grey", "width": 1, "dash": "dash"})
        if label:
            text = plain_text(label)
            found.add_annotation(x=where, y=1.06, yref="paper", text=text, showarrow=False)
    limits = np.log10(_limits(scale)) if scale.log else np.array(_limits(scale))
    grid = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False}
    found.update_layout(
        xaxis={"title": {"text": "t"}, **grid},
        yaxis={
            "title": {"text": scale.label},
            "type": "log" if scale.log else "linear",
            "range": limits.tolist(),
            **grid,
        },
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"t": 40, "r": 20},
        showlegend=len(heights) > 1 or any(one.beyond.any() for one in heights),
        legend={"orientation": "h", "y": 1.12, "bgcolor": "rgba(0,0,0,0)"},
    )
    return found


def _parts(one: Heights, scale: ColourScale) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The heights on this side, and those beyond with one neighbour, so that the curves meet."""
    values = np.where(np.isfinite(one.values), one.values, np.nan)
    if scale.log:  # Zero has no logarithm: it lies on the ground.
        values = np.maximum(values, _limits(scale)[0])
    beside = one.beyond.copy()
    beside[1:] |= one.beyond[:-1]
    beside[:-1] |= one.beyond[1:]
    return np.where(one.beyond, np.nan, values), np.where(beside, values, np.nan)


def _limits(scale: ColourScale) -> tuple[float, float]:
    """The ends of the vertical axis, with a little room."""
    low, high = scale.ends
    room = 0.04 * (high - low)
    top = high if scale.cut else high + room
    return (10 ** (low - room), 10**top) if scale.log else (low - room, top)


def _marks(heights: Sequence[Heights]) -> dict[str, tuple[float, ...]]:
    """The points with names, those of all curves together."""
    return {
        label: where for one in heights for label, where in one.marks.items() if label and where
    }
