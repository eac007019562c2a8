"""What a pool found: one row per network, correlations, and a page.

In: a pool and its folder. Out: `PoolResult`, which reads the rows and computes statistics from
them when they are asked for; it trains and measures nothing. `PublishedNumber` is a number of a
paper and the same number computed from these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flatgauge.analysis.files import atomic_write
from flatgauge.analysis.result import Result
from flatgauge.studies.pool import NetworkPool, Pool
from flatgauge.studies.recipe import FIELDS
from flatgauge.studies.store import PoolStore, Row
from flatgauge.studies.study import Study
from flatgauge.studies.tasks import COUNTED, load_network, load_task_data, make_surface
from flatgauge.surface.surface import LossSurface

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from flatgauge.report.tables import Table


@dataclass(frozen=True, repr=False)
class PoolResult(Result):
    """The rows of a pool, and what can be read from them.

    Attributes:
        pool: What was measured.
        store: Its folder.
        data: Where data sets are that are read from files.
        rows: What is finished, by name of the network, in the order of the pool.
    """

    kind: ClassVar[str] = "pool"

    pool: NetworkPool
    store: PoolStore
    data: str | None = None
    rows: Mapping[str, Row] = field(init=False)

    def __post_init__(self) -> None:
        found = self.store.rows()
        rows = {name: found[name] for name in self.pool.members if name in found}
        object.__setattr__(self, "rows", rows)

    @classmethod
    def read(cls, folder: str | Path, *, data: str | Path | None = None) -> PoolResult:
        """Read what is finished in the folder of a pool or study.

        Args:
            folder: What `run`, ``flatgauge study`` or ``flatgauge pool`` wrote.
            data: Where data sets are; only for `surface`.

        Returns:
            The result.
        """
        store = PoolStore(folder)
        declared = store.declaration()
        kind: type[Pool] | type[Study] = Pool if declared.get("kind") == "pool" else Study
        return cls(kind.from_dict(declared), store, None if data is None else str(data))

    # -- frames ---------------------------------------------------------------------------------

    def to_frame(self) -> pd.DataFrame:
        """The networks, one row each: what makes them different, scores, and every measure.

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
    def included_frame(self) -> pd.DataFrame:
        """The networks that enter statistics: those whose training reached its goal."""
        frame = self.to_frame()
        return frame[frame["state"].isin(COUNTED)]

    @property
    def measures(self) -> list[str]:
        """The names of all measures."""
        return list(self.pool.options)

    @property
    def confounders(self) -> list[str]:
        """Those confounders that differ between networks."""
        return [
            name
            for name in self.pool.confounders
            if name in self.included_frame and self.included_frame[name].nunique() > 1
        ]

    # -- statistics -----------------------------------------------------------------------------

    @cached_property
    def correlations(self) -> pd.DataFrame:
        """How well every measure follows the target: see `flatgauge.studies.statistics`."""
        from flatgauge.studies.statistics import correlation_table

        return correlation_table(
            self.included_frame,
            measures=self.measures,
            target=self.pool.target,
            factors=self.pool.factor_names,
            confounders=self.confounders,
            seed_column=self.pool.seed_column,
        )

    @cached_property
    def before_after(self) -> pd.DataFrame | None:
        """The same before and after all networks were rescaled; None if none was."""
        from flatgauge.studies.statistics import before_after_table

        rescaled = self.rescaled_frame()
        if rescaled is None:
            return None
        return before_after_table(
            self.included_frame,
            rescaled.loc[self.included_frame.index],
            measures=self.measures,
            target=self.pool.target,
        )

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
            self._with_layers(self.included_frame),
            measures=list(names),
            target=self.pool.target,
            factors=self.pool.factor_names,
            seed_column=self.pool.seed_column,
        )
        found.index = pd.MultiIndex.from_tuples(names.values(), names=["measure", "layer"])
        return found

    def cells(self) -> pd.DataFrame:
        """Mean and standard deviation over the networks of every kind.

        Returns:
            A frame with one row per combination of factors.
        """
        shown = ["train_loss", "train_accuracy", "test_accuracy", self.pool.target, *self.measures]
        shown = [name for name in dict.fromkeys(shown) if name in self.included_frame]
        grouped = self.included_frame.groupby(self.pool.factor_names, sort=False, dropna=False)
        found = grouped[shown].agg(["mean", "std"])
        found.insert(0, ("networks", ""), grouped.size())
        return found

    def compare_published(self) -> pd.DataFrame:
        """The paper's numbers and ours.

        Returns:
            A frame with columns ``source, what, published, ours``.
        """
        import pandas as pd

        frame, rescaled = self._with_layers(self.included_frame), self.rescaled_frame()
        rescaled = None if rescaled is None else rescaled.loc[frame.index]
        found = [
            (one.source, one.what, one.published, one.compute(frame, rescaled, self.pool.target))
            for one in self.pool.published
        ]
        return pd.DataFrame(found, columns=["source", "what", "published", "ours"])

    def surface(self, run: str) -> LossSurface:
        """The training loss of a finished network, to be measured or drawn in other ways.

        Args:
            run: Its name: an index of `to_frame`.

        Returns:
            The surface.

        Raises:
            KeyError: If there is no such network.
        """
        if run not in self.rows:
            raise KeyError(
                f"`{run}` is no finished network; there are {', '.join(self.rows) or 'none'}."
            )
        task = self.pool.task(run, self.store, self.data)
        data = load_task_data(task)
        model, _ = load_network(task, data)
        return make_surface(task, model, data)

    # -- as text, JSON, page and pictures --------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What was found as plain values: the networks, and the tables of statistics."""
        counted = not self.included_frame.empty
        tables = {
            "correlations": self.correlations if counted else None,
            "before_after": self.before_after if counted else None,
        }
        return self.plain_contents(
            {
                "name": self.pool.name,
                "networks": len(self.rows),
                "counted": len(self.included_frame),
                "published": self.compare_published().to_dict(orient="records"),
                **{name: _records(table) for name, table in tables.items()},
                "runs": _records(self.to_frame()),
            }
        )

    def tables(self) -> list[Table]:
        """What was run and left out, correlations, and published numbers."""
        from flatgauge.report.pool_tables import result_tables

        return result_tables(self)

    def to_html(self, path: str | Path, *, command: str | None = None) -> Path:
        """The pool as one self-contained page.

        Args:
            path: Where to write it; an existing file is replaced.
            command: The command line that repeats it.

        Returns:
            The path.
        """
        from flatgauge.report.pool_page import write_pool_page

        return write_pool_page(path, self, command=command)

    def write(self, *, command: str | None = None) -> Path:
        """Write tables (CSV) and the page (``report.html``) into the pool's folder.

        Args:
            command: The command line that repeats it.

        Returns:
            The page.

        Raises:
            ValueError: If no network counts.
        """
        self.write_results()
        if self.included_frame.empty:
            raise ValueError(
                f"`{self.store.folder}` has no network that counts, so there is nothing to report; "
                "`results.csv` in it says how training went. Resume the study if it is not done, "
                "or declare it with goals that can be reached."
            )
        tables = {
            "rescaled": self.rescaled_frame(),
            "layers": self.layer_frame().set_index("run"),
            "correlations": self.correlations,
            "layer_correlations": self.layer_correlations,
            "before_after": self.before_after,
            "published": self.compare_published().set_index("source"),
        }
        for name, frame in tables.items():
            if frame is not None and not frame.empty:
                atomic_write(self.store.folder / f"{name}.csv", frame.to_csv())
        return self.to_html(self.store.folder / "report.html", command=command)

    def write_results(self) -> Path:
        """Write the rows, whether they count or not, as ``results.csv`` into the folder.

        Returns:
            The file.
        """
        return atomic_write(self.store.folder / "results.csv", self.to_frame().to_csv())

    def plot(self, measures: Sequence[str] | None = None) -> Figure:
        """Draw measures against the target, one panel each.

        Args:
            measures: Which; None for all.

        Returns:
            A matplotlib figure.
        """
        from flatgauge.report.pool_pictures import plot_measures

        return plot_measures(self, measures or self.measures)

    def plot_rescaled(self, measures: Sequence[str] | None = None) -> Figure:
        """Draw measures against the target, as they are and after random rescaling.

        Args:
            measures: Which; None for all.

        Returns:
            A matplotlib figure with one row per measure.
        """
        from flatgauge.report.pool_pictures import plot_changes

        return plot_changes(self, measures or self.measures)

    def plot_layers(self, measure: str) -> Figure:
        """Draw the parts of single layers of a measure against the target.

        Args:
            measure: Which.

        Returns:
            A matplotlib figure with one panel per layer.
        """
        from flatgauge.report.pool_pictures import plot_layers

        return plot_layers(self, measure)

    def _frame(self, part: str) -> pd.DataFrame:
        """Rows with the measures of one form of the networks."""
        import pandas as pd

        found = {}
        for name, row in self.rows.items():
            # A manifest may have got further columns since the network was measured.
            values = row["scores"] | {"state": row["state"]} | self.pool.members[name].columns
            gaps = {}
            if "train_loss" in values and "test_loss" in values:
                gaps["loss_gap"] = values["test_loss"] - values["train_loss"]
            if "train_accuracy" in values and "test_accuracy" in values:
                gaps["accuracy_gap"] = values["train_accuracy"] - values["test_accuracy"]
            measures = row[part]["measures"] if row[part] else {}
            found[name] = (
                values
                | {gap: value for gap, value in gaps.items() if gap not in values}
                | {measure: entry["value"] for measure, entry in measures.items()}
            )
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


