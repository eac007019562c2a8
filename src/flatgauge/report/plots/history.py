"""How numbers go over the steps of a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flatgauge.report.plots.style import colour, dashes, new_axes, plain_label, shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_history(
    steps: Sequence[int],
    courses: Mapping[str, Sequence[float]],
    *,
    label: str,
    marked: Sequence[int] = (),
    ax: Axes | None = None,
) -> Axes:
    """Draw a line with points for every course.

    Args:
        steps: Where the numbers were taken.
        courses: The numbers, one per step; what is not finite is left out.
        label: Of the vertical axis.
        marked: Steps at which the training diverged.
        ax: Where to draw; None for a new figure.

    Returns:
        The axes, logarithmic if all numbers are positive.
    """
    ax = new_axes(6.4, 3.6, ax)
    finite = [value for values in courses.values() for value in values if math.isfinite(value)]
    for number, (course, values) in enumerate(courses.items()):
        shown = [value if math.isfinite(value) else math.nan for value in values]
        ax.plot(
            steps,
            shown,
            color=colour(number),
            linestyle=dashes(number)[0],
            marker=shape(number)[0],
            markersize=4,
            linewidth=1.6,
            label=plain_label(course),
        )
    for place, step in enumerate(marked):
        name = "diverged" if place == 0 else None
        ax.axvline(step, color="grey", linewidth=1.2, linestyle=":", label=name)
    if finite and min(finite) > 0:
        ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel(plain_label(label))
    if courses or marked:
        ax.legend(frameon=False, fontsize="small")
    return ax
