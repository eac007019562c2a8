"""The design of a study: which networks differ in one factor alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatgauge.studies.statistics.resampling import Array
from flatgauge.studies.statistics.sides import Sides, as_column, sides

if TYPE_CHECKING:
    import pandas as pd

Codes = NDArray[np.int64]


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
    def varied(self) -> list[str]:
        """The factors that have more than one level."""
        return [name for name, codes in self.factors.items() if len(set(codes.tolist())) > 1]

    def group(self, names: Sequence[str], *, seeds: bool = False) -> Codes:
        """Number the groups of networks that have the same levels.

        Args:
            names: The factors to look at; with none, all networks are one group.
            seeds: Whether the seed must be the same too.

        Returns:
            The number of each network's group, from 0 up.
        """
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


def one_factor_pairs(design: Design, factor: str) -> OneFactorPairs:
    """Find all pairs that differ in a factor and agree in all others, and in the seed.

    Args:
        design: The networks.
        factor: The factor that differs.

    Returns:
        Every such pair once.
    """
    cell = design.group([name for name in design.factors if name != factor], seeds=True)
    level = design.factors[factor]
    together = np.equal.outer(cell, cell) & np.not_equal.outer(level, level)
    first, second = np.nonzero(np.triu(together))
    return OneFactorPairs(first, second, cell[first])


def order(values: Array, pairs: OneFactorPairs) -> Array:
    """Which network of each pair has more: 1 the first, -1 the second, 0 neither.

    Args:
        values: One number for each network; infinite ones are ordered too.
        pairs: The pairs.

    Returns:
        The signs.
    """
    one, other = values[pairs.first], values[pairs.second]
    return (one > other).astype(np.float64) - (one < other)


def design_of(
    frame: pd.DataFrame, measure: str, target: str, factors: Sequence[str], seed_column: str | None
) -> Design:
    """Read a study's frame, leaving out networks without a measure or a target.

    Args:
        frame: One row for each network.
        measure: The column of the measure.
        target: The column to be foretold.
        factors: The columns that vary by design.
        seed_column: The column of the seeds; None if seeds do not matter.

    Returns:
        The design.

    Raises:
        ValueError: If there is no factor, or the seed is one.
    """
    import pandas as pd

    check_names("factors", factors)
    if seed_column in factors:
        raise ValueError(f"`{seed_column}` is both a factor and the seed; name it once.")
    seed_columns = [] if seed_column is None else [seed_column]
    check_columns(frame, [measure, target, *factors, *seed_columns])
    ready = sides((measure, target), (frame[measure], frame[target]), finite=False)
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


def idle(design: Design, factor: str) -> str:
    """Say why a factor has no pairs.

    Args:
        design: The networks.
        factor: A factor without pairs.

    Returns:
        A sentence.
    """
    if factor not in design.varied:
        return f"`{factor}` has one level only"
    return f"no two networks differ in `{factor}` alone"
