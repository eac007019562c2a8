"""Statistics that know the design: comparisons of networks that differ in one factor alone.

In: a frame with one row per network, the columns of a measure and a target, the factors that vary
by design, and the column of seeds. Out: `Statistic`. A plain correlation is high as soon as one
factor moves both sides; these are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatgauge.studies.statistics.bootstrap import (
    Array,
    check_drawing,
    check_generator,
    check_many,
    draw_resamples,
    interval,
    levels,
)
from flatgauge.studies.statistics.correlation import (
    Sides,
    Statistic,
    as_column,
    doubts,
    make_sides,
    without_value,
)

if TYPE_CHECKING:
    import pandas as pd

Codes = NDArray[np.int64]

#: A factor and the two levels that are compared.
Environment = tuple[str, object, object]

#: An entropy for each pair below this is rounding.
_NO_ENTROPY = 1e-12

_NO_PAIRS = "no two networks differ in one factor alone"


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
) -> Statistic:
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
        The mean over factors with its interval. In `details` the mean over the cells of each factor
        that has any, `by_factor`, and how many `cells` each has.
    """
    check_drawing(level=level, resamples=resamples, generator=generator)
    design = _design_of(frame, measure, target, factors, seed_column)
    if design.ready.reason:
        return without_value(design.ready, by_factor={}, cells={})
    found = {name: _cell_values(design, name) for name in design.factors}
    cells = {name: len(values) for name, (values, _) in found.items()}
    notes = design.ready.notes + tuple(_idle(design, n) for n, many in cells.items() if not many)
    found = {name: pair for name, pair in found.items() if cells[name]}
    count = design.ready.count
    details: dict[str, Any] = {"by_factor": {}, "cells": cells}
    if not found:
        return Statistic(math.nan, count=count, notes=notes, reason=_NO_PAIRS, details=details)
    by_factor = {name: float(values.mean()) for name, (values, _) in found.items()}
    low, high, more = _interval(design, found, level, resamples, generator)
    value = float(np.mean(list(by_factor.values())))
    details["by_factor"] = by_factor
    return Statistic(value, low, high, count, notes + more, details=details)


def sign_error(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    factors: Sequence[str],
    *,
    seed_column: str | None = "seed",
) -> Statistic:
    r"""How often a measure and the target disagree when one factor changes.

    An environment is a change of one factor between two levels, with all other factors and the
    seed kept. Its sign-error is the mean over its pairs of networks of

    .. math:: \tfrac12 \big(1 - \operatorname{sgn}(\mu - \mu')\operatorname{sgn}(g - g')\big),

    so 0 is always right, 1 always wrong, and a tie counts one half. A measure is robust if even
    its worst environment is good [dziugaite2020search]. Other than there, pairs are not weighted
    by how surely their targets differ.

    Args:
        frame: One row for each network.
        measure: The column of the measure.
        target: The column to be foretold.
        factors: The columns that vary by design.
        seed_column: The column of the seeds. None compares across seeds.

    Returns:
        The largest sign-error over environments. In `details` their `mean`, the `worst` of them,
        and all, `by_environment`.
    """
    design = _design_of(frame, measure, target, factors, seed_column)
    ready = design.ready
    if ready.reason:
        return without_value(ready, mean=math.nan, worst=None, by_environment={})
    found: dict[Environment, float] = {}
    notes = list(ready.notes)
    for name in design.factors:
        pairs = _one_factor_pairs(design, name)
        if not len(pairs.first):
            notes.append(_idle(design, name))
            continue
        errors = (1 - np.prod([_order(column, pairs) for column in ready.columns], axis=0)) / 2
        ends = np.stack([design.factors[name][side] for side in (pairs.first, pairs.second)])
        both, at = np.unique(np.sort(ends, axis=0), axis=1, return_inverse=True)
        means = np.bincount(at.reshape(-1), errors) / np.bincount(at.reshape(-1))
        for low, high, error in zip(*both, means, strict=True):
            label = design.labels[name]
            found[name, label[low], label[high]] = float(error)
    if not found:
        ready = Sides(ready.columns, tuple(notes), _NO_PAIRS)
        return without_value(ready, mean=math.nan, worst=None, by_environment={})
    worst = max(found, key=lambda environment: found[environment])
    mean = float(np.mean(list(found.values())))
    details = {"mean": mean, "worst": worst, "by_environment": found}
    return Statistic(found[worst], count=ready.count, notes=tuple(notes), details=details)


