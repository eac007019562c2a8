"""Points with lines through them: measures against what they should follow.

One panel, or several that share their vertical axis. What is drawn is a `Cloud`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.report.plots.cloud import (
    Cloud,
    Floats,
    Key,
    key_of,
    level_text,
    line_through,
    x_limits,
    y_limits,
)
from flatgauge.report.plots.style import (
    GRID,
    HEIGHTS,
    LEGEND,
    colour,
    new_axes,
    plain_label,
    plain_text,
    plotly_layout,
    shape,
)

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
    ax = new_axes(5.2, 3.8, ax)
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
    layout = plotly_layout(hovermode="closest", showlegend=bool(seen))
    layout |= panel_layout(clouds, key, columns)
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
    return plot_panels(_with_heads(pairs), columns=2, seed=seed)


def pairs_figure(pairs: Sequence[tuple[Cloud, Cloud]], *, seed: int = 0) -> Any:
    """Draw pairs of panels with plotly: the same runs before and after something.

    Args:
        pairs: Two clouds each, beside each other.
        seed: Of the redrawn points that the bands come from.

    Returns:
        The figure: one row for each pair.
    """
    return panels_figure(_with_heads(pairs), columns=2, seed=seed)


def _with_heads(pairs: Sequence[tuple[Cloud, Cloud]]) -> list[Cloud]:
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


# -- one panel ----------------------------------------------------------------------------------

#: Of points that do not count, and of the line.
GREY = "#808080"

#: What points without a group are called.
UNKNOWN = "not known"


def draw_panel(ax: Axes, cloud: Cloud, key: Key, generator: np.random.Generator) -> Any:
    """Draw one panel with matplotlib; what a colour bar is made from, if it needs one."""
    from matplotlib.colors import LogNorm, Normalize

    ax.set_xscale("log" if cloud.log else "linear")
    line = line_through(cloud, generator=generator)
    if line is not None:
        ax.fill_between(line.x, line.low, line.high, color=GREY, alpha=0.2, linewidth=0)
        ax.plot(line.x, line.y, color=GREY, linewidth=1.4)
    look: dict[str, Any] = {"s": 26, "alpha": 0.9, "linewidths": 0, "zorder": 3}
    kept, scale = cloud.there & cloud.counted, None
    if key.smooth:
        ends = float(key.levels[0]), float(key.levels[-1])
        norm = LogNorm(*ends) if key.log else Normalize(*ends)
        place, numbers = _smooth(cloud)
        chosen = kept & place
        colours: dict[str, Any] = {"c": numbers[chosen], "cmap": HEIGHTS, "norm": norm}
        scale = ax.scatter(cloud.x[chosen], cloud.y[chosen], **colours, **look)
        kept = kept & ~place
    for number, level, chosen in _parts(cloud, key, kept):
        look |= {"color": colour(number), "marker": shape(number)[0]}
        ax.scatter(cloud.x[chosen], cloud.y[chosen], label=plain_label(level) or None, **look)
    out = cloud.there & ~cloud.counted
    if out.any():
        hollow: dict[str, Any] = {
            "facecolors": "none",
            "edgecolors": GREY,
            "s": 24,
            "linewidths": 1.0,
        }
        ax.scatter(cloud.x[out], cloud.y[out], label=plain_label(cloud.left_out), **hollow)
    _set_across(ax, cloud)
    ax.set_xlabel(plain_label(cloud.axis_label))
    ax.set_title(plain_label(cloud.title), loc="left", fontsize="medium")
    ax.spines[["top", "right"]].set_visible(False)
    return scale


def _set_across(ax: Axes, cloud: Cloud) -> None:
    """The horizontal axis: its ends, and numbers that do not run into each other."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = x_limits(cloud)
    ax.set_xlim(*((10**low, 10**high) if cloud.log else (low, high)))
    if cloud.log:
        alone = np.floor(high) - np.ceil(low) < 1
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if alone else (1.0,), numticks=6))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.locator_params(axis="x", nbins=5)


