"""Several models by several measures: how many times the flattest one's value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flatgauge.report.plots.colours import colour
from flatgauge.report.plots.texts import plain_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_ratios(
    values: Mapping[str, Sequence[float]],
    errors: Mapping[str, Sequence[float]],
    models: Sequence[str],
    *,
    marked: Sequence[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """Draw a dot for every model and measure, at its value over the smallest of the models'.

    Args:
        values: By measure, one for every model.
        errors: How far they may be off, alike.
        models: Their names.
        marked: Measures whose names are written in bold.
        ax: Where to draw; None for a figure of its own.

    Returns:
        The axes.
    """
    shown = [name for name, row in values.items() if all(0 < v < math.inf for v in row)]
    if ax is None:
        from matplotlib import pyplot

        height = 1.6 + 0.24 * max(len(shown), 4)
        _, ax = pyplot.subplots(figsize=(7.2, height), layout="constrained")
    places = range(len(shown))
    for number, model in enumerate(models):
        smallest = [min(values[name]) for name in shown]
        ratios = [values[n][number] / least for n, least in zip(shown, smallest, strict=True)]
        bars = [errors[n][number] / least for n, least in zip(shown, smallest, strict=True)]
        # An error that reaches below zero has no place on a log scale.
        below = [min(bar, 0.9 * ratio) for bar, ratio in zip(bars, ratios, strict=True)]
        ax.errorbar(
            ratios,
            places,
            xerr=[below, bars],
            fmt="o",
            markersize=5,
            elinewidth=1,
            color=colour(number),
            label=plain_label(model),
        )
    ax.set_xscale("log")
    ax.set_yticks(places, shown)
    for label in ax.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() in marked else "normal")
    ax.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    ax.grid(True, axis="x", alpha=0.3)
    missing = [name for name in values if name not in shown]
    ax.set_xlabel("times the flattest" + _told(missing))
    if shown and len(models) > 1:
        ax.legend(frameon=False, fontsize="small")
    return ax


def _told(missing: Sequence[str]) -> str:
    return f"\nno ratio: {', '.join(missing)}" if missing else ""