def conditional_information(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    factors: Sequence[str],
    *,
    largest: int = 2,
    permutations: int = 200,
    generator: np.random.Generator,
) -> Statistic:
    r"""What the measure tells about the target's order, given settings [jiang2020fantastic].

    For two networks let :math:`V_\mu` and :math:`V_g` be the signs of the differences of measure
    and target, and :math:`U_S` the levels that both networks have in the factors of a set
    :math:`S`. Over all ordered pairs of networks,

    .. math:: \min_{|S| \le 2} \frac{I(V_\mu; V_g \mid U_S)}{H(V_g \mid U_S)}

    is 1 if the measure settles the order whatever is known of the settings, and 0 if there are
    two settings whose knowledge leaves it nothing to tell. It has no direction: a measure that
    is always wrong tells as much as one that is always right.

    A pair with equal targets has no order to foretell and is left out; equal measures are a third
    outcome of :math:`V_\mu`. A set that leaves no doubt about the order (no entropy) is left out.
    Factors with one level only say nothing and are not asked.

    Counted frequencies always show some information, more so the fewer pairs there are with the
    same settings: two networks alone in a cell show all of it. `chance` is the same number for
    targets permuted among networks with equal settings; only what lies above it counts.

    Args:
        frame: One row for each network.
        measure: The column of the measure.
        target: The column to be foretold.
        factors: The columns that vary by design.
        largest: How many factors a set may have.
        permutations: How many permutations chance is taken from.
        generator: Source of randomness.

    Returns:
        The least information over all sets, from 0 to 1. In `details` the set that leaves it,
        `worst_set`; what this set gives on average for a measure without any, `chance`, and what
        such a measure exceeds in one of twenty cases only, `chance_high`; all sets, `by_set` and
        `chance_by_set`.

    Raises:
        ValueError: If `largest` is below 0.
    """
    check_many("permutations", permutations)
    check_generator(generator)
    if largest < 0:
        raise ValueError(f"`largest={largest}` must be a number of factors, at least 0.")
    design = _design_of(frame, measure, target, factors, None)
    ready = design.ready
    if ready.reason:
        return without_value(ready, chance=math.nan, chance_high=math.nan)
    names = design.varying_factors
    asked = [s for size in range(min(largest, len(names)) + 1) for s in combinations(names, size)]
    found, drawn, silent = {}, {}, []
    for chosen in asked:
        cells = _Cells(design, chosen)
        if not cells.doubt:
            silent.append(" and ".join(f"`{name}`" for name in chosen))
            continue
        found[chosen] = cells.share(np.arange(ready.count))
        orders = (cells.permutation(generator) for _ in range(permutations))
        drawn[chosen] = np.array([cells.share(order) for order in orders])
    notes = ready.notes + tuple(
        f"given {given} the order of all pairs is certain: set left out" for given in silent
    )
    worst = min(found, key=lambda chosen: found[chosen])
    chance = {chosen: float(values.mean()) for chosen, values in drawn.items()}
    high = float(np.quantile(drawn[worst], 0.95))
    details = {
        "chance": chance[worst],
        "chance_high": high,
        "by_set": found,
        "chance_by_set": chance,
        "worst_set": worst,
    }
    return Statistic(found[worst], count=ready.count, notes=notes, details=details)


# -- the design, and its pairs -------------------------------------------------------------------


@dataclass(frozen=True)
class Design:
    """Networks with a measure, a target and the levels of the factors they were trained with.

    Attributes:
        ready: The measure and the target, with what was left out.
        factors: By name, the number of the level that each network has.
        labels: By name, the levels themselves.
        seeds: The number of the seed that each network has; None if seeds do not matter.
    """

    ready: Sides
    factors: dict[str, Codes]
    labels: dict[str, list[object]]
    seeds: Codes | None

    @property
    def varying_factors(self) -> list[str]:
        """The factors that have more than one level."""
        return [name for name, codes in self.factors.items() if len(set(codes.tolist())) > 1]

    def group(self, names: Sequence[str], *, seeds: bool = False) -> Codes:
        """The number of each network's group of equal levels (and seeds, if asked), from 0 up."""
        columns = [self.factors[name] for name in names]
        if seeds and self.seeds is not None:
            columns.append(self.seeds)
        if not columns:
            return np.zeros(self.ready.count, dtype=np.int64)
        found: Codes = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1]
        return found.reshape(-1).astype(np.int64)


@dataclass(frozen=True)
class OneFactorPairs:
    """Pairs of networks that differ in one factor alone.

    Attributes:
        first: The one network of each pair.
        second: The other.
        cell: The number of the pair's cell: networks that agree in all but this factor.
    """

    first: Codes
    second: Codes
    cell: Codes


def _one_factor_pairs(design: Design, factor: str) -> OneFactorPairs:
    """All pairs that differ in a factor and agree in all others, and in the seed."""
    cell = design.group([name for name in design.factors if name != factor], seeds=True)
    level = design.factors[factor]
    together = np.equal.outer(cell, cell) & np.not_equal.outer(level, level)
    first, second = np.nonzero(np.triu(together))
    return OneFactorPairs(first, second, cell[first])


def _order(values: Array, pairs: OneFactorPairs) -> Array:
    """Which network of each pair has more: 1 the first, -1 the second, 0 neither."""
    one, other = values[pairs.first], values[pairs.second]
    return (one > other).astype(np.float64) - (one < other)


