"""All statistics of all measures of a study in one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.studies.statistics.confounding import confounding
from flatgauge.studies.statistics.correlation import correlate
from flatgauge.studies.statistics.design import check_columns, check_names
from flatgauge.studies.statistics.granulated import granulated_kendall
from flatgauge.studies.statistics.information import conditional_information
from flatgauge.studies.statistics.sign_error import sign_error

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
    drawing: dict[str, Any] = {"level": level, "resamples": resamples}
    rows = {}
    for measure in measures:
        row, notes = _plain(frame, measure, target, seed, drawing)
        within, more, told, further = {}, [], {}, []
        if factors:
            within, more = _within(frame, measure, target, factors, seed_column, seed, drawing)
            told, further = _told(frame, measure, target, factors, seed_column, seed, permutations)
        beside, last = _beside(frame, measure, target, confounders, seed, drawing)
        notes = notes + more + further + last
        rows[measure] = {**row, **within, **told, **beside, "notes": "; ".join(_once(notes))}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("measure")
    return table[[*table.columns.drop(["count", "notes"]), "count", "notes"]]


def triple(name: str, result: Any) -> dict[str, float]:
    """A value with its interval as three columns.

    Args:
        name: The column of the value.
        result: Anything with `value`, `low` and `high`.

    Returns:
        The numbers by column.
    """
    return {name: result.value, f"{name}_low": result.low, f"{name}_high": result.high}


def remarks(name: str, result: Any) -> list[str]:
    """What must be known about a result, with the column it is about.

    Args:
        name: The column.
        result: Anything with `notes` and `reason`.

    Returns:
        Sentences.
    """
    said = [f"{name}: no value, {result.reason}"] if result.reason else []
    return said + [f"{name}: {note}" for note in result.notes]


def _once(notes: Sequence[str]) -> list[str]:
    """Say the same about several columns once."""
    about: dict[str, list[str]] = {}
    for note in notes:
        name, _, text = note.partition(": ")
        about.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}" for text, names in about.items()]


def _plain(
    frame: pd.DataFrame, measure: str, target: str, seed: int, drawing: dict[str, Any]
) -> tuple[dict[str, float], list[str]]:
    """Correlations over all networks."""
    row: dict[str, float] = {}
    notes: list[str] = []
    for name, (kind, log) in _PLAIN.items():
        found = correlate(
            frame[measure],
            frame[target],
            kind=kind,
            log=log,
            names=(measure, target),
            generator=np.random.default_rng(seed),
            **drawing,
        )
        row |= triple(name, found) | {"count": found.count}
        notes += remarks(name, found)
    return row, notes


def _within(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    factors: Sequence[str],
    seed_column: str | None,
    seed: int,
    drawing: dict[str, Any],
) -> tuple[dict[str, float], list[str]]:
    """Kendall's correlation where one factor varies at a time."""
    generator = np.random.default_rng(seed)
    found = granulated_kendall(
        frame, measure, target, factors, seed_column=seed_column, generator=generator, **drawing
    )
    row = triple("granulated", found)
    row |= {f"granulated[{name}]": found.by_factor.get(name, np.nan) for name in factors}
    return row, remarks("granulated", found)


def _told(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    factors: Sequence[str],
    seed_column: str | None,
    seed: int,
    permutations: int,
) -> tuple[dict[str, float], list[str]]:
    """Information beyond the factors, and sign-errors."""
    generator = np.random.default_rng(seed)
    found = conditional_information(
        frame, measure, target, factors, permutations=permutations, generator=generator
    )
    wrong = sign_error(frame, measure, target, factors, seed_column=seed_column)
    row = {
        "information": found.value,
        "information_chance": found.chance,
        "information_chance_high": found.chance_high,
        "sign_error_mean": wrong.mean,
        "sign_error_worst": wrong.worst,
    }
    return row, remarks("information", found) + remarks("sign_error", wrong)


def _beside(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    confounders: Sequence[str],
    seed: int,
    drawing: dict[str, Any],
) -> tuple[dict[str, float], list[str]]:
    """Partial correlations given each confounder, and given all."""
    if not confounders:
        return {}, []
    generator = np.random.default_rng(seed)
    found = confounding(frame, measure, target, confounders, generator=generator, **drawing)
    partial = {name: beside.partial for name, beside in found.confounders.items()}
    row: dict[str, float] = {}
    notes: list[str] = []
    for name, result in {**partial, "all": found.together}.items():
        row |= triple(f"partial[{name}]", result)
        notes += remarks(f"partial[{name}]", result)
    return row, notes
