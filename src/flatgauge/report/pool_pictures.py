"""Pictures of a study's findings, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatgauge.report.plots.scatter import plot_pairs, plot_panels
from flatgauge.report.study_numbers import change_kind, change_rows
from flatgauge.report.study_pictures import Points, layer_clouds, measure_clouds, pair_clouds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flatgauge.studies.result import PoolResult


def plot_measures(findings: PoolResult, measures: Sequence[str]) -> Figure:
    """Draw measures against the target.

    Args:
        findings: What was found.
        measures: Which.

    Returns:
        A figure with one panel per measure.
    """
    _check(findings, measures)
    clouds = measure_clouds(_points(findings), measures, findings.correlations)
    return plot_panels(list(clouds.values()))


def plot_changes(findings: PoolResult, measures: Sequence[str]) -> Figure:
    """Draw measures against the target, as trained and after random rescaling.

    Args:
        findings: What was found.
        measures: Which.

    Returns:
        A figure with one row per measure.

    Raises:
        ValueError: If no network was rescaled.
    """
    _check(findings, measures)
    rescaled, table = findings.rescaled_frame(), findings.before_after
    if rescaled is None or table is None:
        raise ValueError(
            "no network of this pool was rescaled; give it a `rescaling`, such as "
            "'units 1/100..100'."
        )
    kind = change_kind(table, findings.correlations)
    pairs = pair_clouds(_points(findings), rescaled, measures, change_rows(table), kind)
    return plot_pairs(list(pairs.values()))


def plot_layers(findings: PoolResult, measure: str) -> Figure:
    """Draw the parts of single layers of a measure against the target.

    Args:
        findings: What was found.
        measure: Which.

    Returns:
        A figure with one panel per layer.

    Raises:
        ValueError: If the measure has no values of layers.
    """
    _check(findings, [measure])
    layers = findings.layer_frame()
    rows = layers[layers["measure"] == measure]
    if rows.empty:
        raise ValueError(f"`{measure}` has no values of single layers; use `plot`.")
    names = list(dict.fromkeys(rows["layer"]))
    return plot_panels(layer_clouds(_points(findings), rows, names, findings.layer_correlations))


def _points(findings: PoolResult) -> Points:
    """The networks, coloured by the first factor."""
    return Points(
        findings.to_frame(), findings.pool.target, next(iter(findings.pool.factor_names), None)
    )


def _check(findings: PoolResult, measures: Sequence[str]) -> None:
    """Refuse what was not measured."""
    unknown = [name for name in measures if name not in findings.measures]
    if unknown:
        raise ValueError(
            f"`{unknown[0]}` was not measured in this pool; it has {', '.join(findings.measures)}."
        )