def add_colour_bar(axes: Any, scale: Any, key: Key) -> None:
    """Add the scale of colours that `draw_panel` returned beside panels."""
    first = np.ravel(np.array(axes, dtype=object))[0]
    bar = first.figure.colorbar(scale, ax=axes, label=plain_label(key.factor), pad=0.02)
    bar.set_ticks(key.ticks(), labels=[f"{tick:.3g}" for tick in key.ticks()])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def panel_traces(cloud: Cloud, key: Key, generator: np.random.Generator) -> list[dict[str, Any]]:
    """Band, line, and the points of every group of a panel, for plotly."""
    found = _line_traces(cloud, generator)
    kept = cloud.there & cloud.counted
    look: dict[str, Any]
    size = {"size": 8, "opacity": 0.9}
    if key.smooth:
        place, numbers = _smooth(cloud)
        chosen = kept & place
        shades = [key.place(number) for number in numbers[chosen]]
        look = size | {"color": shades, "coloraxis": "coloraxis"}
        found.append(_points(cloud, chosen, "", look))
        kept = kept & ~place
    for number, level, chosen in _parts(cloud, key, kept):
        look = size | {"color": colour(number), "symbol": shape(number)[1]}
        found.append(_points(cloud, chosen, level, look))
    out = cloud.there & ~cloud.counted
    if out.any():
        look = {"size": 8, "color": GREY, "symbol": "circle-open", "line": {"width": 1.2}}
        found.append(_points(cloud, out, cloud.left_out, look))
    return found


def _line_traces(cloud: Cloud, generator: np.random.Generator) -> list[dict[str, Any]]:
    line = line_through(cloud, generator=generator)
    if line is None:
        return []
    quiet = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
    band = quiet | {
        "x": np.concatenate([line.x, line.x[::-1]]).tolist(),
        "y": np.concatenate([line.high, line.low[::-1]]).tolist(),
        "fill": "toself",
        "fillcolor": "rgba(128,128,128,0.2)",
        "line": {"width": 0},
    }
    look = {"color": GREY, "width": 1.8}
    return [band, quiet | {"x": line.x.tolist(), "y": line.y.tolist(), "line": look}]


def _points(cloud: Cloud, chosen: Any, name: str, look: dict[str, Any]) -> dict[str, Any]:
    """Points of a group, with what is lines_of of each where one points at it."""
    places = np.flatnonzero(chosen)
    lines_of = []
    for place in places:
        lines = [cloud.names[place]]
        if cloud.groups:
            lines.append(f"{cloud.factor}: {level_text(cloud.groups[place])}")
        lines_of.append("<br>".join(plain_text(line) for line in lines))
    x, y = plain_text(cloud.label), plain_text(cloud.target)
    title = plain_text(name)
    return {
        "type": "scatter",
        "name": title,
        "legendgroup": title,
        "showlegend": bool(title),
        "marker": look,
        "x": cloud.x[places].tolist(),
        "y": cloud.y[places].tolist(),
        "text": lines_of,
        "mode": "markers",
        "hovertemplate": f"%{{text}}<br>{x}: %{{x:.4g}}<br>{y}: %{{y:.4g}}<extra></extra>",
    }


def _parts(cloud: Cloud, key: Key, kept: Any) -> list[tuple[int, str, Any]]:
    """The points of every group that has a colour of its own: its number, name and members."""
    if not cloud.groups:
        return [(0, "", kept)] if kept.any() else []
    groups = np.array([level_text(group) for group in cloud.groups], dtype=object)
    names = [] if key.smooth else [level_text(level) for level in key.levels]
    parts = [(number, name, kept & (groups == name)) for number, name in enumerate(names)]
    rest = kept & ~np.isin(groups, names)  # Numbers that are missing are no level.
    return [part for part in [*parts, (len(names), UNKNOWN, rest)] if part[2].any()]


def _smooth(cloud: Cloud) -> tuple[Any, Floats]:
    """Which points have a place on the scale of colours, and the numbers."""
    numbers = np.array([float(group) for group in cloud.groups] or np.full(len(cloud.x), np.nan))
    return np.isfinite(numbers), numbers


# -- where panels stand, for plotly ------------------------------------------------------------

#: Pixels: height of a panel, of one that is alone, of a line of its title, of what stands below
#: it, of a colour bar.
_PANEL, _ALONE, _LINE, _BELOW, _BAR = 220, 300, 17, 66, 58


#: Between columns, as a part of the width.
_GAP = 0.035

_SMALL = {"size": 12}
_LINES: dict[str, Any] = {**GRID, "automargin": True, "tickfont": {"size": 11}}


