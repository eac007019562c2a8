"""Where the panels of a picture stand, for plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flatgauge.report.plots.cloud import Cloud, Key, x_limits, y_limits
from flatgauge.report.plots.colours import HEIGHTS
from flatgauge.report.plots.texts import plain_text

#: Pixels: height of a panel, of one that is alone, of a line of its title, of what stands below
#: it, of a colour bar.
_PANEL, _ALONE, _LINE, _BELOW, _BAR = 220, 300, 17, 66, 58


#: Between columns, as a part of the width.
_GAP = 0.035

_SMALL = {"size": 12}
_LINES: dict[str, Any] = {
    "gridcolor": "rgba(128,128,128,0.25)",
    "zeroline": False,
    "automargin": True,
    "tickfont": {"size": 11},
}


def good_columns(count: int) -> int:
    """How many panels stand beside each other: three at most, so that they can be read.

    Args:
        count: How many there are.

    Returns:
        The number of columns.

    Example:
        >>> [good_columns(count) for count in (1, 2, 3, 4, 5, 9)]
        [1, 2, 3, 2, 3, 3]
    """
    return 2 if count == 4 else max(1, min(count, 3))


def panel_layout(clouds: Sequence[Cloud], key: Key, columns: int) -> dict[str, Any]:
    """Axes, titles, legend and height of panels in so many columns.

    Args:
        clouds: The points of every panel, row by row.
        key: Of the picture.
        columns: How many panels stand beside each other.

    Returns:
        That part of a plotly layout.
    """
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
        upwards = _upwards(cloud.target, ends, told=column == 0)
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


def _upwards(target: str, ends: tuple[float, float], *, told: bool) -> dict[str, Any]:
    """The vertical axis, the same for all panels; told at the first of a row."""
    return _LINES | {
        "range": list(ends),
        "showticklabels": told,
        "title": {"text": plain_text(target) if told else "", "font": _SMALL},
    }


def _legend(key: Key, y: float) -> dict[str, Any]:
    """One legend for all panels, above them."""
    return {
        "orientation": "h",
        "x": 0,
        "y": y,
        "yanchor": "bottom",
        "bgcolor": "rgba(0,0,0,0)",
        "title": {"text": "" if key.smooth else plain_text(key.factor), "font": _SMALL},
    }


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
