"""What a measure tells about the order of two networks that their settings do not tell already."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from flatgauge.studies.statistics.design import Codes, Design, design_of
from flatgauge.studies.statistics.resampling import Array, check_generator, check_many
from flatgauge.studies.statistics.weighted import levels

if TYPE_CHECKING:
    import pandas as pd

Factors = tuple[str, ...]

#: An entropy for each pair below this is rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Information:
    """The normalized conditional mutual information, or the reason why there is none.

    Attributes:
        value: The least over all sets of factors, from 0 to 1; nan if there is none.
        chance: What `worst_set` gives on average for a measure without any information.
        chance_high: What such a measure exceeds in one of twenty cases only.
        by_set: The information given each set of factors.
        chance_by_set: What chance alone gives for each set.
        worst_set: The set that leaves least.
        count: How many networks it rests on.
        notes: What was left out.
        reason: Why there is no value, in a few words; empty if there is one.
    """

    value: float
    chance: float
    chance_high: float
    count: int
    by_set: Mapping[Factors, float] = field(default_factory=dict)
    chance_by_set: Mapping[Factors, float] = field(default_factory=dict)
    worst_set: Factors = ()
    notes: tuple[str, ...] = ()
    reason: str = ""


def conditional_information(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    factors: Sequence[str],
    *,
    largest: int = 2,
    permutations: int = 200,
    generator: np.random.Generator,
) -> Information:
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
        The information with its level of chance, by set too.

    Raises:
        ValueError: If `largest` is below 0.
    """
    check_many("permutations", permutations)
    check_generator(generator)
    if largest < 0:
        raise ValueError(f"`largest={largest}` must be a number of factors, at least 0.")
    design = design_of(frame, measure, target, factors, None)
    nan, ready = math.nan, design.ready
    if ready.reason:
        return Information(nan, nan, nan, ready.count, notes=ready.notes, reason=ready.reason)
    names = design.varied
    asked = [s for size in range(min(largest, len(names)) + 1) for s in combinations(names, size)]
    found, drawn, silent = {}, {}, []
    for chosen in asked:
        cells = _Cells(design, chosen)
        if not cells.doubt:
            silent.append(" and ".join(f"`{name}`" for name in chosen))
            continue
        found[chosen] = cells.share(np.arange(ready.count))
        orders = (cells.permuted(generator) for _ in range(permutations))
        drawn[chosen] = np.array([cells.share(order) for order in orders])
    notes = ready.notes + tuple(
        f"given {given} the order of all pairs is certain: set left out" for given in silent
    )
    worst = min(found, key=lambda chosen: found[chosen])
    chance = {chosen: float(values.mean()) for chosen, values in drawn.items()}
    high = float(np.quantile(drawn[worst], 0.95))
    return Information(found[worst], chance[worst], high, ready.count, found, chance, worst, notes)


class _Cells:
    """All ordered pairs of networks, sorted into cells by the settings of both."""

    def __init__(self, design: Design, chosen: Sequence[str]) -> None:
        measure, self._target = (levels(column) for column in design.ready.columns)
        self._group = design.group(chosen)
        self._many = int(self._group.max()) + 1
        self._pairs = np.triu_indices(len(measure), 1)
        cell = self._many * self._group[self._pairs[0]] + self._group[self._pairs[1]]
        # Nine outcomes in every cell: three of the measure, three of the target.
        self._start = 9 * cell + 3 * self._compared(measure)
        counts = self._counts(np.arange(len(measure)))
        self.entropy = _sum(counts.sum((1, 2))) - _sum(counts.sum(1))
        #: Whether the settings leave the order of any pair open.
        self.doubt = self.entropy > _ROUNDING * counts.sum()

    def share(self, order: Codes) -> float:
        """The information in units of the entropy, with the targets taken in another order."""
        counts = self._counts(order)
        left = _sum(counts.sum(2)) - _sum(counts)
        return float(np.clip(1 - left / self.entropy, 0.0, 1.0))

    def permuted(self, generator: np.random.Generator) -> Codes:
        """An order that mixes the networks of each group among themselves."""
        order = np.empty(len(self._group), dtype=np.int64)
        mixed = np.lexsort((generator.random(len(order)), self._group))
        order[np.argsort(self._group, kind="stable")] = mixed
        return order

    def _counts(self, order: Codes) -> Array:
        """How often each outcome occurs, `(cells, measure, target)`, without ties of the target."""
        outcome = self._start + self._compared(self._target[order])
        counts = np.bincount(outcome, minlength=9 * self._many**2)
        counts = counts.reshape(self._many, self._many, 3, 3)
        # The same pairs the other way round: networks change places, and so do the signs.
        counts = counts + counts.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]
        return counts.reshape(-1, 3, 3)[:, :, [0, 2]].astype(np.float64)

    def _compared(self, values: Codes) -> Codes:
        """2 if the first network of a pair has more, 1 if they are equal, 0 if it has less."""
        one, other = values[self._pairs[0]], values[self._pairs[1]]
        return (one > other).astype(np.int64) + (one >= other)


def _sum(counts: Array) -> float:
    """The sum of n log n. That of the cells less that of the outcomes is the pairs' entropy."""
    positive = counts[counts > 0]
    return float((positive * np.log(positive)).sum())
