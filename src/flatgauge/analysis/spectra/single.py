"""One spectrum: a density, its extreme eigenvalues, its trace, each with its error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.analysis.files import json_text, to_plain
from flatgauge.analysis.formatting import printable
from flatgauge.analysis.spectra.text import CAPTION, summary, title_of
from flatgauge.estimators.density import (
    Array,
    SpectralDensity,
    SymlogAxis,
    log_density,
    log_grid,
    resolution,
    share_between,
    symlog_axis,
)
from flatgauge.estimators.estimate import Estimate

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

    from flatgauge.analysis.measurement import RunInfo
    from flatgauge.report.plots.spectra import Line

#: Least width of the bells that curves are made of, in decades.
WIDTH = 0.06


@dataclass(frozen=True, repr=False)
class Spectrum:
    """How the eigenvalues of the loss's curvature are spread, in one geometry.

    Attributes:
        geometry: The geometry.
        density: Nodes and weights of all probes.
        top: The largest eigenvalues, falling, each with a bound on its error.
        facts: What was measured, and how.
        matvecs: Hessian-vector products spent.
        options: The settings that it depends on.
        notes: What the reader must know.
        seconds: Wall-clock time.
    """

    geometry: str
    density: SpectralDensity
    top: tuple[Estimate, ...]
    facts: RunInfo
    matvecs: int
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def size(self) -> int:
        """The number of eigenvalues: of coordinates that take part."""
        return self.density.size

    @property
    def trace(self) -> Estimate:
        """The sum of all eigenvalues, from the first moment, with its standard error."""
        mean = self.density.mean
        return Estimate(
            self.size * mean.value, stderr=self.size * mean.stderr, matvecs=mean.matvecs
        )

    @property
    def smallest(self) -> Estimate:
        """The most negative node: one eigenvalue lies within its bound, and none need lie above.

        An inner estimate: the smallest eigenvalue of all lies at or below it.
        """
        nodes, residuals = self.density.nodes.reshape(-1), self.density.residuals.reshape(-1)
        where = int(nodes.argmin())
        bound = max(float(residuals[where]), self.density.rounding)
        return Estimate(float(nodes[where]), bound=bound, matvecs=self.density.matvecs)

    @cached_property
    def resolution(self) -> float:
        """Eigenvalues nearer to zero than this look like zero after that many steps."""
        return resolution(self.density)

    @property
    def negative(self) -> Estimate:
        """The share of eigenvalues that are surely negative: below minus the resolution."""
        return self.share(-math.inf, math.nextafter(-self.resolution, -math.inf))

    @property
    def near_zero(self) -> Estimate:
        """The share of eigenvalues within the resolution of zero."""
        return self.share(-self.resolution, self.resolution)

    def share(self, low: float, high: float) -> Estimate:
        """The share of eigenvalues in an interval.

        Args:
            low: Lower end, included; -inf for none.
            high: Upper end, included; inf for none.

        Returns:
            The share with its standard error, and a bound on what the quadrature may be off.
        """
        return share_between(self.density, low, high)

    @cached_property
    def axis(self) -> SymlogAxis:
        """The axis to draw it on: logarithmic for both signs, linear about zero."""
        return symlog_axis(self.density)

    def line(
        self, name: str = "", axis: SymlogAxis | None = None, places: Array | None = None
    ) -> Line:
        """The curve to draw, with its marks.

        Args:
            name: What it is called; empty if it stands alone.
            axis: The axis; its own by default.
            places: Where on the axis, in decades; by default as far as the curve goes.

        Returns:
            Eigenvalues per decade along the axis, with their standard error.
        """
        from flatgauge.report.plots.spectra import Line

        axis = axis or self.axis
        places = log_grid([self.density], axis, WIDTH) if places is None else places
        curve = log_density(self.density, axis, places, width=WIDTH)
        return Line(
            name=name,
            places=places,
            eigenvalues=axis.value(places),
            values=curve.values.numpy(),
            stderr=curve.stderr.numpy(),
            top=np.array([item.value for item in self.top]),
            bounds=np.array([item.error for item in self.top]),
            smallest=self.smallest.value,
            resolution=self.resolution,
            single=1 / (WIDTH * math.sqrt(2 * math.pi)),
        )

    @property
    def title(self) -> str:
        """What is drawn, in a line."""
        return title_of(self.geometry)

    @property
    def caption(self) -> str:
        """What is drawn, as text."""
        return CAPTION

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw it with matplotlib.

        Args:
            ax: Where; a figure of its own by default.

        Returns:
            The axes.
        """
        from flatgauge.report.plots.spectra import plot_lines

        return plot_lines([self.line()], self.axis, title=self.title, ax=ax)

    def figure(self) -> Figure:
        """Draw it with plotly.

        Returns:
            The figure, for light and dark pages.
        """
        from flatgauge.report.plots.spectra import figure_of_lines

        return figure_of_lines([self.line()], self.axis)

    def to_frame(self) -> pd.DataFrame:
        """The curve: eigenvalue, eigenvalues per decade there, and their standard error.

        Returns:
            One row per point of the curve.
        """
        import pandas as pd

        line = self.line()
        return pd.DataFrame(
            {"eigenvalue": line.eigenvalues, "per_decade": line.values, "stderr": line.stderr}
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts.

        Returns:
            The contents. Numbers that JSON cannot hold are written as "inf", "nan".
        """
        parts: dict[str, Any] = {"size": self.size, "resolution": self.resolution}
        for name in ("trace", "smallest", "negative", "near_zero"):
            parts[name] = _brief(getattr(self, name))
        line = self.line()
        found: dict[str, Any] = to_plain(
            {"geometry": self.geometry, "facts": asdict(self.facts)}
            | parts
            | {
                "top": [_brief(item) | {"converged": item.converged} for item in self.top],
                "matvecs": self.matvecs,
                "options": self.options,
                "notes": self.notes,
                "seconds": self.seconds,
                "nodes": self.density.nodes,
                "weights": self.density.weights,
                "residuals": self.density.residuals,
                "curve": {
                    "eigenvalue": line.eigenvalues.tolist(),
                    "per_decade": line.values.tolist(),
                    "stderr": line.stderr.tolist(),
                },
            }
        )
        return found

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything as JSON.

        Args:
            path: Where to write it; None to return it only.

        Returns:
            The text.
        """
        return json_text(self.to_dict(), path)

    def to_html(self, path: str | Path) -> Path:
        """Write a page with the picture and the numbers: one file, with nothing from outside.

        Args:
            path: Where.

        Returns:
            The path.
        """
        from flatgauge.report.plots.standalone import write_figure

        return write_figure(
            path, self.figure(), title=self.title, caption=self.caption, text=repr(self)
        )

    def __repr__(self) -> str:
        return printable(summary({"": self}))


def _brief(estimate: Estimate) -> dict[str, float | None]:
    """A number and its errors."""
    return {"value": estimate.value, "stderr": estimate.stderr, "bound": estimate.bound}
