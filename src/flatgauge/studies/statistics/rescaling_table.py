"""What random rescaling does to the correlation of every measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flatgauge.studies.statistics.comparison import correlation_difference
from flatgauge.studies.statistics.correlation import correlate
from flatgauge.studies.statistics.design import check_columns, check_names
from flatgauge.studies.statistics.resampling import Array
from flatgauge.studies.statistics.sides import as_column
from flatgauge.studies.statistics.table import remarks, triple

if TYPE_CHECKING:
    import pandas as pd


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
    """The largest relative change of a value.

    Args:
        before: The values at first.
        after: The values afterwards.

    Returns:
        The largest of |after - before| / |before|; infinite where a value becomes or stops being
        infinite or leaves 0, nan if no network has both values.
    """
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
        note for name, result in {**found, "itself": same}.items() for note in remarks(name, result)
    ]
    row: dict[str, Any] = {}
    for name, result in found.items():
        row |= triple(name, result)
    row["itself"] = same.value
    row["largest_change"] = largest_change(as_column(before, "before"), as_column(after, "after"))
    return row | {"count": lost.count, "notes": "; ".join(dict.fromkeys(notes))}
