"""The history of a training run: a row per measurement, as a frame, a picture and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from flatgauge.analysis.result import Result
from flatgauge.estimators.estimate import Estimate

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from flatgauge.report.tables import Table

#: What can become of a measurement.
MEASURED, FAILED, DIVERGED = "measured", "failed", "diverged"


@dataclass(frozen=True)
class HistoryRow:
    """One measurement.

    Attributes:
        step: Steps of the optimiser so far.
        epoch: Epochs that were finished.
        seconds: Since the monitor was made.
        cost: Seconds that this measurement took.
        status: ``"measured"``; ``"failed"`` where something could not be measured; ``"diverged"``
            where the loss, the training loss or a weight is not finite.
        loss: On the monitor's samples; nan where it could not be taken.
        gradient_norm: Length of the gradient there.
        training_loss: The loss that the training loop reported, if any.
        estimates: By measure.
        skipped: Measurements that were due since the row before, and left out to keep to the share
            of the training time.
        note: What went wrong.
    """

    step: int
    epoch: int
    seconds: float
    cost: float
    status: str = MEASURED
    loss: float = float("nan")
    gradient_norm: float = float("nan")
    training_loss: float | None = None
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    skipped: int = 0
    note: str = ""

    def values(self) -> dict[str, float]:
        """Every number of the row by name, those of layers as ``measure_by_layer/layer``."""
        found = {"loss": self.loss, "gradient_norm": self.gradient_norm}
        for measure, estimate in self.estimates.items():
            found[measure] = estimate.value
            # Not `measure/layer`: some trackers keep files, and a file cannot be a folder too.
            layers = estimate.layers.items()
            found |= {f"{measure}_by_layer/{layer}": value for layer, value in layers}
        return found


class History(Result, Sequence[HistoryRow]):
    """The rows of a run, in order.

    Attributes:
        skipped: Measurements that were due and left out to keep to the share of the training
            time, those after the last row included.
    """

    kind = "history"

    def __init__(self, rows: Sequence[HistoryRow] = (), *, skipped: int = 0) -> None:
        self._rows = list(rows)
        self.skipped = skipped

    @overload
    def __getitem__(self, index: int) -> HistoryRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[HistoryRow]: ...

    def __getitem__(self, index: int | slice) -> HistoryRow | list[HistoryRow]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[HistoryRow]:
        return iter(self._rows)

    def tables(self) -> list[Table]:
        """One row per measurement."""
        from flatgauge.report.views.history import history_tables

        return history_tables(self)

    def append(self, row: HistoryRow) -> None:
        """Add a row."""
        self._rows.append(row)

    @property
    def measures(self) -> tuple[str, ...]:
        """Every measure of any row, in order."""
        return tuple(dict.fromkeys(name for row in self for name in row.estimates))

    @property
    def steps(self) -> list[int]:
        """The step of every row."""
        return [row.step for row in self]

    def values(self, measure: str) -> list[float]:
        """A measure's value in every row, nan where it has none."""
        self._check(measure)
        return [row.estimates[measure].value if measure in row.estimates else NAN for row in self]

    def to_frame(self) -> pd.DataFrame:
        """One row per measurement, one column per measure.

        Returns:
            A frame with the index ``step`` and the columns epoch, seconds, cost, status,
            training_loss, loss, gradient_norm, the measures, skipped and note.
        """
        import pandas as pd

        first = ("epoch", "seconds", "cost", "status", "training_loss", "loss", "gradient_norm")
        columns = {name: [getattr(row, name) for row in self] for name in first}
        columns["training_loss"] = [NAN if x is None else x for x in columns["training_loss"]]
        columns |= {measure: self.values(measure) for measure in self.measures}
        columns |= {name: [getattr(row, name) for row in self] for name in ("skipped", "note")}
        return pd.DataFrame(columns, index=pd.Index(self.steps, name="step"))

    def layers(self, measure: str) -> pd.DataFrame:
        """A measure layer by layer: a frame with the index ``step``, one column per layer."""
        import pandas as pd

        self._check(measure)
        found = [row.estimates[measure].layers if measure in row.estimates else {} for row in self]
        names = dict.fromkeys(name for layers in found for name in layers)
        columns = {name: [layers.get(name, NAN) for layers in found] for name in names}
        return pd.DataFrame(columns, index=pd.Index(self.steps, name="step"))

    def plot(self, measure: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the run: every measure over the steps, or one measure layer by layer.

        Args:
            measure: Whose layers to draw; None for all measures, each over its first value.
            ax: Where to draw; None for a new figure.

        Returns:
            The axes, logarithmic where everything is positive. Rows that diverged are marked.
        """
        from flatgauge.report.plots.history import plot_history

        if measure is None:
            courses = {name: self.values(name) for name in self.measures}
            courses["loss"] = [row.loss for row in self]
            courses = {name: _over_first(values) for name, values in courses.items()}
            label = "times the first value"
        else:
            courses = {str(name): list(column) for name, column in self.layers(measure).items()}
            label = f"{measure}, by layer"
        marked = [row.step for row in self if row.status == DIVERGED]
        return plot_history(self.steps, courses, label=label, marked=marked, ax=ax)

    def to_dict(self) -> dict[str, Any]:
        """The rows with the values of measures and layers, and how many were skipped."""
        rows = [
            {**vars(row), "estimates": {n: _plain(e) for n, e in row.estimates.items()}}
            for row in self
        ]
        return self.plain_contents({"skipped": self.skipped, "rows": rows})

    def _check(self, measure: str) -> None:
        """Refuse a measure that no row has."""
        if measure not in self.measures:
            raise KeyError(
                f"`{measure}` is not in this history; there are {', '.join(self.measures)}."
            )


NAN = float("nan")


def _over_first(values: Sequence[float]) -> list[float]:
    """Values over the first of them that is a number other than zero."""
    first = next((value for value in values if value == value and value), 1.0)
    return [value / first for value in values]


def _plain(estimate: Estimate) -> dict[str, Any]:
    """What is kept of an estimate."""
    names = ("value", "stderr", "data_stderr", "bound", "exact", "converged", "layers", "notes")
    return {name: getattr(estimate, name) for name in names}
