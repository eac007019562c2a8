"""Landscapes: heights over a line as curves, over a plane as contours or as surfaces in space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.report.plots.style import (
    GRID,
    HEIGHTS,
    colour,
    dashes,
    height_colours,
    new_axes,
    plain_label,
    plain_text,
    plotly_layout,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Heights are cut off where the highest rise above the lowest is more than so many times what
#: nine of ten points stay below.
_STEEP, _MOST = 3.0, 0.9


@dataclass(frozen=True)
class Heights:
    """Heights over a line or a plane.

    Attributes:
        name: How it is called beside others; empty if it is alone.
        ticks: Along every axis (points,).
        values: Heights, one axis per direction.
        beyond: Where they belong to something else, and are shown apart.
        marks: Points with names, and where they are.
    """

    name: str
    ticks: NDArray[np.float64]
    values: NDArray[np.float64]
    beyond: NDArray[np.bool_]
    marks: Mapping[str, tuple[float, ...]]

    def heights_on(self, scale: ColourScale) -> NDArray[np.float64]:
        """The heights on a scale: nan where there are none, or where they lie beyond."""
        return np.where(self.beyond, np.nan, scale.height(self.values))


@dataclass(frozen=True)
class ColourScale:
    """How heights are shown, the same for all that are shown together.

    Attributes:
        label: What they are.
        low: The lowest height shown, as it was given.
        high: The highest.
        log: Whether the scale is logarithmic.
        cut: Whether there are heights above the highest.
    """

    label: str
    low: float
    high: float
    log: bool
    cut: bool

    @property
    def axis_label(self) -> str:
        """What stands at the axis of heights on the scale."""
        return f"log₁₀ {self.label}" if self.log else self.label

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest height on the scale."""
        low, high = (float(self.height(np.array(end))) for end in (self.low, self.high))
        return low, high if high > low else low + 1.0

    def height(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Heights on the scale; nan where they are not finite.

        Args:
            values: The heights.

        Returns:
            Themselves, or their logarithms.
        """
        finite: NDArray[np.float64] = np.where(np.isfinite(values), values, np.nan)
        if not self.log:
            return finite
        floored: NDArray[np.float64] = np.log10(np.maximum(finite, self.low))
        return floored

    def cut_off(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Heights on the scale, none above its end."""
        lower: NDArray[np.float64] = np.minimum(values, self.ends[1])
        return lower


def scale_of(heights: Sequence[Heights], what: str, *, log: bool = False) -> ColourScale:
    """The scale on which heights are shown together.

    Args:
        heights: All that are shown.
        what: ``"loss"`` or ``"accuracy"``, in per cent.
        log: Whether it is logarithmic.

    Returns:
        The scale. On a linear one, steep walls are cut off.
    """
    label = "accuracy (%)" if what == "accuracy" else what
    values = np.concatenate([one.values[~one.beyond].reshape(-1) for one in heights])
    values = values[np.isfinite(values)]
    if log:
        values = values[values > 0]
    if not values.size:
        return ColourScale(label, *((1.0, 10.0) if log else (0.0, 1.0)), log, False)
    low, high = float(values.min()), float(values.max())
    wall = low + _STEEP * (float(np.quantile(values, _MOST)) - low)
    if log or what == "accuracy" or not low < wall < high:
        return ColourScale(label, low, high, log, False)
    return ColourScale(label, low, wall, log, True)


BEYOND = "beyond a pole"


def plot_curves(heights: Sequence[Heights], scale: ColourScale, ax: Axes | None = None) -> Axes:
    """Draw curves with matplotlib.

    Args:
        heights: One per curve.
        scale: Of the vertical axis.
        ax: Where to; None makes a figure.

    Returns:
        The axes.
    """
    ax = new_axes(5.2, 3.4, ax)
    for number, one in enumerate(heights):
        near, far = _curve_parts(one, scale)
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
    ax.set_ylim(*_curve_limits(scale))  # First, as a logarithmic axis must find positive ends.
    ax.set_yscale("log" if scale.log else "linear")
    for label, (where, *_) in _curve_marks(heights).items():
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
    ax.margins(x=0)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False)
    return ax


def curves_figure(heights: Sequence[Heights], scale: ColourScale) -> Any:
    """Draw curves with plotly."""
    import plotly.graph_objects as go

    found = go.Figure()
    for number, one in enumerate(heights):
        near, far = _curve_parts(one, scale)
        look, name = {"color": colour(number), "width": 2.5}, plain_text(one.name)
        broken = look | {"dash": dashes(number)[1]}
        found.add_scatter(x=one.ticks, y=near, mode="lines", name=name, line=broken)
        if one.beyond.any():
            dots = look | {"dash": "dot", "width": 1.5}
            other = f"{name}, {BEYOND}" if name else BEYOND
            found.add_scatter(x=one.ticks, y=far, mode="lines", name=other, line=dots)
    for label, (where, *_) in _curve_marks(heights).items():
        found.add_vline(where, line={"color": "grey", "width": 1, "dash": "dash"})
        if label:
            text = plain_text(label)
            found.add_annotation(x=where, y=1.06, yref="paper", text=text, showarrow=False)
    limits = np.log10(_curve_limits(scale)) if scale.log else np.array(_curve_limits(scale))
    layout = plotly_layout(
        xaxis={"title": {"text": "t"}, **GRID},
        yaxis={
            "title": {"text": scale.label},
            "type": "log" if scale.log else "linear",
            "range": limits.tolist(),
            **GRID,
        },
        margin={"t": 40, "r": 20},
        showlegend=len(heights) > 1 or any(one.beyond.any() for one in heights),
    )
    return found.update_layout(layout)


