"""All statistics of all measures of a pool as frames, one row per measure.

In: a frame with one row per network. Out: `correlation_table`, every statistic of this package in
columns; `before_after_table`, what a rescaling of the networks does to the correlations. All
measures are resampled alike, so a measure's row does not depend on which others are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.studies.statistics.bootstrap import Array
from flatgauge.studies.statistics.confounding import confounding
from flatgauge.studies.statistics.correlation import (
    Statistic,
    as_column,
    correlate,
    correlation_difference,
)
from flatgauge.studies.statistics.design import (
    check_columns,
    check_names,
    conditional_information,
    granulated_kendall,
    sign_error,
)

if TYPE_CHECKING:
    import pandas as pd

#: Columns of plain correlations: the coefficient, and whether the measure's logarithm is taken.
_PLAIN = {
    "pearson": ("pearson", False),
    "pearson_log": ("pearson", True),
    "spearman": ("spearman", False),
    "kendall": ("kendall", False),
}


def correlation_table(
    frame: pd.DataFrame,
    *,
    measures: Sequence[str],
    target: str,
    factors: Sequence[str],
    confounders: Sequence[str] = (),
    seed_column: str | None = "seed",
    level: float = 0.95,
    resamples: int = 2000,
    permutations: int = 200,
    seed: int = 0,
) -> pd.DataFrame:
    """Set all statistics of all measures side by side.

    Every row of the frame enters, so leave out networks that did not finish training first. All
    measures are resampled alike, so a measure's row does not depend on which others are there.
    A number that does not exist is missing, and `notes` says why.

    Args:
        frame: One row for each network.
        measures: The columns of the measures.
        target: The column to be foretold, such as the accuracy gap.
        factors: The columns that vary by design.
        confounders: Further columns of numbers that may explain a correlation.
        seed_column: The column of the seeds; None if seeds do not matter.
        level: How often the intervals shall hold the true value.
        resamples: How many times to resample.
        permutations: How many permutations the level of chance is taken from.
        seed: Where all randomness starts.

    Returns:
        One row for each measure. `pearson`, `pearson_log` (of the measure's logarithm),
        `spearman` and `kendall`: 1 means the target rises with the measure, 0 that they have
        nothing to do with each other, -1 that it falls. `granulated`: Kendall's where one factor
        varies at a time, also by factor as `granulated[factor]`. Each of these has an interval,
        `..._low` to `..._high`. `information`: what the measure tells beyond any two factors,
        from 0 to 1, to be held against `information_chance`. `sign_error_mean` and
        `sign_error_worst`: how often it orders two networks wrongly. `partial[confounder]`:
        Spearman's once the confounder is accounted for, `partial[all]` for all of them.
        `count`: on how many networks the rank correlations rest. `notes`: what else to know.
    """
    import pandas as pd

    check_names("measures", measures)
    if factors:
        check_names("factors", factors)
    check_columns(frame, [*measures, target, *factors, *confounders])
    rows = {}
    for measure in measures:
        row: dict[str, Any] = {}
        found = _statistics(
            frame,
            measure,
            target,
            factors,
            confounders,
            seed_column,
            level,
            resamples,
            permutations,
            seed,
            row,
        )
        rows[measure] = row | {"notes": "; ".join(_join_notes(found))}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("measure")
    return table[[*table.columns.drop(["count", "notes"]), "count", "notes"]]


def _statistics(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    factors: Sequence[str],
    confounders: Sequence[str],
    seed_column: str | None,
    level: float,
    resamples: int,
    permutations: int,
    seed: int,
    row: dict[str, Any],
) -> dict[str, Statistic]:
    """All statistics of a measure by column; their numbers enter the row."""
    drawing: dict[str, Any] = {"level": level, "resamples": resamples}
    found: dict[str, Statistic] = {}
    for name, (kind, log) in _PLAIN.items():
        found[name] = correlate(
            frame[measure],
            frame[target],
            kind=kind,
            log=log,
            names=(measure, target),
            generator=np.random.default_rng(seed),
            **drawing,
        )
        row |= _triple(name, found[name]) | {"count": found[name].count}
    if factors:
        source = np.random.default_rng(seed)
        within = found["granulated"] = granulated_kendall(
            frame, measure, target, factors, seed_column=seed_column, generator=source, **drawing
        )
        by_factor = within.details["by_factor"]
        row |= _triple("granulated", within)
        row |= {f"granulated[{name}]": by_factor.get(name, np.nan) for name in factors}
        known = found["information"] = conditional_information(
            frame,
            measure,
            target,
            factors,
            permutations=permutations,
            generator=np.random.default_rng(seed),
        )
        row |= {
            "information": known.value,
            "information_chance": known.details["chance"],
            "information_chance_high": known.details["chance_high"],
        }
        wrong = found["sign_error"] = sign_error(
            frame, measure, target, factors, seed_column=seed_column
        )
        row |= {"sign_error_mean": wrong.details["mean"], "sign_error_worst": wrong.value}
    if confounders:
        source = np.random.default_rng(seed)
        given = confounding(frame, measure, target, confounders, generator=source, **drawing)
        partial = {name: parts["partial"] for name, parts in given.confounders.items()}
        for name, result in {**partial, "all": given.together}.items():
            found[f"partial[{name}]"] = result
            row |= _triple(f"partial[{name}]", result)
    return found


def _triple(name: str, result: Statistic) -> dict[str, float]:
    """A value with its interval as three columns."""
    return {name: result.value, f"{name}_low": result.low, f"{name}_high": result.high}


def _remarks(name: str, result: Statistic) -> list[str]:
    """What must be known about a statistic, with the column it is about."""
    reason = [f"{name}: no value, {result.reason}"] if result.reason else []
    return reason + [f"{name}: {note}" for note in result.notes]


def _join_notes(found: Mapping[str, Statistic]) -> list[str]:
    """The notes of all columns; the same note about several columns once."""
    about: dict[str, list[str]] = {}
    for column, result in found.items():
        for note in _remarks(column, result):
            name, _, text = note.partition(": ")
            about.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}" for text, names in about.items()]


def before_after_table(
    frame: pd.DataFrame,
    rescaled: pd.DataFrame,
    *,
    measures: Sequence[str],
    target: str,
    kind: str = "spearman",
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Correlate every measure with the target before and after the networks were rescaled.

    Rescaling keeps what the networks compute, so the target is taken from the first frame for
    both. A measure that is invariant keeps its value and its correlation.

    Args:
        frame: One row for each network.
        rescaled: The same rows, with the measures taken anew after rescaling.
        measures: The columns of the measures.
        target: The column to be foretold.
        kind: `"pearson"`, `"spearman"` or `"kendall"`.
        level: How often the intervals shall hold the true value.
        resamples: How many times to resample.
        seed: Where all randomness starts.

    Returns:
        One row for each measure: the correlation `before` and `after`, how much was `lost`, each
        with its interval `..._low` to `..._high`; `itself`, Spearman's correlation of the measure
        with itself, 1 if rescaling leaves the order of the networks alone; `largest_change`, the
        largest relative change of a value; `count` and `notes`.

    Raises:
        ValueError: If the frames have different rows, or a row twice.
    """
    import pandas as pd

    check_names("measures", measures)
    check_columns(frame, [*measures, target])
    check_columns(rescaled, measures)
    if not (frame.index.is_unique and rescaled.index.is_unique):
        raise ValueError("a row's name occurs twice; name every network once in the index.")
    if set(frame.index) != set(rescaled.index):
        raise ValueError(
            f"the frames have different rows ({len(frame)} and {len(rescaled)}); "
            "give the same networks before and after rescaling, with the same index."
        )
    after = rescaled.loc[frame.index]
    drawing: dict[str, Any] = {"level": level, "resamples": resamples}
    rows = {
        measure: _row(frame[target], frame[measure], after[measure], kind, seed, drawing)
        for measure in measures
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("measure")


def largest_change(before: Array, after: Array) -> float:
    """The largest of |after - before| / |before|; nan if no network has both values."""
    known = ~(np.isnan(before) | np.isnan(after))
    moved = known & (before != after)
    if not known.any():
        return math.nan
    changes = [
        abs(new / old - 1.0) if old and math.isfinite(old) else math.inf
        for old, new in zip(before[moved].tolist(), after[moved].tolist(), strict=True)
    ]
    return max(changes, default=0.0)


def _row(
    target: pd.Series[Any],
    before: pd.Series[Any],
    after: pd.Series[Any],
    kind: str,
    seed: int,
    drawing: dict[str, Any],
) -> dict[str, Any]:
    """One measure before and after."""

    def against(x: Any, y: Any, how: str, names: tuple[str, str]) -> Any:
        source = np.random.default_rng(seed)
        return correlate(x, y, kind=how, names=names, generator=source, **drawing)

    aim = str(target.name)
    first = against(before, target, kind, ("before", aim))
    second = against(after, target, kind, ("after", aim))
    same = against(before, after, "spearman", ("before", "after"))
    lost = correlation_difference(
        before,
        after,
        target,
        kind=kind,
        names=("before", "after", aim),
        generator=np.random.default_rng(seed),
        **drawing,
    )
    found = {"before": first, "after": second, "lost": lost}
    notes = [
        note
        for name, result in {**found, "itself": same}.items()
        for note in _remarks(name, result)
    ]
    row: dict[str, Any] = {}
    for name, result in found.items():
        row |= _triple(name, result)
    row["itself"] = same.value
    row["largest_change"] = largest_change(as_column(before, "before"), as_column(after, "after"))
    return row | {"count": lost.count, "notes": "; ".join(dict.fromkeys(notes))}
