"""Several spectra of one geometry on shared axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.files import json_text
from flatgauge.analysis.formatting import printable
from flatgauge.analysis.spectra.single import WIDTH, Spectrum
from flatgauge.analysis.spectra.text import CAPTION, summary, title_of
from flatgauge.estimators.density import SymlogAxis, log_grid

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

    from flatgauge.report.plots.spectra import Line


@dataclass(frozen=True, repr=False)
class Spectra(Mapping[str, Spectrum]):
    """Spectra by name, drawn over each other.

    Attributes:
        spectra: By name; all of one geometry.
    """

    spectra: Mapping[str, Spectrum]

    def __getitem__(self, name: str) -> Spectrum:
        if name not in self.spectra:
            raise KeyError(
                f"there is no spectrum of {name!r}; there are {', '.join(self.spectra)}."
            )
        return self.spectra[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.spectra)

    def __len__(self) -> int:
        return len(self.spectra)

    def __repr__(self) -> str:
        return printable(summary(self.spectra))

    @property
    def geometry(self) -> str:
        """The geometry of all of them."""
        return next(iter(self.spectra.values())).geometry

    @property
    def axis(self) -> SymlogAxis:
        """The axis they share: the finest of their own."""
        return SymlogAxis(min(item.axis.unit for item in self.values()))

    @property
    def title(self) -> str:
        """What is drawn, in a line."""
        return title_of(self.geometry)

    @property
    def caption(self) -> str:
        """What is drawn, as text."""
        return CAPTION

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader must know of any of them."""
        return tuple(f"{name}: {note}" for name, item in self.items() for note in item.notes)

    def lines(self) -> list[Line]:
        """The curves to draw, on one grid of one axis.

        Returns:
            One per spectrum.
        """
        axis = self.axis
        places = log_grid([item.density for item in self.values()], axis, WIDTH)
        return [item.line(name, axis, places) for name, item in self.items()]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw them with matplotlib.

        Args:
            ax: Where; a figure of its own by default.

        Returns:
            The axes.
        """
        from flatgauge.report.plots.spectra import plot_lines

        return plot_lines(self.lines(), self.axis, title=self.title, ax=ax)

    def figure(self) -> Figure:
        """Draw them with plotly.

        Returns:
            The figure, for light and dark pages.
        """
        from flatgauge.report.plots.spectra import figure_of_lines

        return figure_of_lines(self.lines(), self.axis)

    def to_frame(self) -> pd.DataFrame:
        """The curves: model, eigenvalue, eigenvalues per decade there, their standard error.

        Returns:
            One row per model and point of the shared grid.
        """
        import pandas as pd

        return pd.concat(
            [
                pd.DataFrame(
                    {
                        "model": line.name,
                        "eigenvalue": line.eigenvalues,
                        "per_decade": line.values,
                        "stderr": line.stderr,
                    }
                )
                for line in self.lines()
            ],
            ignore_index=True,
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts.

        Returns:
            The geometry, and the contents of every spectrum by name.
        """
        return {
            "geometry": self.geometry,
            "spectra": {name: item.to_dict() for name, item in self.items()},
        }

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