def _design_of(
    frame: pd.DataFrame, measure: str, target: str, factors: Sequence[str], seed_column: str | None
) -> Design:
    """A frame without the networks that lack a measure or a target."""
    import pandas as pd

    check_names("factors", factors)
    if seed_column in factors:
        raise ValueError(f"`{seed_column}` is both a factor and the seed; name it once.")
    seed_columns = [] if seed_column is None else [seed_column]
    check_columns(frame, [measure, target, *factors, *seed_columns])
    ready = make_sides((measure, target), (frame[measure], frame[target]), finite=False)
    gaps = [np.isnan(as_column(frame[name], name)) for name in (measure, target)]
    usable = frame[~(gaps[0] | gaps[1])]
    codes, labels = {}, {}
    for name in [*factors, *seed_columns]:
        found, levels = pd.factorize(usable[name], sort=False, use_na_sentinel=False)
        codes[name], labels[name] = found.astype(np.int64), list(levels)
    seeds = None if seed_column is None else codes.pop(seed_column)
    return Design(ready, codes, labels, seeds)


def check_names(argument: str, names: Sequence[str]) -> None:
    """Refuse a lone name, no name, and names that are given twice."""
    if isinstance(names, str):
        raise TypeError(f"`{argument}={names!r}` must be a list of columns; give [{names!r}].")
    if not list(names):
        raise ValueError(f"`{argument}` is empty; name at least one column.")
    if len(set(names)) < len(names):
        raise ValueError(f"`{argument}={list(names)}` names a column twice; name each once.")


def check_columns(frame: pd.DataFrame, names: Sequence[str]) -> None:
    """Refuse columns that the frame does not have, and name those that it has."""
    if missing := [name for name in names if name not in frame.columns]:
        wanted = ", ".join(f"`{name}`" for name in missing)
        raise KeyError(f"the frame has no column {wanted}; it has {', '.join(map(str, frame))}.")


def _idle(design: Design, factor: str) -> str:
    """Why a factor has no pairs."""
    if factor not in design.varying_factors:
        return f"`{factor}` has one level only"
    return f"no two networks differ in `{factor}` alone"


def _cell_values(design: Design, factor: str) -> tuple[Array, Codes]:
    """The correlation in every cell of a factor, and the seed of the cell (0 if none)."""
    pairs = _one_factor_pairs(design, factor)
    measure, target = design.ready.columns
    agreement = _order(measure, pairs) * _order(target, pairs)
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
        why = "seeds are not told apart" if design.seeds is None else "there is one seed"
        return math.nan, math.nan, (f"no interval: {why}, so there is nothing to resample",)
    counts = draw_resamples(many, resamples=resamples, generator=generator)
    total = np.zeros(resamples)
    for values, seeds in found.values():
        sums, sizes = np.bincount(seeds, values, many), np.bincount(seeds, minlength=many)
        drawn = counts @ sizes
        total += (counts @ sums) / np.where(drawn > 0, drawn, np.nan)
    means = total / len(found)
    low, high = interval(means, level=level, units=many)
    return low, high, doubts(means, low, high, units=many, unit="seeds")


class _Cells:
    """All ordered pairs of networks, sorted into cells by the settings of both."""

    def __init__(self, design: Design, chosen: Sequence[str]) -> None:
        measure, self._target = (levels(column) for column in design.ready.columns)
        self._group = design.group(chosen)
        self._many = int(self._group.max()) + 1
        self._pairs = np.triu_indices(len(measure), 1)
        cell = self._many * self._group[self._pairs[0]] + self._group[self._pairs[1]]
        # Nine outcomes in every cell: three of the measure, three of the target.
        self._start = 9 * cell + 3 * self._compare(measure)
        counts = self._counts(np.arange(len(measure)))
        self.entropy = _sum(counts.sum((1, 2))) - _sum(counts.sum(1))
        #: Whether the settings leave the order of any pair open.
        self.doubt = self.entropy > _NO_ENTROPY * counts.sum()

    def share(self, order: Codes) -> float:
        """The information in units of the entropy, with the targets taken in another order."""
        counts = self._counts(order)
        left = _sum(counts.sum(2)) - _sum(counts)
        return float(np.clip(1 - left / self.entropy, 0.0, 1.0))

    def permutation(self, generator: np.random.Generator) -> Codes:
        """An order that mixes the networks of each group among themselves."""
        order = np.empty(len(self._group), dtype=np.int64)
        mixed = np.lexsort((generator.random(len(order)), self._group))
        order[np.argsort(self._group, kind="stable")] = mixed
        return order

    def _counts(self, order: Codes) -> Array:
        """How often each outcome occurs, `(cells, measure, target)`, without ties of the target."""
        outcome = self._start + self._compare(self._target[order])
        counts = np.bincount(outcome, minlength=9 * self._many**2)
        counts = counts.reshape(self._many, self._many, 3, 3)
        # The same pairs the other way round: networks change places, and so do the signs.
        counts = counts + counts.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]
        return counts.reshape(-1, 3, 3)[:, :, [0, 2]].astype(np.float64)

    def _compare(self, values: Codes) -> Codes:
        """2 if the first network of a pair has more, 1 if they are equal, 0 if it has less."""
        one, other = values[self._pairs[0]], values[self._pairs[1]]
        return (one > other).astype(np.int64) + (one >= other)


def _sum(counts: Array) -> float:
    """The sum of n log n. That of the cells less that of the outcomes is the pairs' entropy."""
    positive = counts[counts > 0]
    return float((positive * np.log(positive)).sum())
