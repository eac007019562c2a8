"""Costs as bars: a panel per workload, a group per quantity, a colour per tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatgauge.cli.benchmarks.row import LIMIT, OWN, TimingRow
from flatgauge.report.plots.colours import colour
from flatgauge.report.plots.forms import write_picture

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

#: By the first word of a verdict.
_MARKS = {"met:": "✓", "missed": "✗"}


def draw(rows: Sequence[TimingRow], path: str | Path) -> None:
    """Draw the costs in gradients; series and other units are left out.

    Args:
        rows: The lines.
        path: Where to; the ending says in what form.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if not row.setting and row.unit == "G"]
    if not shown:  # All have failed, which was told.
        return
    panels = {name: _groups(shown, name) for name in dict.fromkeys(row.workload for row in shown)}
    columns = min(len(panels), 2)
    sizes = [
        sum(len(group) for group in groups.values()) + _GAP * len(groups)
        for groups in panels.values()
    ]
    heights = [max(sizes[start : start + columns]) for start in range(0, len(sizes), columns)]
    inches = 1.3 + _INCHES * sum(heights) + 0.6 * len(heights)
    figure = Figure(figsize=(1.5 + 7.5 * columns, inches))
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.1)
    grid = figure.subplots(
        *(len(heights), columns), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    ends = min(0.8, *(0.8 * row.cost for row in shown)), 2.5 * max(row.cost for row in shown)
    for ax in grid.flat[len(panels) :]:
        ax.remove()
    for ax, (name, groups) in zip(grid.flat, panels.items(), strict=False):
        _panel(ax, name, groups)
        ax.set_xlim(*ends)
    figure.supxlabel(
        "cost in gradients over the same data; shorter is better; ✓ target met, ✗ missed",
        fontsize=10,
    )
    figure.legend(handles=_legend(shown), loc="outside upper center", ncols=6, frameon=False)
    write_picture(path, figure, dpi=150)


def _groups(rows: Sequence[TimingRow], workload: str) -> dict[str, list[TimingRow]]:
    """The lines of a workload, by quantity."""
    found: dict[str, list[TimingRow]] = {}
    for row in rows:
        if row.workload == workload:
            found.setdefault(row.quantity, []).append(row)
    return found


def _panel(ax: Axes, name: str, groups: dict[str, list[TimingRow]]) -> None:
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
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_yticks(places, labels, fontsize=8)
    ax.set_ylim(place - _GAP - 0.3, -1.0)
    ax.tick_params(axis="y", length=0)
    ax.set_title(name, loc="left", fontsize=11, fontweight="bold")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", which="major", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)


def _bar(ax: Axes, place: float, row: TimingRow) -> None:
    """One bar with its number, error and verdict; a limit is a mark without a bar."""
    text = f"{row.cost:.3g}"
    if row.error is not None and row.error > 1e-3:
        text += f"  error {row.error:.0e}"
    if row.verdict:
        verdicts = row.verdict.split("; ")
        text += "  " + " ".join(_MARKS.get(verdict.split()[0], "") for verdict in verdicts)
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


def _legend(rows: Sequence[TimingRow]) -> list[object]:
    """A patch for every package that is there."""
    from matplotlib.patches import Patch

    there = [name for name in _PACKAGES if any(row.tool.startswith(name) for row in rows)]
    return [Patch(color=_colour(name), label=name) for name in there]