def _records(frame: pd.DataFrame | None) -> dict[str, dict[str, Any]] | None:
    """A frame as plain values by row and column; None where there is no number."""
    if frame is None:
        return None
    found = frame.astype(object).where(frame.notna(), None).to_dict(orient="index")
    return {str(name): {str(key): cell for key, cell in row.items()} for name, row in found.items()}


# -- numbers of papers --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PublishedNumber:
    """A number of a paper, to be compared with the same number of a pool.

    Attributes:
        source: Where it is printed.
        what: What it is, in words.
        published: As it is printed.
        statistic: ``"mean"`` over networks, ``"pearson"`` or ``"spearman"`` correlation with the
            target, or ``"change"``: the median relative change by the rescaling.
        column: Of the pool's frame; ``"kappa_trace_sum[fc1]"`` is the value of one layer.
        where: The networks that count, by value of a column; all if empty.
    """

    source: str
    what: str
    published: str
    statistic: str
    column: str
    where: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.statistic not in _STATISTICS:
            raise ValueError(
                f"`statistic={self.statistic!r}` is unknown; use one of {', '.join(_STATISTICS)}."
            )

    def compute(self, frame: pd.DataFrame, rescaled: pd.DataFrame | None, target: str) -> str:
        """The same number of a pool.

        Args:
            frame: One row per network that counts.
            rescaled: The same after rescaling.
            target: The column that flatness is to follow.

        Returns:
            The number as text, with its deviation or the number of networks; a dash where there
            is none.
        """
        for name, value in self.where.items():
            frame = frame[frame[name] == value]
            rescaled = None if rescaled is None else rescaled[rescaled[name] == value]
        if self.column not in frame or frame[self.column].dropna().empty:
            return "—"
        return _STATISTICS[self.statistic](frame, rescaled, self.column, target)


