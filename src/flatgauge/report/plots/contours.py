"""Heights over a plane, as lines of equal height."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.report.plots.colours import HEIGHTS, colour
from flatgauge.report.plots.curves import BEYOND
from flatgauge.report.plots.heights import ColourScale, Heights
from flatgauge.report.plots.texts import plain_label, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: How many levels there are, filled and as coloured lines.
_LEVELS, _LINE_LEVELS = 16, 9

_LINES: dict[str, Any] = {
    "colors": "white",
    "linewidths": 0.4,
    "linestyles": "solid",
    "alpha": 0.7,
}


def plot(heights: Sequence[Heights], scale: ColourScale, ax: Axes | None = None) -> Axes:
    """Draw contours with matplotlib.

    Args:
        heights: One per panel.
        scale: Of the colours, which all panels share.
        ax: Where to; None makes a figure with one panel for each. Several in one `ax` are drawn
            as lines, in one colour each.

    Returns:
        The axes; of several panels the first.
    """
    if ax is not None and len(heights) > 1:
        return _overlaid(heights, scale, ax)
    if ax is not None:
        panels = [ax]
    else:
        from matplotlib.figure import Figure

        count = len(heights)
        made = Figure(figsize=(3.6 * count + 0.9, 3.5), layout="constrained")
        panels = list(made.subplots(1, count, squeeze=False, sharex=True, sharey=True)[0])
    for one, panel in zip(heights, panels, strict=True):
        filled = _filled(one, scale, panel)
        if ax is None:
            panel.label_outer()
    add_bar(panels, filled, scale)
    return panels[0]


def add_bar(panels: Sequence[Axes], drawn: Any, scale: ColourScale, **look: Any) -> None:
    """Show what the colours mean, at round numbers.

    Args:
        panels: Beside which axes.
        drawn: What has the colours.
        scale: What they mean.
        **look: Of the bar.
    """
    from matplotlib.ticker import MaxNLocator

    where: Any = list(panels)
    panels[0].figure.colorbar(
        drawn, ax=where, ticks=MaxNLocator(6), label=scale.axis_label, **({"pad": 0.02} | look)
    )


def _filled(one: Heights, scale: ColourScale, ax: Axes) -> Any:
    """One panel."""
    grid = np.ma.masked_invalid(one.shown(scale)).T  # The first direction goes to the right.
    end = "max" if scale.cut else "neither"
    filled = ax.contourf(
        one.ticks, one.ticks, grid, levels=_levels(scale), cmap=HEIGHTS, extend=end
    )
    ax.contour(one.ticks, one.ticks, grid, levels=_levels(scale), **_LINES)
    if one.beyond.any():
        from matplotlib.patches import Patch

        beyond = one.beyond.T.astype(float)
        ax.contourf(
            one.ticks, one.ticks, beyond, levels=[0.5, 1.5], colors="none", hatches=["////"]
        )
        ax.legend(
            handles=[Patch(facecolor="white", edgecolor="black", hatch="////", label=BEYOND)],
            loc="upper right",
            fontsize="small",
        )
    _finish(one, ax)
    if one.name:
        ax.set_title(plain_label(one.name))
    return filled


def _overlaid(heights: Sequence[Heights], scale: ColourScale, ax: Axes) -> Axes:
    """Several in one panel, as lines."""
    for number, one in enumerate(heights):
        grid = np.ma.masked_invalid(one.shown(scale)).T
        levels = _levels(scale, _LINE_LEVELS)
        look: dict[str, Any] = {"colors": colour(number), "linewidths": 1.2, "linestyles": "solid"}
        ax.contour(one.ticks, one.ticks, grid, levels=levels, **look)
        ax.plot([], [], color=colour(number), label=plain_label(one.name))
        _finish(one, ax)
    ax.legend(title=f"lines of equal {scale.label}", fontsize="small", loc="upper right")
    return ax


def _finish(one: Heights, ax: Axes) -> None:
    """Marks and labels."""
    for label, where in one.marks.items():
        if len(where) == 2:
            ax.plot(*where, marker="o", markersize=4, color="white", markeredgecolor="black")
            if label:
                ax.annotate(
                    plain_label(label),
                    where,
                    xytext=(5, 5),
                    textcoords="offset points",
                    fontsize="small",
                    bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1},
                )
    ax.set_xlabel("t₁")
    ax.set_ylabel("t₂")
    ax.set_aspect("equal")
    few_ticks(ax)


def few_ticks(ax: Axes) -> None:
    """Label steps with few numbers, the power of ten of small ones once for all.

    Args:
        ax: The axes.
    """
    ax.locator_params(axis="x", nbins=4)
    ax.locator_params(axis="y", nbins=4)
    ax.ticklabel_format(axis="both", style="sci", scilimits=(-2, 3), useMathText=True)


def figure(heights: Sequence[Heights], scale: ColourScale) -> Any:
    """Draw contours with plotly.

    Args:
        heights: One per panel.
        scale: Of the colours, which all panels share.

    Returns:
        The figure.
    """
    from plotly.subplots import make_subplots

    names = [plain_text(one.name) for one in heights]
    found = make_subplots(1, len(heights), subplot_titles=names, shared_yaxes=True)
    levels, (low, high) = _levels(scale), scale.ends
    for number, one in enumerate(heights, start=1):
        place = {"row": 1, "col": number}
        found.add_contour(
            x=one.ticks,
            y=one.ticks,
            z=one.shown(scale).T,
            contours={"start": levels[0], "end": levels[-1], "size": levels[1] - levels[0]},
            line={"width": 0.5, "color": "white"},
            coloraxis="coloraxis",
            hovertemplate="t₁ %{x:.3g}<br>t₂ %{y:.3g}<br>%{z:.4g}<extra></extra>",
            **place,
        )
        if one.beyond.any():
            found.add_heatmap(
                x=one.ticks,
                y=one.ticks,
                z=np.where(one.beyond, 1.0, np.nan).T,
                colorscale=[[0, "rgba(128,128,128,0.5)"], [1, "rgba(128,128,128,0.5)"]],
                showscale=False,
                name=BEYOND,
                showlegend=number == 1,
                hovertemplate=f"{BEYOND}<extra></extra>",
                **place,
            )
        _mark(found, one, place)
        found.update_xaxes(title_text="t₁", showgrid=False, zeroline=False, **place)
        found.update_yaxes(showgrid=False, zeroline=False, **place)
    found.update_yaxes(title_text="t₂", row=1, col=1)
    found.update_layout(
        coloraxis={
            "colorscale": HEIGHTS,
            "cmin": low,
            "cmax": high,
            "colorbar": {"title": {"text": scale.axis_label}, "nticks": 7},
        },
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"t": 40, "r": 20},
        legend={"orientation": "h", "y": 1.15, "bgcolor": "rgba(0,0,0,0)"},
    )
    return found


def _mark(found: Any, one: Heights, place: dict[str, int]) -> None:
    """Points with names."""
    marks = {label: where for label, where in one.marks.items() if len(where) == 2}
    found.add_scatter(
        x=[where[0] for where in marks.values()],
        y=[where[1] for where in marks.values()],
        text=[plain_text(label) for label in marks],
        mode="markers+text",
        textposition="top center",
        textfont={"color": "white"},
        marker={"color": "white", "size": 7, "line": {"color": "black", "width": 1}},
        hoverinfo="skip",
        showlegend=False,
        **place,
    )


def _levels(scale: ColourScale, count: int = _LEVELS) -> NDArray[np.float64]:
    return np.linspace(*scale.ends, count)
