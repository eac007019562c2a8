"""A comparison: the reports of several models, and which of them is flatter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.measures import GROUPS, registry
from flatgauge.printable import printable
from flatgauge.report.agreement import Agreement
from flatgauge.report.comparison_table import comparison_text
from flatgauge.report.difference_table import DifferenceRow, difference_rows, read_pairs
from flatgauge.report.json_text import json_text, numbers, plain, read_json
from flatgauge.report.mismatches import notes_of, uneven_options, warnings_of
from flatgauge.report.pairs import LEVEL, Pairs, pairs_of
from flatgauge.report.ranks import ranked, rounding_of
from flatgauge.report.report import Report
from flatgauge.report.table import kind

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: What a measure must not see for its ranks to mean anything between networks.
RESCALING = "nodewise"


@dataclass(frozen=True, repr=False)
class Comparison(Mapping[str, Report]):
    """Reports by the name of their model, ranked measure by measure.

    It can be made of reports that were measured apart, too:
    ``Comparison({"a": Report.from_json("a.json"), "b": Report.from_json("b.json")})``.

    Attributes:
        reports: By name of the model.
        remarks: What was seen while they were measured.
        complete: Whether every model is there with all that was asked for.
        pairs: How far other samples would move the differences of models, by measure and models;
            None reads it from the shares of single samples, as far as the reports hold them.
    """

    reports: Mapping[str, Report]
    remarks: tuple[str, ...] = ()
    complete: bool = True
    pairs: Pairs | None = None

    def __getitem__(self, name: str) -> Report:
        if name not in self.reports:
            raise KeyError(f"`{name}` was not compared; there are {', '.join(self.reports)}.")
        return self.reports[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    def __repr__(self) -> str:
        return printable(comparison_text(self))

    @property
    def measures(self) -> tuple[str, ...]:
        """Every measure that was taken of any model, in order."""
        return tuple(dict.fromkeys(name for report in self.values() for name in report))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the comparison meaningless, or that of some measures."""
        return (*warnings_of(self.reports), *self.remarks)

    @property
    def notes(self) -> tuple[str, ...]:
        """In what the runs differ, so that numbers stand beside each other with care."""
        return (*self.warnings, *notes_of(self.reports))

    @cached_property
    def _errors(self) -> Pairs:
        """How far other samples would move the differences."""
        return pairs_of(self.reports) if self.pairs is None else self.pairs

    def difference_rows(self, level: float = LEVEL) -> list[DifferenceRow]:
        """Every two models subtracted, measure by measure; `differences` has them as a frame."""
        return difference_rows(self.reports, self._errors, level=level)

    def differences(self, *, level: float = LEVEL) -> pd.DataFrame:
        """Which of two models is flatter, and can that be trusted?

        Both models are measured on the same samples, and a sample that is hard for one is hard for
        the other: the difference of their shares varies less than either, so a difference is known
        better than the values are. Where a measure keeps every sample's share (kind ``paired``),
        the interval is for other samples of the same kind; else it is that of both errors
        (``unpaired``), or holds for the samples given only (``these samples``).

        Args:
            level: How surely an interval is to hold the difference, each for itself.

        Returns:
            A frame, one row per measure and two models: measure, first, second, difference (first
            minus second: negative where the first is flatter), stderr, low, high, p, kind, flatter
            (the model's name; missing where the interval covers zero), data_stderr, samples.
        """
        import pandas as pd

        rows = [row.to_dict() for row in self.difference_rows(level)]
        return pd.DataFrame(rows, columns=None if rows else ["measure", "first", "second"])

    def ranking(self, measure: str) -> pd.DataFrame:
        """The models by one measure, flattest first.

        Args:
            measure: Its name.

        Returns:
            A frame with the index ``model`` and the columns rank, value, error and kind. The
            rank is one more than the number of models that are flatter: the interval of the paired
            difference lies below zero, or, where samples cannot be paired, the values are more than
            twice their combined error apart (standard error and solver's bound). So models that
            cannot be told apart share it. A model whose measure failed comes last and has no rank;
            where the models were measured at different radii, none has.
        """
        import pandas as pd

        ranks = self.ranks_of(measure)
        found = {model: self[model].get(measure) for model in ranks}
        rows = {
            "rank": pd.array(list(ranks.values()), dtype="Int64"),
            "value": [float("nan") if e is None else e.value for e in found.values()],
            "error": [float("nan") if e is None else e.error for e in found.values()],
            "kind": ["not measured" if e is None else kind(e) for e in found.values()],
        }
        return pd.DataFrame(rows, index=pd.Index(list(ranks), name="model"))

    def ranks(self) -> pd.DataFrame:
        """The rank of every model by every measure; see `ranking`.

        Returns:
            A frame, measures × models: 1 is flattest, missing where the measure failed or the
            values cannot be compared.
        """
        import pandas as pd

        rows = {measure: self.ranks_of(measure) for measure in self.measures}
        frame = pd.DataFrame.from_dict(rows, orient="index", columns=list(self))
        return frame.astype("Int64").rename_axis("measure").rename_axis("model", axis=1)

    def ranks_of(self, measure: str) -> dict[str, int | None]:
        """The ranks by one measure, flattest first; see `ranking`.

        Args:
            measure: Its name.

        Returns:
            By model; None where it failed, was not taken, or cannot be compared.

        Raises:
            KeyError: If no model was measured by it.
        """
        if measure not in self.measures:
            raise KeyError(f"`{measure}` was not measured; there are {', '.join(self.measures)}.")
        if measure in uneven_options(self.reports):
            return dict.fromkeys(self)
        taken = {model: report[measure] for model, report in self.items() if measure in report}
        rounding = max(rounding_of(report.facts.dtype) for report in self.values())
        ranks = ranked(taken, errors=self._errors.get(measure), rounding=rounding)
        return ranks | {model: None for model in self if model not in ranks}

    def invariant_to(self, measure: str) -> tuple[str, ...]:
        """What a measure claims not to see, with the options it was taken with.

        Args:
            measure: Its name.

        Returns:
            Groups of rewritings, see `flatgauge.measures.GROUPS`; none for an unknown measure.
        """
        if measure not in registry:
            return ()
        options = [report[measure].options for report in self.values() if measure in report]
        claims = [registry[measure].claims(chosen) for chosen in options]
        return tuple(group for group in GROUPS if claims and all(group in c for c in claims))

    def agreement(self) -> Agreement:
        """Whether the measures of flatness that no rescaling of units can move agree.

        Returns:
            Counts, and Kendall's W for four and more models. Measures of capacity
            (`path_norm`), measures that failed for a model, and measures taken at different
            radii do not count.
        """
        ranks = {
            measure: self.ranks_of(measure)
            for measure in self.measures
            if RESCALING in self.invariant_to(measure) and registry[measure].votes
        }
        whole = {
            measure: {model: rank for model, rank in found.items() if rank is not None}
            for measure, found in ranks.items()
            if None not in found.values()
        }
        return Agreement(whole, tuple(self))

    @property
    def verdict(self) -> str:
        """Which model is flattest by the invariant measures, in a sentence."""
        return self.agreement().verdict()

    def to_frame(self) -> pd.DataFrame:
        """Every number, one row per measure and model.

        ``to_frame()["value"].unstack("model")`` is the table of values, measures × models.

        Returns:
            A frame with the index (measure, model), the columns of `Report.to_frame`, the rank,
            and what the measure is invariant to.
        """
        import pandas as pd

        frames = {model: report.to_frame() for model, report in self.items()}
        frame = pd.concat(frames, names=["model"]).swaplevel()
        frame = frame.loc[[(m, n) for m in self.measures for n in self if m in self[n]]]
        ranks = {measure: self.ranks_of(measure) for measure in self.measures}
        column = pd.Series([ranks[m][n] for m, n in frame.index], frame.index, dtype="Int64")
        frame.insert(1, "rank", column)
        claims = {measure: ", ".join(self.invariant_to(measure)) for measure in self.measures}
        frame["invariant_to"] = [claims[measure] for measure, _ in frame.index]
        return frame

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts.

        Returns:
            The models' reports, ranks, claims, agreement, differences and notes.
        """
        contents: dict[str, Any] = plain(
            {
                "complete": self.complete,
                "verdict": self.verdict,
                "ranks": {measure: self.ranks_of(measure) for measure in self.measures},
                "invariant_to": {measure: self.invariant_to(measure) for measure in self.measures},
                "agreement": self.agreement().to_dict(),
                "differences": [row.to_dict() for row in self.difference_rows()],
                "warnings": self.warnings,
                "notes": self.notes,
                "remarks": self.remarks,
                "models": {model: report.to_dict() for model, report in self.items()},
            }
        )
        return contents

    def to_json(self, path: str | Path | None = None) -> str:
        """The comparison as JSON.

        Args:
            path: Where to write it; None to return it only.

        Returns:
            The text.
        """
        return json_text(self.to_dict(), path)

    @classmethod
    def from_dict(cls, contents: Mapping[str, Any]) -> Comparison:
        """The comparison that `to_dict` was called on.

        Args:
            contents: What it gave.

        Returns:
            The comparison; ranks are computed anew.

        Raises:
            ValueError: If it is no comparison.
        """
        models = contents.get("models")
        if not isinstance(models, dict):
            raise ValueError(
                "this is no comparison: it has no `models`; give what `Comparison.to_json` or "
                "`flatgauge compare --save` wrote, and a single report to `Report.from_json`."
            )
        reports = {model: Report.from_dict(report) for model, report in models.items()}
        remarks = tuple(contents.get("remarks", ()))
        pairs = read_pairs(numbers(contents.get("differences", [])))
        return cls(reports, remarks, bool(contents.get("complete", True)), pairs)

    @classmethod
    def from_json(cls, path: str | Path) -> Comparison:
        """Read a comparison that was written, whole or up to an interruption.

        Args:
            path: What `to_json`, `fg.compare(..., save=)` or ``flatgauge compare`` wrote.

        Returns:
            The comparison; `complete` says whether all that was asked for is there.
        """
        return cls.from_dict(read_json(path))

    def to_html(self, path: str | Path, **extras: Any) -> Path:
        """Write the comparison as one self-contained page.

        Args:
            path: Where to.
            **extras: What else the page shows: see `flatgauge.report.page.write_page`.

        Returns:
            The path.
        """
        from flatgauge.report.page import write_page

        remarks = (*self.page_remarks(), *extras.pop("remarks", ()))
        written: Path = write_page(
            path, self.reports, remarks=remarks, pairs=self._errors, **extras
        )
        return written

    def page_remarks(self) -> tuple[str, ...]:
        """What a page says about the comparison as a whole."""
        from flatgauge.report.table import UNFINISHED

        told = (f"Warning: {text}" if text in self.warnings else text for text in self.notes)
        return (self.verdict, *told, *(() if self.complete else (UNFINISHED,)))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw every measure of every model beside the flattest one, on a log scale.

        Args:
            ax: Where to draw; None for a figure of its own.

        Returns:
            The axes. Measures with values that are zero, negative or missing have no ratio and
            are named below the picture.
        """
        from flatgauge.drawing.ratios import plot_ratios

        invariant = [m for m in self.measures if RESCALING in self.invariant_to(m)]
        others = [m for m in self.measures if m not in invariant]
        values = {
            m: [self[n][m].value if m in self[n] else float("nan") for n in self]
            for m in (*invariant, *others)
        }
        errors = {m: [self[n][m].error if m in self[n] else 0.0 for n in self] for m in values}
        return plot_ratios(values, errors, list(self), marked=invariant, ax=ax)
