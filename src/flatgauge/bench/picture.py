"""Costs as bars: a panel per workload, a group per quantity, a colour per tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatgauge.bench.row import LIMIT, OWN, Row
from flatgauge.drawing.colours import colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The space above a group, where its name stands, in bars; the height of a bar in inches.
_GAP, _INCHES = 1.5, 0.2

#: Colours of packages, by how their tools' names begin; none is a shade of flatgauge's own.
_PACKAGES = {
    OWN: colour(0),
    "PyHessian": colour(1),
    "curvlinops": colour(2),
    "hessian-eigenthings": colour(3),
    "BackPACK": colour(5),
}


def draw(rows: Sequence[Row], path: str | Path) -> None:
    """Draw the costs in gradients; series and other units are left out.

    Args:
        rows: The lines.
        path: Where to; the ending says in what form.

    Raises:
        ValueError: If there is nothing to draw.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if not row.setting and row.unit == "G"]
    if not shown:
        raise ValueError("there are no costs in gradients to draw; name another quantity.")
    panels = {name: _groups(shown, name) for name in dict.fromkeys(row.workload for row in shown)}
    heights = [
        sum(len(group) for group in groups.values()) + _GAP * len(groups)
        for groups in panels.values()
    ]
    figure = Figure(figsize=(9.5, 1.1 + _INCHES * sum(heights) + 0.5 * len(panels)))
    figure.set_layout_engine("constrained", h_pad=0.06)
    axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for ax, (name, groups) in zip(axes, panels.items(), strict=True):
        _panel(ax, name, groups)
    low = min(row.cost for row in shown)
    axes[0].set_xlim(min(0.8 * low, 0.8), 1.8 * max(row.cost for row in shown))
    axes[-1].set_xlabel("cost in gradients over the same data (logarithmic; shorter is better)")
    figure.legend(handles=_legend(shown), loc="outside upper center", ncols=6, frameon=False)
    figure.savefig(Path(path).expanduser(), dpi=150)


def _groups(rows: Sequence[Row], workload: str) -> dict[str, list[Row]]:
    """The lines of a workload, by quantity."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.workload == workload:
            found.setdefault(row.quantity, []).append(row)
    return found


def _panel(ax: Axes, name: str, groups: dict[str, list[Row]]) -> None:
    """The bars of one workload."""
    place, places, labels = _GAP - 1, [], []
    for quantity, rows in groups.items():
        ax.text(
            *(-0.01, place - 0.9, quantity),
            transform=ax.get_yaxis_transform(),
            ha="right",
            va="center",
            fontsize=9,
            fontweight="bold",
        )
        for row in rows:
            _bar(ax, place, row)
            places.append(place)
            labels.append(row.tool)
            place += 1
        place += _GAP
    ax.set_xscale("log")
    ax.set_yticks(places, labels, fontsize=8)
    ax.set_ylim(place - _GAP - 0.3, -1.0)
    ax.tick_params(axis="y", length=0)
    ax.set_title(name, loc="left", fontsize=11, fontweight="bold")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", which="major", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)


def _bar(ax: Axes, place: float, row: Row) -> None:
    """One bar with its number, error and verdict; a limit is a mark without a bar."""
    text = f"{row.cost:.3g}"
    if row.error is not None and row.error > 1e-3:
        text += f"  error {row.error:.0e}"
    if row.verdict:
        verdicts = row.verdict.split("; ")
        text += "  " + " ".join("✓" if v.startswith("met") else "✗" for v in verdicts)
    if row.tool == LIMIT:
        ax.plot([row.cost], [place], marker="|", color="#333333", markersize=9, markeredgewidth=2)
    else:
        alpha = 0.45 if row.tool.startswith(f"{OWN},") else 1.0
        ax.barh(place, row.cost, 0.8, left=0, color=_colour(row.tool), alpha=alpha)
        if row.spread is not None and row.rounds > 1:
            ax.plot(row.spread, [place, place], color="#333333", linewidth=1)
    right = row.cost if row.spread is None else row.spread[1]
    ax.annotate(
        *(text, (right, place)),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        fontweight="bold" if row.tool == OWN else "normal",
    )


def _colour(tool: str) -> str:
    """The colour of a tool's package."""
    return next((shade for name, shade in _PACKAGES.items() if tool.startswith(name)), "#999999")


def _legend(rows: Sequence[Row]) -> list[object]:
    """A patch for every package that is there."""
    from matplotlib.patches import Patch

    there = [name for name in _PACKAGES if any(row.tool.startswith(name) for row in rows)]
    return [Patch(color=_colour(name), label=name) for name in there]