def _curve_parts(
    one: Heights, scale: ColourScale
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The heights on this side, and those beyond with one neighbour, so that the curves meet."""
    values = np.where(np.isfinite(one.values), one.values, np.nan)
    if scale.log:  # Zero has no logarithm: it lies on the ground.
        values = np.maximum(values, _curve_limits(scale)[0])
    beside = one.beyond.copy()
    beside[1:] |= one.beyond[:-1]
    beside[:-1] |= one.beyond[1:]
    return np.where(one.beyond, np.nan, values), np.where(beside, values, np.nan)


def _curve_limits(scale: ColourScale) -> tuple[float, float]:
    """The ends of the vertical axis, with a little room."""
    low, high = scale.ends
    room = 0.04 * (high - low)
    top = high if scale.cut else high + room
    return (10 ** (low - room), 10**top) if scale.log else (low - room, top)


def _curve_marks(heights: Sequence[Heights]) -> dict[str, tuple[float, ...]]:
    """The points with names, those of all curves together."""
    return {
        label: where for one in heights for label, where in one.marks.items() if label and where
    }


#: How many levels there are, filled and as coloured lines.
_LEVELS, _LINE_LEVELS = 16, 9

_LINES: dict[str, Any] = {
    "colors": "white",
    "linewidths": 0.4,
    "linestyles": "solid",
    "alpha": 0.7,
}


def plot_contours(heights: Sequence[Heights], scale: ColourScale, ax: Axes | None = None) -> Axes:
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
        return _overlay(heights, scale, ax)
    if ax is not None:
        panels = [ax]
    else:
        from matplotlib.figure import Figure

        count = len(heights)
        made = Figure(figsize=(3.6 * count + 0.9, 3.5), layout="constrained")
        panels = list(made.subplots(1, count, squeeze=False, sharex=True, sharey=True)[0])
    for one, panel in zip(heights, panels, strict=True):
        filled = _fill_panel(one, scale, panel)
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


def _fill_panel(one: Heights, scale: ColourScale, ax: Axes) -> Any:
    """One panel."""
    grid = np.ma.masked_invalid(one.heights_on(scale)).T  # The first direction goes to the right.
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
    _finish_panel(one, ax)
    if one.name:
        ax.set_title(plain_label(one.name))
    return filled


def _overlay(heights: Sequence[Heights], scale: ColourScale, ax: Axes) -> Axes:
    """Several in one panel, as lines."""
    for number, one in enumerate(heights):
        grid = np.ma.masked_invalid(one.heights_on(scale)).T
        levels = _levels(scale, _LINE_LEVELS)
        look: dict[str, Any] = {"colors": colour(number), "linewidths": 1.2, "linestyles": "solid"}
        ax.contour(one.ticks, one.ticks, grid, levels=levels, **look)
        ax.plot([], [], color=colour(number), label=plain_label(one.name))
        _finish_panel(one, ax)
    ax.legend(title=f"lines of equal {scale.label}", fontsize="small", loc="upper right")
    return ax


def _finish_panel(one: Heights, ax: Axes) -> None:
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


def contours_figure(heights: Sequence[Heights], scale: ColourScale) -> Any:
    """Draw contours with plotly."""
    from plotly.subplots import make_subplots

    names = [plain_text(one.name) for one in heights]
    found = make_subplots(1, len(heights), subplot_titles=names, shared_yaxes=True)
    levels, (low, high) = _levels(scale), scale.ends
    for number, one in enumerate(heights, start=1):
        place = {"row": 1, "col": number}
        found.add_contour(
            x=one.ticks,
            y=one.ticks,
            z=one.heights_on(scale).T,
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
        _mark_points(found, one, place)
        found.update_xaxes(title_text="t₁", showgrid=False, zeroline=False, **place)
        found.update_yaxes(showgrid=False, zeroline=False, **place)
    found.update_yaxes(title_text="t₂", row=1, col=1)
    colours = height_colours(scale.axis_label, low, high)
    return found.update_layout(plotly_layout(coloraxis=colours, margin={"t": 40, "r": 20}))


def _mark_points(found: Any, one: Heights, place: dict[str, int]) -> None:
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


def plot_surfaces(heights: Sequence[Heights], scale: ColourScale, ax: Axes | None = None) -> Axes:
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
            scale.cut_off(one.heights_on(scale)),
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


def surfaces_figure(heights: Sequence[Heights], scale: ColourScale) -> Any:
    """Draw surfaces with plotly."""
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
            z=scale.cut_off(one.heights_on(scale)).T,
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
    colours = height_colours(scale.axis_label, low, high, len=0.8)
    margin = {"t": 40, "r": 10, "l": 10, "b": 10}
    return found.update_layout(plotly_layout(coloraxis=colours, margin=margin, height=460))


#: How landscapes are drawn, by name: for how many directions, with matplotlib, and with plotly.
KINDS: dict[str, tuple[int, Any, Any]] = {
    "curve": (1, plot_curves, curves_figure),
    "contour": (2, plot_contours, contours_figure),
    "surface": (2, plot_surfaces, surfaces_figure),
}