def good_columns(count: int) -> int:
    """How many of so many panels stand beside each other: three at most, to be read."""
    return 2 if count == 4 else max(1, min(count, 3))


def panel_layout(clouds: Sequence[Cloud], key: Key, columns: int) -> dict[str, Any]:
    """Axes, titles, legend and height of panels in so many columns, for plotly."""
    rows = math.ceil(len(clouds) / columns)
    head = 8 + _LINE * max(len(cloud.title.split("\n")) if cloud.title else 0 for cloud in clouds)
    tall = _PANEL if len(clouds) > 1 else _ALONE
    step = tall + _BELOW + head
    inner = rows * step - _BELOW - head
    top, bottom = head + 34, _BELOW + (_BAR if key.smooth else 0)
    wide, ends = (1 - _GAP * (columns - 1)) / columns, y_limits(clouds)
    layout: dict[str, Any] = {"annotations": []}
    for number, cloud in enumerate(clouds):
        row, column = divmod(number, columns)
        left, ceiling = column * (wide + _GAP), 1 - row * step / inner
        domains = [left, min(left + wide, 1.0)], [max(ceiling - tall / inner, 0.0), ceiling]
        name = str(number + 1) if number else ""  # As plotly counts: xaxis, xaxis2, ...
        layout[f"xaxis{name}"] = _across(cloud) | {"domain": domains[0], "anchor": f"y{name}"}
        upwards = _upwards(cloud.target, ends, named=column == 0)
        layout[f"yaxis{name}"] = upwards | {"domain": domains[1], "anchor": f"x{name}"}
        if number:
            layout[f"yaxis{name}"]["matches"] = "y"
        layout["annotations"].append(_title(cloud, left, ceiling))
    layout["legend"] = _legend(key, 1 + head / inner)
    layout["margin"] = {"t": top, "b": bottom, "l": 60, "r": 16}
    layout["height"] = inner + top + bottom
    if key.smooth:
        layout["coloraxis"] = _colour_axis(key, -_BELOW / inner)
    return layout


def _across(cloud: Cloud) -> dict[str, Any]:
    """The horizontal axis of a panel."""
    label = plain_text(cloud.axis_label).replace("\n", "<br>")
    return _LINES | {
        "type": "log" if cloud.log else "linear",
        "range": list(x_limits(cloud)),
        "title": {"text": label, "font": _SMALL, "standoff": 6},
        "exponentformat": "power",
        **_ticks(cloud),
    }


def _upwards(target: str, ends: tuple[float, float], *, named: bool) -> dict[str, Any]:
    """The vertical axis, the same for all panels; named at the first of a row."""
    return _LINES | {
        "range": list(ends),
        "showticklabels": named,
        "title": {"text": plain_text(target) if named else "", "font": _SMALL},
    }


def _legend(key: Key, y: float) -> dict[str, Any]:
    """One legend for all panels, above them."""
    title = {"text": "" if key.smooth else plain_text(key.factor), "font": _SMALL}
    return LEGEND | {"y": y, "title": title}


def _ticks(cloud: Cloud) -> dict[str, Any]:
    """Few numbers at the horizontal axis: powers of ten where there are enough of them."""
    low, high = x_limits(cloud)
    if cloud.log and high - low < 5:
        return {"dtick": "D2" if high - low < 2 else 1}
    return {"nticks": 5}


def _title(cloud: Cloud, left: float, ceiling: float) -> dict[str, Any]:
    """The title of a panel: plotly has one for the whole picture only."""
    return {
        "text": plain_text(cloud.title).replace("\n", "<br>"),
        "x": left,
        "y": ceiling,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "align": "left",
        "showarrow": False,
        "font": {"size": 12},
    }


def _colour_axis(key: Key, y: float) -> dict[str, Any]:
    """The scale of colours and its bar, below all panels."""
    ticks = key.ticks()
    return {
        "colorscale": HEIGHTS,
        "cmin": key.place(key.levels[0]),
        "cmax": key.place(key.levels[-1]),
        "colorbar": {
            "title": {"text": plain_text(key.factor), "side": "top"},
            "orientation": "h",
            "thickness": 10,
            "len": 0.6,
            "x": 0,
            "xanchor": "left",
            "y": y,
            "yanchor": "top",
            "tickvals": [key.place(tick) for tick in ticks],
            "ticktext": [f"{tick:.3g}" for tick in ticks],
        },
    }
