"""Costs as bars: a panel per workload, a group per quantity, a colour per package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import AGREEMENT, LIMIT, OWN, TimingRow
from flatgauge.report.plots.style import colour, write_picture

#: Colours of packages, by how their tools' names begin; none is a shade of flatgauge's own.
_PACKAGES = {
    OWN: colour(0),
    "PyHessian": colour(1),
    "curvlinops": colour(2),
    "hessian-eigenthings": colour(3),
    "torch.compile": colour(4),
    "BackPACK": colour(5),
}


def draw(rows: Sequence[TimingRow], path: str | Path) -> None:
    """Draw the costs in gradients; series are left out.

    Args:
        rows: The lines.
        path: Where to; the ending gives the format.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [row for row in rows if not row.setting]
    names = list(dict.fromkeys(row.workload for row in shown))
    if not names:  # All have failed, which was logged.
        return
    panels = [[row for row in shown if row.workload == name] for name in names]
    heights = [len(panel) for panel in panels]
    figure = Figure(figsize=(9, 1.5 + 0.22 * sum(heights) + 0.6 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    for ax, name, panel in zip(axes, names, panels, strict=True):
        for place, row in enumerate(panel):
            bold = "bold" if row.tool == OWN else "normal"
            if row.tool == LIMIT:
                ax.plot(row.cost, place, marker="|", color="#333333", markersize=9)
            else:
                alpha = 0.45 if row.tool.startswith(f"{OWN},") else 1.0
                ax.barh(place, row.cost, 0.8, color=_shade(row.tool), alpha=alpha)
            ends = row.spread or (row.cost, row.cost)
            ax.plot(ends, [place, place], color="#333333", linewidth=1)
            position = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            ax.annotate(_label(row), (ends[1], place), fontsize=8, fontweight=bold, **position)
        ax.set_xscale("log")
        ax.set_yticks(range(len(panel)), [f"{r.quantity}: {r.tool}" for r in panel], fontsize=8)
        ax.invert_yaxis()
        ax.margins(x=0.3, y=0.02)
        ax.set_title(name, loc="left", fontweight="bold")
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("cost in gradients over the same data; ✓ target met, ✗ missed")
    there = [name for name in _PACKAGES if any(row.tool.startswith(name) for row in shown)]
    handles = [Patch(color=_PACKAGES[name], label=name) for name in there]
    figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False)
    write_picture(path, figure, dpi=150)


def _label(row: TimingRow) -> str:
    """The cost, the error if it is large, and a mark for every verdict."""
    error = f"  error {row.error:.0e}" if row.error and row.error > AGREEMENT else ""
    marks = {"met:": "✓", "missed": "✗"}
    verdicts = [verdict.split()[0] for verdict in row.verdict.split("; ") if verdict]
    return f"{row.cost:.3g}{error}  {' '.join(marks.get(word, '') for word in verdicts)}"


def _shade(tool: str) -> str:
    """The colour of a tool's package."""
    return next((shade for name, shade in _PACKAGES.items() if tool.startswith(name)), "#999999")