def _mean(frame: pd.DataFrame, rescaled: pd.DataFrame | None, column: str, target: str) -> str:
    """Mean and standard deviation over networks."""
    values = frame[column].dropna()
    unit = ""
    if column.endswith("accuracy"):
        values, unit = 100 * values, " %"
    spread = f" ± {values.std():.2g}" if len(values) > 1 else ""
    return f"{values.mean():.4g}{spread}{unit} (n = {len(values)})"


def _change(frame: pd.DataFrame, rescaled: pd.DataFrame | None, column: str, target: str) -> str:
    """How much a measure moves when the network is rewritten."""
    if rescaled is None or column not in rescaled:
        return "—"
    changes = ((rescaled[column] - frame[column]) / frame[column]).abs().dropna()
    return f"{changes.median():.1e} (n = {len(changes)})" if len(changes) else "—"


def _correlation(kind: Any) -> Callable[..., str]:
    """A correlation with the target, and the number of networks behind it."""

    def compute(frame: pd.DataFrame, rescaled: Any, column: str, target: str) -> str:
        pairs = frame[[column, target]].dropna()
        if len(pairs) < 3 or pairs[column].nunique() < 2 or pairs[target].nunique() < 2:
            return "—"
        return f"{pairs[column].corr(pairs[target], method=kind):.3f} (n = {len(pairs)})"

    return compute


_STATISTICS: Mapping[str, Callable[..., str]] = {
    "mean": _mean,
    "pearson": _correlation("pearson"),
    "spearman": _correlation("spearman"),
    "change": _change,
}
