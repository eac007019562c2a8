"""A report: the estimates of one surface and the facts of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.estimators import Estimate
from flatgauge.report.json_text import json_text, plain, read_json
from flatgauge.report.reading import read_report
from flatgauge.report.run import Facts
from flatgauge.report.table import UNFINISHED, header, kind, plain_table

if TYPE_CHECKING:
    import pandas as pd


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
        text = f"{header(self.facts)}\n\n{plain_table(self.estimates)}"
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
            "measures": {name: vars(estimate) for name, estimate in self.items()},
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

    def to_html(self, path: str | Path, **extras: Any) -> Path:
        """Write the report as one self-contained page.

        Args:
            path: Where to.
            **extras: What else the page shows: see `flatgauge.report.page.write_page`.

        Returns:
            The path.
        """
        from flatgauge.report.page import write_page

        unfinished = () if self.complete else (UNFINISHED,)
        remarks = (*unfinished, *extras.pop("remarks", ()))
        written: Path = write_page(path, {self.facts.model: self}, remarks=remarks, **extras)
        return written
