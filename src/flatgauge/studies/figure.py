"""A number of a paper, and how the same number comes out here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published number to stand beside.

    Attributes:
        source: Where it is printed.
        what: What it is, in words.
        published: As it is printed.
        statistic: ``"mean"`` over networks, ``"pearson"`` or ``"spearman"`` correlation with the
            target, or ``"change"``: the median relative change by the rescaling.
        column: Of the study's table; ``"kappa_trace_sum[fc1]"`` is the value of one layer.
        where: The networks that count, by value of a column; all if empty.
    """

    source: str
    what: str
    published: str
    statistic: str
    column: str
    where: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.statistic not in _STATISTICS:
            raise ValueError(
                f"`statistic={self.statistic!r}` is unknown; use one of {', '.join(_STATISTICS)}."
            )

    def ours(self, frame: pd.DataFrame, rescaled: pd.DataFrame | None, target: str) -> str:
        """The same number of a study.

        Args:
            frame: One row per network that counts.
            rescaled: The same after rescaling.
            target: The column that flatness is to follow.

        Returns:
            The number as text, with its deviation or the number of networks; a dash where there
            is none.
        """
        for name, value in self.where.items():
            frame = frame[frame[name] == value]
            rescaled = None if rescaled is None else rescaled[rescaled[name] == value]
        if self.column not in frame or frame[self.column].dropna().empty:
            return "—"
        return _STATISTICS[self.statistic](frame, rescaled, self.column, target)


def _mean(frame: pd.DataFrame, rescaled: pd.DataFrame | None, column: str, target: str) -> str:
    """Mean and standard deviation over networks."""
    values = frame[column].dropna()
    unit = ""
    if column.endswith("accuracy"):
        values, unit = 100 * values, " %"
    spread = f" ± {values.std():.2g}" if len(values) > 1 else ""
    return f"{values.mean():.4g}{spread}{unit} (n = {len(values)})"


def _pearson(frame: pd.DataFrame, rescaled: pd.DataFrame | None, column: str, target: str) -> str:
    """Linear correlation with the target."""
    return _correlation(frame, column, target, "pearson")


def _spearman(frame: pd.DataFrame, rescaled: pd.DataFrame | None, column: str, target: str) -> str:
    """Rank correlation with the target."""
    return _correlation(frame, column, target, "spearman")


def _change(frame: pd.DataFrame, rescaled: pd.DataFrame | None, column: str, target: str) -> str:
    """How much a measure moves when the network is rewritten."""
    if rescaled is None or column not in rescaled:
        return "—"
    changes = ((rescaled[column] - frame[column]) / frame[column]).abs().dropna()
    return f"{changes.median():.1e} (n = {len(changes)})" if len(changes) else "—"


def _correlation(frame: pd.DataFrame, column: str, target: str, kind: Any) -> str:
    """A correlation with the number of networks behind it."""
    pairs = frame[[column, target]].dropna()
    if len(pairs) < 3 or pairs[column].nunique() < 2 or pairs[target].nunique() < 2:
        return "—"
    return f"{pairs[column].corr(pairs[target], method=kind):.3f} (n = {len(pairs)})"


_STATISTICS: Mapping[str, Callable[..., str]] = {
    "mean": _mean,
    "pearson": _pearson,
    "spearman": _spearman,
    "change": _change,
}
