"""A report: the estimates of one surface and the facts of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.estimators import Estimate
from flatgauge.printable import printable
from flatgauge.report.json_text import json_text, plain, read_json
from flatgauge.report.reading import read_report
from flatgauge.report.run import Facts
from flatgauge.report.table import UNFINISHED, header, kind, plain_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from flatgauge.report.certificate import Certificate
    from flatgauge.report.drawable import Drawable
    from flatgauge.symmetry import GaugeGroup


@dataclass(frozen=True, repr=False)
class Report(Mapping[str, Estimate]):
    """Estimates by the name of their measure, and the facts of the run.

    Attributes:
        estimates: By name of the measure.
        facts: What was measured, and how.
        complete: Whether all that was asked for is there; not if the run was interrupted.
    """

    estimates: Mapping[str, Estimate]
    facts: Facts
    complete: bool = True

    def __getitem__(self, name: str) -> Estimate:
        if name not in self.estimates:
            raise KeyError(
                f"`{name}` was not measured; this report has {', '.join(self.estimates)}."
            )
        return self.estimates[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.estimates)

    def __len__(self) -> int:
        return len(self.estimates)

    def __repr__(self) -> str:
        text = printable(f"{header(self.facts)}\n\n{plain_table(self.estimates)}")
        return text if self.complete else f"{text}\n{UNFINISHED}"

    def to_frame(self) -> pd.DataFrame:
        """The estimates as a table, one row per measure.

        Returns:
            A frame with the index ``measure``.
        """
        import pandas as pd

        columns = ("value", "stderr", "data_stderr", "bound", "exact", "converged", "matvecs")
        rows = {
            name: {"value": estimate.value, "kind": kind(estimate)}
            | {column: getattr(estimate, column) for column in (*columns, "seconds")}
            | {"notes": "; ".join(estimate.notes)}
            for name, estimate in self.items()
        }
        frame = pd.DataFrame.from_dict(rows, orient="index")
        return frame.rename_axis("measure")

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report as plain numbers, strings, lists and dicts.

        Returns:
            Facts and estimates. Numbers that JSON cannot hold are written as "inf", "nan".
        """
        contents = {
            "complete": self.complete,
            "facts": asdict(self.facts),
            "measures": {name: _written(estimate) for name, estimate in self.items()},
        }
        found = plain(contents)
        assert isinstance(found, dict)
        return found

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON.

        Args:
            path: Where to write it; None to return it only.

        Returns:
            The text.
        """
        return json_text(self.to_dict(), path)

    @classmethod
    def from_dict(cls, contents: Mapping[str, Any]) -> Report:
        """The report that `to_dict` was called on.

        Args:
            contents: What it gave.

        Returns:
            The report.
        """
        return cls(*read_report(contents))

    @classmethod
    def from_json(cls, path: str | Path) -> Report:
        """Read a report that was written, whole or up to an interruption.

        Args:
            path: What `to_json`, `fg.measure(..., save=)` or ``flatgauge measure`` wrote.

        Returns:
            The report; `complete` says whether all that was asked for is there.
        """
        return cls.from_dict(read_json(path))

    def to_html(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        title: str | None = None,
        certificates: Mapping[str, Certificate] = {},
        gauges: Mapping[str, GaugeGroup] = {},
        spectra: Sequence[Drawable] = (),
        landscapes: Sequence[Drawable] = (),
        command: str | None = None,
        remarks: Sequence[str] = (),
    ) -> Path:
        """The report as one self-contained page: tables, pictures, provenance, a glossary.

        The page asks the network for nothing, and holds the same numbers as `to_json`.
        `flatgauge.report.page.write_page` writes one for several models.

        Args:
            path: Where to write it; an existing file is replaced.
            name: What the model is called there; None for its class.
            title: Of the page; None for the name of the model.
            certificates: What `fg.certify` has shown, by name.
            gauges: What `fg.find_gauge` has found, by name.
            spectra: Pictures of spectra.
            landscapes: Pictures of landscapes.
            command: The command line that the report came from.
            remarks: Further sentences for the top of the page.

        Returns:
            The path.
        """
        from flatgauge.report.page import write_page

        return write_page(
            path,
            {name or self.facts.model: self},
            title=title,
            certificates=certificates,
            gauges=gauges,
            spectra=spectra,
            landscapes=landscapes,
            command=command,
            remarks=(*(() if self.complete else (UNFINISHED,)), *remarks),
        )

    def plot(self, ax: Axes | None = None, *, measure: str | None = None) -> Axes:
        """Draw bars: the values of a measure layer by layer, or all measures beside each other.

        Args:
            ax: Where to draw; None for a new figure.
            measure: Whose layers to draw; None for all measures, on a logarithmic axis.

        Returns:
            The axes.

        Raises:
            ValueError: If the measure has no values of layers.
            KeyError: If it was not measured.
        """
        from flatgauge.drawing.bars import bars_axes
        from flatgauge.report.layer_bars import labelled_axis

        if measure is not None:
            layers = self[measure].layers
            if not layers:
                having = ", ".join(name for name, e in self.items() if e.layers) or "none"
                raise ValueError(
                    f"`{measure}` has no values of layers; the measures that have are {having}."
                )
            series = {self.facts.model: list(layers.values())}
            return bars_axes(list(layers), series, label=labelled_axis(measure), ax=ax)
        # What a logarithmic axis cannot show is named without a bar.
        shown = [e.value if 0 < e.value < math.inf else math.nan for e in self.values()]
        label = f"{self.facts.model}, lower is flatter"
        return bars_axes(list(self), {self.facts.model: shown}, label=label, log=True, ax=ax)


def _written(estimate: Estimate) -> dict[str, Any]:
    """What is written of an estimate: all but the shares of single samples."""
    return {name: value for name, value in vars(estimate).items() if name != "samples"}
