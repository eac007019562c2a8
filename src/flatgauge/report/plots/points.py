"""One panel of points, as matplotlib and plotly draw it: all but what panels share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.report.plots.cloud import Cloud, Floats, Key, level_text, line_through, x_limits
from flatgauge.report.plots.colours import HEIGHTS, colour, shape
from flatgauge.report.plots.texts import plain_label, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Of points that do not count, and of the line.
GREY = "#808080"

#: What points without a group are called.
UNKNOWN = "not known"


def draw_panel(ax: Axes, cloud: Cloud, key: Key, generator: np.random.Generator) -> Any:
    """Draw one panel of a picture with matplotlib, all but what panels share.

    Args:
        ax: Where to.
        cloud: The points.
        key: Of the whole picture.
        generator: Source of randomness for the band.

    Returns:
        What a colour bar is made from, None where every group has a colour of its own.
    """
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
    """Add the scale of colours beside panels drawn with matplotlib.

    Args:
        axes: The panel, or all panels.
        scale: What `draw_panel` returned.
        key: Of the picture.
    """
    first = np.ravel(np.array(axes, dtype=object))[0]
    bar = first.figure.colorbar(scale, ax=axes, label=plain_label(key.factor), pad=0.02)
    bar.set_ticks(key.ticks(), labels=[f"{tick:.3g}" for tick in key.ticks()])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def panel_traces(cloud: Cloud, key: Key, generator: np.random.Generator) -> list[dict[str, Any]]:
    """What plotly draws of one panel.

    Args:
        cloud: The points.
        key: Of the whole picture.
        generator: Source of randomness for the band.

    Returns:
        Band, line, and the points of every group; with a ``legendgroup`` where they have a name.
    """
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
    """Points of a group, with what is told of each where one points at it."""
    places = np.flatnonzero(chosen)
    told = []
    for place in places:
        lines = [cloud.names[place]]
        if cloud.groups:
            lines.append(f"{cloud.factor}: {level_text(cloud.groups[place])}")
        told.append("<br>".join(plain_text(line) for line in lines))
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
        "text": told,
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
