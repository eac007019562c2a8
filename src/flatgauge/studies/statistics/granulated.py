"""Kendall's correlation within cells in which one factor varies and all else is fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flatgauge.studies.statistics.correlation import doubts
from flatgauge.studies.statistics.design import (
    Codes,
    Design,
    design_of,
    idle,
    one_factor_pairs,
    order,
)
from flatgauge.studies.statistics.resampling import Array, check_drawing, interval, resampled

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Granulated:
    """The granulated Kendall correlation, or the reason why there is none.

    Attributes:
        value: The mean over factors, from -1 to 1; nan if there is none.
        by_factor: The mean over the cells of each factor that has any.
        cells: How many cells each factor has.
        low: Lower end of the interval of the value.
        high: Upper end of the interval.
        level: How often such an interval holds the true value.
        count: How many networks it rests on.
        notes: What was left out, and how far the interval can be trusted.
        reason: Why there is no value, in a few words; empty if there is one.
    """

    value: float
    low: float
    high: float
    level: float
    count: int
    by_factor: Mapping[str, float] = field(default_factory=dict)
    cells: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reason: str = ""


def granulated_kendall(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    factors: Sequence[str],
    *,
    seed_column: str | None = "seed",
    level: float = 0.95,
    resamples: int = 2000,
    generator: np.random.Generator,
) -> Granulated:
    r"""Kendall's correlation where one factor varies at a time [jiang2020fantastic].

    A plain correlation is high as soon as one factor moves both the measure and the target. Here
    networks are compared only within a cell, where all other factors and the seed are the same:

    .. math:: \psi_i = \operatorname{mean}_{\text{cells}}
        \operatorname{mean}_{\text{pairs}} \operatorname{sgn}(\mu - \mu')
        \operatorname{sgn}(g - g'), \qquad \Psi = \operatorname{mean}_i \psi_i

    A measure that follows one factor only is high for that factor alone: read `by_factor` too.

    A pair with equal measures or equal targets counts as 0, as in the paper (tau-a), so with
    ties 1 cannot be reached. Where a cell holds a level more than once, only pairs of different
    levels are compared. A factor without cells takes no part in the mean and is noted.

    The interval resamples seeds, each with all its networks: the levels of the factors are
    chosen, the seeds are what chance decides, and the factors' means share networks, which only
    resampling whole seeds keeps. One seed gives no interval.

    Args:
        frame: One row for each network.
        measure: The column of the measure.
        target: The column to be foretold.
        factors: The columns that vary by design.
        seed_column: The column of the seeds. None puts all seeds into one cell, without interval.
        level: How often the interval shall hold the true value.
        resamples: How many times to resample.
        generator: Source of randomness.

    Returns:
        The correlation with its interval, by factor too.
    """
    check_drawing(level=level, resamples=resamples, generator=generator)
    design = design_of(frame, measure, target, factors, seed_column)
    nan, count = math.nan, design.ready.count
    if design.ready.reason:
        notes, reason = design.ready.notes, design.ready.reason
        return Granulated(nan, nan, nan, level, count, notes=notes, reason=reason)
    found = {name: _cell_values(design, name) for name in design.factors}
    cells = {name: len(values) for name, (values, _) in found.items()}
    notes = design.ready.notes + tuple(idle(design, n) for n, many in cells.items() if not many)
    found = {name: pair for name, pair in found.items() if cells[name]}
    if not found:
        reason = "no two networks differ in one factor alone"
        return Granulated(nan, nan, nan, level, count, {}, cells, notes, reason)
    by_factor = {name: float(values.mean()) for name, (values, _) in found.items()}
    low, high, more = _interval(design, found, level, resamples, generator)
    value = float(np.mean(list(by_factor.values())))
    return Granulated(value, low, high, level, count, by_factor, cells, notes + more)


def _cell_values(design: Design, factor: str) -> tuple[Array, Codes]:
    """The correlation in every cell of a factor, and the seed of the cell (0 if none)."""
    pairs = one_factor_pairs(design, factor)
    measure, target = design.ready.columns
    agreement = order(measure, pairs) * order(target, pairs)
    _, first, cell = np.unique(pairs.cell, return_index=True, return_inverse=True)
    values = np.bincount(cell, agreement) / np.bincount(cell)
    if design.seeds is None:
        return values, np.zeros(len(values), dtype=np.int64)
    return values, design.seeds[pairs.first[first]]


def _interval(
    design: Design,
    found: Mapping[str, tuple[Array, Codes]],
    level: float,
    resamples: int,
    generator: np.random.Generator,
) -> tuple[float, float, tuple[str, ...]]:
    """Resample seeds with all their cells."""
    many = 0 if design.seeds is None else int(design.seeds.max()) + 1
    if many < 2:
        told = "seeds are not told apart" if design.seeds is None else "there is one seed"
        return math.nan, math.nan, (f"no interval: {told}, so there is nothing to resample",)
    counts = resampled(many, resamples=resamples, generator=generator)
    total = np.zeros(resamples)
    for values, seeds in found.values():
        sums, sizes = np.bincount(seeds, values, many), np.bincount(seeds, minlength=many)
        drawn = counts @ sizes
        total += (counts @ sums) / np.where(drawn > 0, drawn, np.nan)
    means = total / len(found)
    low, high = interval(means, level=level, units=many)
    return low, high, doubts(means, low, high, units=many, unit="seeds")
