"""What a study found: one row per network, correlations, and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.studies.preparing import prepare
from flatgauge.studies.running import stored_network, surface_of
from flatgauge.studies.store import Store
from flatgauge.studies.study import Study
from flatgauge.studies.training import REACHED
from flatgauge.surface import LossSurface

if TYPE_CHECKING:
    import pandas as pd


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

    def correlations(self, *, seed: int = 0, resamples: int = 2000) -> pd.DataFrame:
        """How well every measure follows the target.

        Args:
            seed: Of the bootstrap.
            resamples: Of the bootstrap.

        Returns:
            A frame with the index ``measure``: see `flatgauge.statistics.correlation_table`.
        """
        from flatgauge.statistics import correlation_table

        return correlation_table(
            self.counted,
            measures=self.measures,
            target=self.study.target,
            factors=self.study.factor_names,
            confounders=self._confounders(),
            seed=seed,
            resamples=resamples,
        )

    def before_after(self, *, seed: int = 0, resamples: int = 2000) -> pd.DataFrame | None:
        """The same before and after every network was rewritten as another of the same function.

        Args:
            seed: Of the bootstrap.
            resamples: Of the bootstrap.

        Returns:
            A frame with the index ``measure``; None if no network was rescaled.
        """
        from flatgauge.statistics import before_after_table

        rescaled = self.rescaled_frame()
        if rescaled is None:
            return None
        return before_after_table(
            self.counted,
            rescaled.loc[self.counted.index],
            measures=self.measures,
            target=self.study.target,
            seed=seed,
            resamples=resamples,
        )

    def cells(self) -> pd.DataFrame:
        """Mean and standard deviation over the seeds of every kind of network.

        Returns:
            A frame with one row per combination of factors.
        """
        shown = ["train_loss", "train_accuracy", "test_accuracy", self.study.target, *self.measures]
        grouped = self.counted.groupby(self.study.factor_names, sort=False)
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
            raise KeyError(f"`{run}` is not finished; there are {', '.join(self.rows) or 'none'}.")
        recipe = self.study.runs()[run]
        prepared = prepare(recipe, self.data)
        return surface_of(self.study, stored_network(recipe, prepared, run, self.store), prepared)

    def _confounders(self) -> Sequence[str]:
        """Those confounders that differ between networks and are no factor themselves."""
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
            values = (
                {name: entry["value"] for name, entry in report["measures"].items()}
                if report
                else {}
            )
            found[run] = row["recipe"] | training | gaps | values
        return pd.DataFrame.from_dict(found, orient="index").rename_axis("run")

    def _with_layers(self, frame: pd.DataFrame) -> pd.DataFrame:
        """A frame with a column for every layer of every measure."""
        layers = self.layer_frame()
        if layers.empty:
            return frame
        labels = layers["measure"] + "[" + layers["layer"] + "]"
        wide = layers.assign(label=labels).pivot(index="run", columns="label", values="value")
        return frame.join(wide)
