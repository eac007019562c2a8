"""The pictures of a study: measures against the target, as trained, rescaled, and by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.report.coefficient import coefficient
from flatgauge.report.layer_bars import Choice
from flatgauge.report.plots.cloud import Cloud
from flatgauge.report.plots.scatter import figure, pairs_figure, panels_figure
from flatgauge.report.study_numbers import ChangeRow, correlation_text, spoken

if TYPE_CHECKING:
    import pandas as pd

#: More panels than this are not drawn in one picture.
MOST_PANELS = 12

#: The state of runs that count.
COUNTED = "reached"


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
    def counted(self) -> Any:
        """Which networks enter statistics."""
        if "state" not in self.frame.columns:
            return np.ones(len(self.frame), dtype=bool)
        return (self.frame["state"] == COUNTED).to_numpy()

    def cloud(self, values: pd.Series, label: str, title: str) -> Cloud:
        """Values of the networks against the target.

        Args:
            values: By run; networks without one are not drawn.
            label: What they are.
            title: Of the panel.

        Returns:
            The points.
        """
        groups = tuple(self.frame[self.colour].tolist()) if self.colour else ()
        return Cloud(
            values.reindex(self.frame.index).to_numpy(dtype=np.float64, na_value=np.nan),
            self.frame[self.target].to_numpy(dtype=np.float64, na_value=np.nan),
            label,
            self.target,
            tuple(str(run) for run in self.frame.index),
            self.counted,
            title,
            groups,
            self.colour or "",
            "not counted",
        )


def measure_clouds(
    points: Points, measures: Sequence[str], correlations: pd.DataFrame
) -> dict[str, Cloud]:
    """Every measure against the target, with its correlation as title.

    Args:
        points: The networks.
        measures: Columns of the frame.
        correlations: One row per measure.

    Returns:
        The points by measure.
    """
    clouds = {}
    for name in measures:
        cloud = points.cloud(points.frame[name], name, "")
        clouds[name] = replace(cloud, title=correlation_text(correlations, name, log=cloud.log))
    return clouds


def measure_choices(
    points: Points, measures: Sequence[str], correlations: pd.DataFrame
) -> list[Choice]:
    """Scatter plots to choose from: all measures together, then one by one.

    Args:
        points: The networks.
        measures: Columns of the frame.
        correlations: One row per measure.

    Returns:
        The pictures.
    """
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
    column = spoken(correlations)

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
    """Every measure against the target, as trained and after a random rescaling.

    Args:
        points: The networks as trained.
        rescaled: The same networks after the rescaling.
        measures: Columns of both frames; those that were not measured again are left out.
        changes: What the rescaling did to the correlations, for the titles.
        kind: Which correlation that is.

    Returns:
        Pairs of points by measure.
    """
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
    """Pairs of scatter plots to choose from: as trained, and after a random rescaling.

    Args:
        points: The networks as trained.
        rescaled: The same networks after the rescaling.
        measures: Columns of both frames.
        changes: What the rescaling did to the correlations, for the titles.
        kind: Which correlation that is.

    Returns:
        The pictures; first one that falls apart beside one that does not, where there are both.
    """
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
    """Grids to choose from: for every measure, one panel per layer.

    Args:
        points: The networks.
        layers: Long: run, measure, layer, value.
        correlations: One row per measure and layer, for the titles; None for none.

    Returns:
        The pictures.
    """
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
    """The parts of single layers of one measure against the target.

    Args:
        points: The networks.
        rows: Of one measure, long: run, measure, layer, value.
        layers: Which.
        correlations: One row per measure and layer, for the titles; None for none.

    Returns:
        The points of every layer.
    """
    measure, clouds = str(rows["measure"].iloc[0]), []
    for layer in layers:
        values = rows[rows["layer"] == layer].set_index("run")["value"]
        cloud = points.cloud(values, measure, "")
        told = correlation_text(correlations, (measure, layer), log=cloud.log)
        clouds.append(replace(cloud, title=f"{layer}\n{told}" if told else str(layer)))
    return clouds


def _choice(name: str, picture: Any, note: str = "") -> Choice:
    return Choice(name, picture, note, positive=False, wide=False)
