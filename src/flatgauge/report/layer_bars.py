"""The values of layers and units, as pictures to choose from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.analysis.measurement import Report
from flatgauge.estimators.estimate import Estimate
from flatgauge.measures import registry
from flatgauge.report.plots.bars import MOST_POINTS, bars_axes, bars_figure, ranked_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More layers than this are not drawn, but the largest ones are.
MOST_LAYERS = 40

#: More curves of units than this are not drawn.
_MOST_CURVES = 8

#: Bars that differ by more than this factor are drawn on a logarithmic axis.
_MANY = 1e3


@dataclass(frozen=True)
class Choice:
    """One of several pictures.

    Attributes:
        name: What it is chosen by.
        figure: The picture.
        note: What is not drawn, "" where nothing is left out.
        positive: Whether a logarithmic axis can show the values: none is negative.
        wide: Whether only a logarithmic axis shows them all: they span many powers of ten.
    """

    name: str
    figure: Any
    note: str
    positive: bool
    wide: bool


def layer_choices(reports: Mapping[str, Report]) -> list[Choice]:
    """Bars per layer, one picture for every measure that has them.

    Args:
        reports: By name of the model; each is a series.

    Returns:
        The pictures.
    """
    names = dict.fromkeys(name for report in reports.values() for name in report)
    found = []
    for name in names:
        values = {
            model: report.estimates[name].layers
            for model, report in reports.items()
            if name in report.estimates and report.estimates[name].layers
        }
        if values:
            found.append(_layers(name, values))
    return found


def _layers(measure: str, values: Mapping[str, Mapping[str, float]]) -> Choice:
    layers = list(dict.fromkeys(layer for found in values.values() for layer in found))
    note = ""
    if len(layers) > MOST_LAYERS:
        size = {layer: max(_size(v.get(layer)) for v in values.values()) for layer in layers}
        kept = set(sorted(layers, key=lambda layer: -size[layer])[:MOST_LAYERS])
        note = f"The {MOST_LAYERS} largest of {len(layers)} layers are drawn; the JSON has all."
        layers = [layer for layer in layers if layer in kept]
    series = {
        model: [found.get(layer, math.nan) for layer in layers] for model, found in values.items()
    }
    drawn = [value for row in series.values() for value in row if not math.isnan(value)]
    odd = sum(math.isinf(value) for value in drawn)
    if odd:
        note = f"{note} {odd} infinite values are not drawn.".strip()
    figure = bars_figure(layers, series, label=labelled_axis(measure))
    return Choice(measure, figure, note, *_spans(np.array(drawn)))


def _size(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else abs(value)


def report_axes(report: Report, measure: str | None, ax: Axes | None) -> Axes:
    """Bars on axes of matplotlib: a measure layer by layer, or all measures for None."""
    model = report.facts.model
    if measure is not None:
        layers = report[measure].layers
        if not layers:
            having = ", ".join(name for name, e in report.items() if e.layers) or "none"
            raise ValueError(
                f"`{measure}` has no values of layers; the measures that have are {having}."
            )
        series = {model: list(layers.values())}
        return bars_axes(list(layers), series, label=labelled_axis(measure), ax=ax)
    # A value that a logarithmic axis cannot show is named without a bar.
    shown = [e.value if 0 < e.value < math.inf else math.nan for e in report.values()]
    label = f"{model}, lower is flatter"
    return bars_axes(list(report), {model: shown}, label=label, log=True, ax=ax)


def unit_choices(reports: Mapping[str, Report]) -> list[Choice]:
    """Units in order of size, one picture for every measure and model that has them.

    Args:
        reports: By name of the model.

    Returns:
        The pictures.
    """
    return [
        _units(f"{name}, {model}" if len(reports) > 1 else name, name, estimate)
        for model, report in reports.items()
        for name, estimate in report.items()
        if estimate.units
    ]


def _units(title: str, measure: str, estimate: Estimate) -> Choice:
    series: dict[str, NDArray[np.float64]] = {
        layer: values.detach().double().cpu().numpy().reshape(-1)
        for layer, values in estimate.units.items()
    }
    counts = {layer: len(values) for layer, values in series.items()}
    parts = []
    if len(series) > _MOST_CURVES:
        largest = sorted(series, key=lambda layer: -float(np.nanmax(series[layer], initial=0.0)))
        kept = set(largest[:_MOST_CURVES])
        parts.append(
            f"Of {len(series)} layers, the {_MOST_CURVES} with the largest units are drawn."
        )
        series = {layer: values for layer, values in series.items() if layer in kept}
    long = [layer for layer in series if counts[layer] > MOST_POINTS]
    if long:
        parts.append(
            f"Curves of more than {MOST_POINTS} units are thinned: the first 100, then evenly "
            f"spread ranks ({', '.join(f'{layer}: {counts[layer]:,} units' for layer in long)})."
        )
    odd = sum(int((~np.isfinite(values)).sum()) for values in series.values())
    if odd:
        parts.append(f"{odd} values that are not finite are not drawn.")
    drawn = np.concatenate(list(series.values()))
    silent = int((drawn == 0).sum())
    if silent:
        parts.append(f"{silent:,} units have the value 0, which no logarithmic axis shows.")
    figure = ranked_figure(series, label=labelled_axis(measure))
    positive, _ = _spans(drawn)
    return Choice(title, figure, " ".join(parts), positive, wide=False)


def _spans(values: NDArray[np.float64]) -> tuple[bool, bool]:
    """Whether a logarithmic axis can show values, and whether it should."""
    finite = values[np.isfinite(values)]
    above = finite[finite > 0]
    possible = len(above) > 0 and bool((finite >= 0).all())
    return possible, possible and bool(above.max() > _MANY * above.min())


def labelled_axis(measure: str) -> str:
    """A measure's name with its symbol."""
    return f"{measure}, {registry[measure].symbol}" if measure in registry else measure
