"""What a study found: one row per network, correlations, and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.studies.preparing import prepare
from flatgauge.studies.recipe import FIELDS
from flatgauge.studies.running import stored_network, surface_of
from flatgauge.studies.store import Store
from flatgauge.studies.study import Study
from flatgauge.studies.training import REACHED
from flatgauge.surface.surface import LossSurface

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Findings:
    """The rows of a study, and what can be read from them.

    Attributes:
        study: What was studied.
        rows: What is finished, by run.
        store: The folder.
        data: Where data sets are that are read from files.
    """

    study: Study
    rows: Mapping[str, Mapping[str, Any]]
    store: Store
    data: str | None = None

    @classmethod
    def of(cls, study: Study, store: Store, data: str | None = None) -> Findings:
        """Read what is finished.

        Args:
            study: The study.
            store: Its folder.
            data: Where data sets are.

        Returns:
            The findings.
        """
        found = {run: store.row(run) for run in study.runs()}
        return cls(study, {run: row for run, row in found.items() if row is not None}, store, data)

    @classmethod
    def read(cls, folder: str | Path, *, data: str | Path | None = None) -> Findings:
        """Read what is finished in a study's folder.

        Args:
            folder: What `Study.run` or ``flatgauge study`` wrote.
            data: Where data sets are; only for `surface`.

        Returns:
            The findings.
        """
        store = Store(folder)
        study = Study.from_dict(store.declaration())
        return cls.of(study, store, None if data is None else str(data))

    def to_frame(self) -> pd.DataFrame:
        """The networks, one row each: recipe, training, and every measure.

        Returns:
            A frame with the index ``run``. ``state`` says whether training reached its goal.
        """
        return self._frame("measured")

    def rescaled_frame(self) -> pd.DataFrame | None:
        """The same with the measures of the rescaled networks.

        Returns:
            A frame like `to_frame`; None if none was rescaled.
        """
        if not any(row["rescaled"] for row in self.rows.values()):
            return None
        return self._frame("rescaled")

    def layer_frame(self) -> pd.DataFrame:
        """The values of single layers, where a measure has them.

        Returns:
            A frame with columns ``run, measure, layer, value``.
        """
        import pandas as pd

        found = [
            (run, name, layer, value)
            for run, row in self.rows.items()
            for name, entry in (row["measured"] or {"measures": {}})["measures"].items()
            for layer, value in entry["layers"].items()
        ]
        return pd.DataFrame(found, columns=["run", "measure", "layer", "value"])

    @cached_property
    def counted(self) -> pd.DataFrame:
        """The networks that enter statistics: those whose training reached its goal."""
        frame = self.to_frame()
        return frame[frame["state"] == REACHED]

    @property
    def measures(self) -> list[str]:
        """The names of all measures."""
        return list(self.study.declaration()["measures"])

    @cached_property
    def correlations(self) -> pd.DataFrame:
        """How well every measure follows the target: see `flatgauge.studies.statistics`."""
        from flatgauge.studies.statistics import correlation_table

        return correlation_table(
            self.counted,
            measures=self.measures,
            target=self.study.target,
            factors=self.study.factor_names,
            confounders=self.confounders,
        )

    @cached_property
    def before_after(self) -> pd.DataFrame | None:
        """The same before and after all networks were rescaled; None if none was."""
        from flatgauge.studies.statistics import before_after_table

        rescaled = self.rescaled_frame()
        if rescaled is None:
            return None
        return before_after_table(
            self.counted,
            rescaled.loc[self.counted.index],
            measures=self.measures,
            target=self.study.target,
        )

    def cells(self) -> pd.DataFrame:
        """Mean and standard deviation over the seeds of every kind of network.

        Returns:
            A frame with one row per combination of factors.
        """
        shown = ["train_loss", "train_accuracy", "test_accuracy", self.study.target, *self.measures]
        grouped = self.counted.groupby(self.study.factor_names, sort=False, dropna=False)
        found = grouped[list(dict.fromkeys(shown))].agg(["mean", "std"])
        found.insert(0, ("networks", ""), grouped.size())
        return found

    def beside_published(self) -> pd.DataFrame:
        """The paper's numbers and ours.

        Returns:
            A frame with columns ``source, what, published, ours``.
        """
        import pandas as pd

        frame, rescaled = self._with_layers(self.counted), self.rescaled_frame()
        rescaled = None if rescaled is None else rescaled.loc[frame.index]
        found = [
            (one.source, one.what, one.published, one.ours(frame, rescaled, self.study.target))
            for one in self.study.published
        ]
        return pd.DataFrame(found, columns=["source", "what", "published", "ours"])

    def surface(self, run: str) -> LossSurface:
        """The training loss of a finished network, to be measured or drawn in other ways.

        Args:
            run: Its name: an index of `to_frame`.

        Returns:
            The surface.

        Raises:
            KeyError: If there is no such run.
        """
        if run not in self.rows:
            raise KeyError(
                f"`{run}` is no finished run; there are {', '.join(self.rows) or 'none'}."
            )
        recipe = self.study.runs()[run]
        prepared = prepare(recipe, self.data)
        return surface_of(self.study, stored_network(recipe, prepared, run, self.store), prepared)

    @cached_property
    def layer_correlations(self) -> pd.DataFrame:
        """How well every layer's part of a measure follows the target, by measure and layer."""
        import pandas as pd

        from flatgauge.studies.statistics import correlation_table

        layers = self.layer_frame()
        pairs = list(dict.fromkeys(zip(layers["measure"], layers["layer"], strict=True)))
        names = {_label(measure, layer): (measure, layer) for measure, layer in pairs}
        if not names:
            return pd.DataFrame()
        found = correlation_table(
            self._with_layers(self.counted),
            measures=list(names),
            target=self.study.target,
            factors=self.study.factor_names,
        )
        found.index = pd.MultiIndex.from_tuples(names.values(), names=["measure", "layer"])
        return found

    def to_html(self, path: str | Path, *, command: str | None = None) -> Path:
        """The study as one self-contained page.

        Args:
            path: Where to write it; an existing file is replaced.
            command: The command line that repeats the study.

        Returns:
            The path.
        """
        from flatgauge.report.findings_page import write_findings

        return write_findings(self, path, command=command)

    def write(self, *, command: str | None = None) -> Path:
        """Write tables (CSV) and the page (``report.html``) into the study's folder.

        Args:
            command: The command line that repeats the study.

        Returns:
            The page.

        Raises:
            ValueError: If no network counts.
        """
        from flatgauge.report.findings_page import write_results, write_tables

        write_results(self)
        if self.counted.empty:
            raise ValueError(
                f"`{self.store.folder}` has no network that counts, so there is nothing to report; "
                "`results.csv` in it says how training went. Resume the study if it is not done, "
                "or declare it with goals that can be reached."
            )
        write_tables(self)
        return self.to_html(self.store.folder / "report.html", command=command)

    def plot(self, measures: Sequence[str] | None = None) -> Figure:
        """Draw measures against the target, one panel each.

        Args:
            measures: Which; None for all.

        Returns:
            A matplotlib figure.
        """
        from flatgauge.report.findings_pictures import plot_measures

        return plot_measures(self, measures or self.measures)

    def plot_rescaled(self, measures: Sequence[str] | None = None) -> Figure:
        """Draw measures against the target, as trained and after random rescaling.

        Args:
            measures: Which; None for all.

        Returns:
            A matplotlib figure with one row per measure.
        """
        from flatgauge.report.findings_pictures import plot_pairs_of

        return plot_pairs_of(self, measures or self.measures)

    def plot_layers(self, measure: str) -> Figure:
        """Draw the parts of single layers of a measure against the target.

        Args:
            measure: Which.

        Returns:
            A matplotlib figure with one panel per layer.
        """
        from flatgauge.report.findings_pictures import plot_layers_of

        return plot_layers_of(self, measure)

    def __repr__(self) -> str:
        from flatgauge.report.findings_text import told

        return told(self)

    @property
    def confounders(self) -> Sequence[str]:
        """Those confounders that differ between networks."""
        return [
            name
            for name in self.study.confounders
            if name in self.counted and self.counted[name].nunique() > 1
        ]

    def _frame(self, part: str) -> pd.DataFrame:
        """Rows with the measures of one form of the networks."""
        import pandas as pd

        found = {}
        for run, row in self.rows.items():
            training, report = row["training"], row[part]
            gaps = {
                "loss_gap": training["test_loss"] - training["train_loss"],
                "accuracy_gap": training["train_accuracy"] - training["test_accuracy"],
            }
            measures = report["measures"] if report else {}
            values = {name: entry["value"] for name, entry in measures.items()}
            facts = training | {"trained_epochs": training["epochs"]}
            found[run] = facts | row["recipe"] | gaps | values
        columns = None if found else [*FIELDS, "state", "loss_gap", "accuracy_gap", *self.measures]
        frame = pd.DataFrame.from_dict(found, orient="index", columns=columns)
        return frame.rename_axis("run")

    def _with_layers(self, frame: pd.DataFrame) -> pd.DataFrame:
        """A frame with a column for every layer of every measure."""
        layers = self.layer_frame()
        if layers.empty:
            return frame
        labels = map(_label, layers["measure"], layers["layer"])
        wide = layers.assign(label=list(labels)).pivot(index="run", columns="label", values="value")
        return frame.join(wide)


def _label(measure: str, layer: str) -> str:
    """How a column of one layer is called."""
    return f"{measure}[{layer}]"
