"""The pictures of a pool: measures against the target, as they are, rescaled, and by layer.

In: frames with one row per network. Out: scatter plots to choose from, for a page; matplotlib
figures for `PoolResult.plot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.report.coefficient import coefficient
from flatgauge.report.layer_bars import Choice
from flatgauge.report.plots.cloud import Cloud
from flatgauge.report.plots.scatter import (
    figure,
    pairs_figure,
    panels_figure,
    plot_pairs,
    plot_panels,
)
from flatgauge.report.pool_statistics import (
    ChangeRow,
    change_rows,
    correlation_text,
    spoken_coefficient,
)
from flatgauge.studies.tasks import COUNTED

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from flatgauge.studies.result import PoolResult

#: More panels than this are not drawn in one picture.
MOST_PANELS = 12

#: The coefficient before and after a rescaling.
CHANGE_KIND = "Spearman"


@dataclass(frozen=True)
class Points:
    """What all pictures of a study share.

    Attributes:
        frame: One row per network.
        target: The column that measures should follow.
        colour: The column that points are coloured by, None for one colour.
    """

    frame: pd.DataFrame
    target: str
    colour: str | None

    @property
    def in_statistics(self) -> Any:
        """Which networks enter statistics."""
        if "state" not in self.frame.columns:
            return np.ones(len(self.frame), dtype=bool)
        return self.frame["state"].isin(COUNTED).to_numpy()

    def cloud(self, values: pd.Series, label: str, title: str) -> Cloud:
        """Values by run against the target; networks without one are not drawn."""
        groups = tuple(self.frame[self.colour].tolist()) if self.colour else ()
        return Cloud(
            values.reindex(self.frame.index).to_numpy(dtype=np.float64, na_value=np.nan),
            self.frame[self.target].to_numpy(dtype=np.float64, na_value=np.nan),
            label,
            self.target,
            tuple(str(run) for run in self.frame.index),
            self.in_statistics,
            title,
            groups,
            self.colour or "",
            "not counted",
        )


def measure_clouds(
    points: Points, measures: Sequence[str], correlations: pd.DataFrame
) -> dict[str, Cloud]:
    """Every measure against the target, with its correlation as title."""
    clouds = {}
    for name in measures:
        cloud = points.cloud(points.frame[name], name, "")
        clouds[name] = replace(cloud, title=correlation_text(correlations, name, log=cloud.log))
    return clouds


def measure_choices(
    points: Points, measures: Sequence[str], correlations: pd.DataFrame
) -> list[Choice]:
    """Scatter plots to choose from: all measures together, then one by one."""
    clouds = measure_clouds(points, measures, correlations)
    found = [_choice(name, figure(cloud)) for name, cloud in clouds.items()]
    if len(measures) == 1:
        return found
    shown, note = _strongest(measures, correlations)
    together = panels_figure([clouds[name] for name in shown])
    return [_choice("all measures" if not note else "several measures", together, note), *found]


def _strongest(measures: Sequence[str], correlations: pd.DataFrame) -> tuple[list[str], str]:
    """The measures that one picture has room for, and what it leaves out."""
    if len(measures) <= MOST_PANELS:
        return list(measures), ""
    column = spoken_coefficient(correlations)

    def strength(name: str) -> float:
        found = coefficient(correlations, name, column) if column else None
        return -np.inf if found is None or np.isnan(found.value) else found.value

    kept = set(sorted(measures, key=strength, reverse=True)[:MOST_PANELS])
    note = f"The {MOST_PANELS} of {len(measures)} measures that follow the target most closely."
    return [name for name in measures if name in kept], note


def pair_clouds(
    points: Points,
    rescaled: pd.DataFrame,
    measures: Sequence[str],
    changes: Sequence[ChangeRow],
    kind: str,
) -> dict[str, tuple[Cloud, Cloud]]:
    """Every measure that was measured again, against the target: as it is, and rescaled."""
    rows = {row.measure: row for row in changes}
    pairs = {}
    for name in measures:
        if name not in rescaled.columns:
            continue
        row = rows.get(name)
        times = (row.before, row.after) if row else (None, None)
        titles = [f"{kind} {time.text}" if time is not None else "" for time in times]
        pairs[name] = (
            points.cloud(points.frame[name], name, titles[0]),
            points.cloud(rescaled[name], name, titles[1]),
        )
    return pairs


def pair_choices(
    points: Points,
    rescaled: pd.DataFrame,
    measures: Sequence[str],
    changes: Sequence[ChangeRow],
    kind: str,
) -> list[Choice]:
    """Pairs of plots; first one that falls apart next to one that does not, if there are both."""
    pairs = pair_clouds(points, rescaled, measures, changes, kind)
    found = [_choice(name, pairs_figure([pair])) for name, pair in pairs.items()]
    telling = [_first(changes, pairs, how) for how in ("apart", "same")]
    if None not in telling:
        names = [name for name in telling if name]
        picture = pairs_figure([pairs[name] for name in names])
        found.insert(0, _choice(" beside ".join(names), picture))
    return found


def _first(changes: Sequence[ChangeRow], pairs: dict[str, Any], how: str) -> str | None:
    """The measure with the highest correlation as trained among those of a kind."""
    rows = [row for row in changes if row.how == how and row.measure in pairs and row.before]
    best = max(rows, key=lambda row: row.before.value if row.before else 0.0, default=None)
    return None if best is None else best.measure


def layer_grids(
    points: Points, layers: pd.DataFrame, correlations: pd.DataFrame | None
) -> list[Choice]:
    """Grids to choose from: for every measure, one panel per layer."""
    found = []
    for measure, rows in layers.groupby("measure", sort=False):
        names = list(dict.fromkeys(rows["layer"]))
        note = ""
        if len(names) > MOST_PANELS:
            note = f"The last {MOST_PANELS} of {len(names)} layers are drawn; the JSON has all."
        clouds = layer_clouds(points, rows, names[-MOST_PANELS:], correlations)
        found.append(_choice(str(measure), panels_figure(clouds), note))
    return found


def layer_clouds(
    points: Points, rows: pd.DataFrame, layers: Sequence[str], correlations: pd.DataFrame | None
) -> list[Cloud]:
    """The parts of single layers of one measure against the target."""
    measure, clouds = str(rows["measure"].iloc[0]), []
    for layer in layers:
        values = rows[rows["layer"] == layer].set_index("run")["value"]
        cloud = points.cloud(values, measure, "")
        told = correlation_text(correlations, (measure, layer), log=cloud.log)
        clouds.append(replace(cloud, title=f"{layer}\n{told}" if told else str(layer)))
    return clouds


def _choice(name: str, picture: Any, note: str = "") -> Choice:
    return Choice(name, picture, note, positive=False, wide=False)


# -- matplotlib ---------------------------------------------------------------------------------


def plot_measures(result: PoolResult, measures: Sequence[str]) -> Figure:
    """Draw measures against the target, one panel each."""
    _check(result, measures)
    clouds = measure_clouds(_points(result), measures, result.correlations)
    return plot_panels(list(clouds.values()))


def plot_changes(result: PoolResult, measures: Sequence[str]) -> Figure:
    """Draw measures against the target, as they are and rescaled, one row each."""
    _check(result, measures)
    rescaled, table = result.rescaled_frame(), result.before_after
    if rescaled is None or table is None:
        raise ValueError(
            "no network of this pool was rescaled; give it a `rescaling`, such as "
            "'units 1/100..100'."
        )
    pairs = pair_clouds(_points(result), rescaled, measures, change_rows(table), CHANGE_KIND)
    return plot_pairs(list(pairs.values()))


def plot_layers(result: PoolResult, measure: str) -> Figure:
    """Draw the parts of single layers of a measure against the target, one panel each."""
    _check(result, [measure])
    layers = result.layer_frame()
    rows = layers[layers["measure"] == measure]
    if rows.empty:
        raise ValueError(f"`{measure}` has no values of single layers; use `plot`.")
    names = list(dict.fromkeys(rows["layer"]))
    return plot_panels(layer_clouds(_points(result), rows, names, result.layer_correlations))


def _points(result: PoolResult) -> Points:
    """The networks, coloured by the first factor."""
    return Points(result.to_frame(), result.pool.target, next(iter(result.pool.factor_names), None))


def _check(result: PoolResult, measures: Sequence[str]) -> None:
    """Refuse what was not measured."""
    unknown = [name for name in measures if name not in result.measures]
    if unknown:
        raise ValueError(
            f"`{unknown[0]}` was not measured in this pool; it has {', '.join(result.measures)}."
        )
