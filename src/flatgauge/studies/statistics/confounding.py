"""Whether a third column explains why a measure follows the target.

In: the columns of a measure, a target and possible confounders. Out: `Statistic`, Spearman's
correlation of what the confounders leave of the other two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.studies.statistics.bootstrap import (
    Array,
    check_drawing,
    constant,
    draw_resamples,
    midranks,
    product_moment,
)
from flatgauge.studies.statistics.correlation import (
    Sides,
    Statistic,
    all_the_same,
    correlate,
    make_sides,
    with_interval,
    without_value,
)
from flatgauge.studies.statistics.design import check_columns, check_names

if TYPE_CHECKING:
    import pandas as pd

#: A share of variance below this is rounding: nothing is left once the rest is known.
_NOTHING = 1e-9


@dataclass(frozen=True)
class Confounding:
    """A measure beside the columns that may explain its correlation.

    Attributes:
        plain: Spearman's correlation of measure and target.
        confounders: By name of a column, `with_target`: how well the column itself follows the
            target (Spearman), `with_measure`: how well the measure follows it, and `partial`: how
            well the measure follows the target once the column is accounted for.
        together: The partial correlation with all columns accounted for.
    """

    plain: Statistic
    confounders: Mapping[str, Mapping[str, Statistic]]
    together: Statistic


def partial_correlation(
    x: Any,
    y: Any,
    given: Mapping[str, Any],
    *,
    names: tuple[str, str] = ("x", "y"),
    level: float = 0.95,
    resamples: int = 2000,
    generator: np.random.Generator,
) -> Statistic:
    """Spearman's correlation of what other columns leave of two columns.

    All columns are turned into ranks, the ranks of `x` and `y` are each fitted by a plane in the
    ranks of the given columns, and what is left over is correlated. If nothing is left of a
    side, or all given columns are the same for all networks, there is no value and `reason` says
    why. The interval comes from a bootstrap over networks, with new ranks and fits each time.

    Args:
        x: The measure, one number for each network.
        y: The target, in the same order.
        given: The columns to account for, by name.
        names: How the two sides are called in notes.
        level: How often the interval shall hold the true value.
        resamples: How many times to resample.
        generator: Source of randomness.

    Returns:
        The partial correlation with its interval.

    Raises:
        ValueError: If no column is given.
    """
    check_drawing(level=level, resamples=resamples, generator=generator)
    if not given:
        raise ValueError("`given` is empty; name at least one column to account for.")
    ready = make_sides((*names, *given), (x, y, *given.values()), finite=False)
    ready, kept = _without_constants(ready, list(given))
    if ready.reason:
        return without_value(ready)
    if ready.count < len(kept) + 3:
        return without_value(ready, f"fewer than {len(kept) + 3} networks")
    value = _partial(np.ones((1, ready.count)), ready.columns)[0]
    if np.isnan(value):
        return without_value(ready, f"{' and '.join(kept)}: nothing is left")
    counts = draw_resamples(ready.count, resamples=resamples, generator=generator)
    return with_interval(float(value), _partial(counts, ready.columns), ready, level)


def confounding(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    confounders: Sequence[str],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    generator: np.random.Generator,
) -> Confounding:
    """Set a measure beside columns that may explain why it follows the target.

    A learning rate, the training loss or the norm of the weights may foretell the target on its
    own. If the measure's partial correlation given such a column is near 0, the measure has told
    nothing that the column had not; if it stays, it has.

    Args:
        frame: One row for each network.
        measure: The column of the measure.
        target: The column to be foretold.
        confounders: The columns to account for; they must hold numbers.
        level: How often the intervals shall hold the true value.
        resamples: How many times to resample.
        generator: Source of randomness.

    Returns:
        The plain correlation, each column on its own, and all columns together.
    """
    check_names("confounders", confounders)
    check_columns(frame, [measure, target, *confounders])
    x, y, given = frame[measure], frame[target], {name: frame[name] for name in confounders}
    drawing: dict[str, Any] = {"level": level, "resamples": resamples, "generator": generator}

    def rank_correlation(one: str, other: str) -> Statistic:
        pair = (one, other)
        return correlate(frame[one], frame[other], kind="spearman", names=pair, **drawing)

    def partial(names: Sequence[str]) -> Statistic:
        chosen = {name: given[name] for name in names}
        return partial_correlation(x, y, chosen, names=(measure, target), **drawing)

    each = {
        name: {
            "with_target": rank_correlation(name, target),
            "with_measure": rank_correlation(measure, name),
            "partial": partial([name]),
        }
        for name in confounders
    }
    return Confounding(rank_correlation(measure, target), each, partial(confounders))


def _without_constants(ready: Sides, names: list[str]) -> tuple[Sides, list[str]]:
    """Leave out given columns that are the same for all networks; they can explain nothing."""
    x, y, *given = ready.columns
    if ready.count == 0:
        return ready, names
    kept = [name for name, column in zip(names, given, strict=True) if not all_the_same(column)]
    if not kept or all_the_same(x) or all_the_same(y):
        return ready, names
    left = [column for name, column in zip(names, given, strict=True) if name in kept]
    reason = "" if ready.reason.endswith("all the same") else ready.reason
    gone = tuple(f"`{name}` is all the same: left out" for name in names if name not in kept)
    return Sides((x, y, *left), ready.notes + gone, reason), kept


def _partial(counts: Array, columns: Sequence[Array]) -> Array:
    """The partial correlation in every resample; nan where nothing is left of a side."""
    ranks = [midranks(counts, column) for column in columns]
    size = len(ranks)
    table = np.ones((len(counts), size, size))
    for i in range(size):
        for j in range(i):
            table[:, i, j] = table[:, j, i] = product_moment(counts, ranks[i], ranks[j])
    # A confounder that does not vary in a resample explains nothing there.
    for i in range(2, size):
        flat = constant(counts, columns[i])
        table[flat, i, :] = table[flat, :, i] = 0.0
        table[flat, i, i] = 1.0
    side = np.isnan(table).any((1, 2))
    table[side] = np.eye(size)
    across = table[:, :2, 2:]
    # Ranks of confounders that move together leave no unique fit, but a unique remainder.
    fitted = across @ np.linalg.pinv(table[:, 2:, 2:], hermitian=True) @ across.transpose(0, 2, 1)
    rest = table[:, :2, :2] - fitted
    nothing = (rest[:, 0, 0] < _NOTHING) | (rest[:, 1, 1] < _NOTHING) | side
    spread = np.sqrt(np.where(nothing, 1.0, rest[:, 0, 0] * rest[:, 1, 1]))
    return np.where(nothing, np.nan, np.clip(rest[:, 0, 1] / spread, -1.0, 1.0))
