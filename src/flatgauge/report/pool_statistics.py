"""The statistics of a pool as its page shows them: rows of tables, a headline, explanations.

In: frames with one row per measure, as `studies.statistics` makes them. Out: rows of coefficients
with the numbers of their footnotes; what a rescaling did to each measure; the sentences and numbers
at the top of the page; what every column means.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from flatgauge.report.coefficient import (
    ENDS,
    Coefficient,
    Number,
    coefficient,
    fold_intervals,
    number,
    number_at,
)
from flatgauge.report.frame_table import cell
from flatgauge.report.sections import shorten

if TYPE_CHECKING:
    import pandas as pd

    from flatgauge.report.pool_pictures import Points

PoolCell: TypeAlias = Coefficient | Number | str | None

#: Correlations in the order of their columns, with their names in sentences.
COEFFICIENTS = {
    "pearson": "Pearson",
    "pearson_log": "Pearson (log)",
    "spearman": "Spearman",
    "kendall": "Kendall",
}

#: Of these, sentences use the first that is there: ranks do not depend on the axis.
_SPOKEN = ("spearman", "kendall", "pearson")

#: Where the next note begins in a text of several: with the columns that it is about.
_NEXT = re.compile(r"; (?=[\w\[\]]+(?:, [\w\[\]]+)*: )")

#: Correlations that differ by less than this are called the same.
_SAME = 0.005


def spoken_coefficient(correlations: pd.DataFrame) -> str | None:
    """The column of the coefficient that sentences use; None where the frame has none."""
    return next((name for name in _SPOKEN if name in correlations.columns), None)


def correlation_text(correlations: pd.DataFrame | None, row: Any, *, log: bool) -> str:
    """The title of a panel: Pearson's on the shown scale, and Spearman's, one per line."""
    if correlations is None:
        return ""
    straight = ("pearson_log", "pearson") if log else ("pearson",)
    names = [next((n for n in straight if n in correlations.columns), ""), "spearman"]
    if not any(name in correlations.columns for name in names):
        names = ["kendall"]
    found = [(COEFFICIENTS[n], coefficient(correlations, row, n)) for n in names if n]
    return "\n".join(f"{name} {item.text}" for name, item in found if item is not None)


@dataclass(frozen=True)
class MeasureRow:
    """A measure and its statistics by column, their count, and the numbers of its notes."""

    measure: str
    cells: dict[str, PoolCell]
    count: Number | None
    footnotes: list[int]


def correlation_rows(correlations: pd.DataFrame, notes: Sequence[str]) -> list[MeasureRow]:
    """The rows of the table of correlations; rows refer to notes by their numbers."""
    shown = [name for name in COEFFICIENTS if name in correlations.columns]
    return [_row(correlations, measure, shown, notes) for measure in correlations.index]


def other_rows(correlations: pd.DataFrame) -> list[MeasureRow]:
    """What else is known: within cells, information, with confounders held still."""
    known = {*COEFFICIENTS, "count", "notes"}
    known |= {name + end for name in COEFFICIENTS for end in ENDS}
    shown = [name for name in fold_intervals(correlations) if name not in known]
    if not shown:
        return []
    return [_row(correlations, measure, shown, ()) for measure in correlations.index]


def _row(
    frame: pd.DataFrame, measure: Any, columns: Sequence[str], notes: Sequence[str]
) -> MeasureRow:
    cells = {name: _cell(frame, measure, name) for name in columns}
    count = None
    if "count" in frame.columns:
        value = number_at(frame, measure, "count")
        count = number(value, "—" if value != value else f"{value:.0f}")
    return MeasureRow(str(measure), cells, count, _footnotes(frame, measure, notes))


def _footnotes(frame: pd.DataFrame, row: Any, notes: Sequence[str]) -> list[int]:
    """The numbers of the notes on a row, from 1."""
    return [1 + notes.index(told) for told in notes_of(frame, row) if told in notes]


def _cell(frame: pd.DataFrame, row: Any, column: str) -> PoolCell:
    """A coefficient where it is one or has an interval, else what stands there."""
    if column in COEFFICIENTS or all(column + end in frame.columns for end in ENDS):
        return coefficient(frame, row, column)
    found = cell(frame.at[row, column])
    if isinstance(found, str):
        return found or None
    value = float(found.full)
    return number(value, f"{value:.3g}")


def notes_of(frame: pd.DataFrame, row: Any) -> list[str]:
    """The notes on a row: of a text, each after the column it is about; or a list of texts."""
    told: Any = frame.at[row, "notes"] if "notes" in frame.columns else ""
    if isinstance(told, (list, tuple)):
        return [str(part) for part in told]
    return [part for part in _NEXT.split(told.strip()) if part] if isinstance(told, str) else []


@dataclass(frozen=True)
class ChangeRow:
    """One measure before and after all networks were rescaled.

    Attributes:
        measure: Its name.
        before: Its correlation with the target.
        after: The same, after the rescaling.
        how: "same", "apart", "moved" or "unknown".
        word: What became of it, in a word or two.
        others: Further columns, by name.
        footnotes: Numbers of the notes on it.
    """

    measure: str
    before: Coefficient | None
    after: Coefficient | None
    how: str
    word: str
    others: dict[str, PoolCell]
    footnotes: list[int]


def change_rows(before_after: pd.DataFrame, notes: Sequence[str] = ()) -> list[ChangeRow]:
    """The rows of the table of what a rescaling does."""
    shown = [
        c for c in fold_intervals(before_after) if c not in ("before", "after", "count", "notes")
    ]
    found = []
    for measure in before_after.index:
        before, after = (coefficient(before_after, measure, time) for time in ("before", "after"))
        rest = {c: _cell(before_after, measure, c) for c in shown}
        told = _footnotes(before_after, measure, notes)
        became = _became(before, after)
        found.append(ChangeRow(str(measure), before, after, *became, rest, told))
    return found


def _became(before: Coefficient | None, after: Coefficient | None) -> tuple[str, str]:
    """What became of a correlation: how, and in words."""
    if before is None or after is None or not (before.is_known and after.is_known):
        return "unknown", "cannot be told"
    change = after.value - before.value
    if abs(change) < _SAME:
        return "same", "the same"
    if before.follows and after.follows is False:
        return "apart", "falls apart"
    return "moved", f"{'lower' if change < 0 else 'higher'} by {abs(change):.2f}"


# -- the headline -------------------------------------------------------------------------------

#: Names in one sentence.
_MOST_NAMES = 6


@dataclass(frozen=True)
class PoolCard:
    """A number that matters: of what, its text, its interval, and what it is."""

    name: str
    value: str
    interval: str
    about: str


@dataclass(frozen=True)
class PoolHeadline:
    """What stands at the top: numbers, and which measures follow the target."""

    cards: list[PoolCard]
    answer: list[str]


def pool_headline(
    points: Points, correlations: pd.DataFrame, changes: Sequence[ChangeRow]
) -> PoolHeadline:
    """What to say first."""
    counted, total = int(points.in_statistics.sum()), len(points.frame)
    cards = [PoolCard("networks", f"{counted} of {total}", "", "enter the statistics")]
    column = spoken_coefficient(correlations)
    found: dict[str, Coefficient] = {}
    if column is not None:
        rows = {str(name): coefficient(correlations, name, column) for name in correlations.index}
        known = {n: item for n, item in rows.items() if item and item.is_known}
        found = dict(sorted(known.items(), key=lambda pair: -pair[1].value))
    answer: list[str] = []
    if column is not None and found:
        best = next(iter(found))
        about = f"the highest {COEFFICIENTS[column]} correlation with {points.target}"
        cards.append(PoolCard(best, found[best].number.shown, found[best].interval, about))
        answer += _followers(found, f"{COEFFICIENTS[column]} correlation", points.target)
    cards += _change_cards(changes)
    return PoolHeadline(cards, answer + _changes(changes))


def _followers(found: dict[str, Coefficient], what: str, target: str) -> list[str]:
    """Which measures follow the target, which do not, in sentences."""
    judged = {name: item for name, item in found.items() if item.follows is not None}
    if not judged:
        told = [f"{name} {item.text}" for name, item in found.items()]
        return [f"{what} with {target}: {shorten(told, _MOST_NAMES)}."]
    yes = [f"{name} {item.text}" for name, item in judged.items() if item.follows]
    no = [f"{name} {item.text}" for name, item in judged.items() if not item.follows]
    lines = []
    if yes:
        lines.append(
            f"{_count_text(len(yes), len(judged))} {_verb(len(yes), 'follow')} {target} (the "
            f"interval of the {what} lies above 0): {shorten(yes, _MOST_NAMES)}."
        )
    if no:
        lines.append(
            f"{_count_text(len(no), len(judged))} {_verb(len(no), 'do')} not, as far as these "
            f"networks tell: {shorten(no, _MOST_NAMES)}."
        )
    return lines


def _changes(changes: Sequence[ChangeRow]) -> list[str]:
    """What a rescaling did, in sentences."""
    kinds: dict[str, list[ChangeRow]] = {"apart": [], "moved": [], "same": []}
    for row in changes:
        kinds.setdefault(row.how, []).append(row)
    lines, total = [], len(changes)
    if kinds["same"]:
        names = [row.measure for row in kinds["same"]]
        lines.append(
            "After every network was randomly rescaled, which changes no output, "
            f"{_count_text(len(names), total).lower()} {_verb(len(names), 'correlate')} with the "
            f"target as before: {shorten(names, _MOST_NAMES)}."
        )
    if kinds["apart"]:
        told = [_from_to(row) for row in kinds["apart"]]
        lines.append(
            f"{_count_text(len(told), total)} {_verb(len(told), 'fall')} apart under the rescaling "
            f"(the interval lay above 0 and no longer does): {shorten(told, _MOST_NAMES)}."
        )
    if kinds["moved"]:
        told = [_from_to(row) for row in kinds["moved"]]
        lines.append(
            f"{_count_text(len(told), total)} {_verb(len(told), 'change')} under the rescaling: "
            f"{shorten(told, _MOST_NAMES)}."
        )
    return lines


def _change_cards(changes: Sequence[ChangeRow]) -> list[PoolCard]:
    """The strongest measure that falls apart, and the strongest that does not move."""
    words = {"apart": "falls apart when networks are rescaled", "same": "unmoved by rescaling"}
    cards = []
    for how, about in words.items():
        rows = [row for row in changes if row.how == how and row.before and row.after]
        if rows:
            best = max(rows, key=lambda row: row.before.value if row.before else 0.0)
            cards.append(PoolCard(best.measure, _arrow(best), "", about))
    return cards


def _arrow(row: ChangeRow) -> str:
    assert row.before is not None
    assert row.after is not None
    return f"{row.before.number.shown} → {row.after.number.shown}"


def _from_to(row: ChangeRow) -> str:
    if row.before is None or row.after is None:
        return row.measure
    return f"{row.measure} from {row.before.number.shown} to {row.after.text}"


def _count_text(count: int, total: int) -> str:
    if count == total:
        return f"All {total} measures" if total > 1 else "The measure"
    return f"{count} of {total} measures"


def _verb(count: int, verb: str) -> str:
    if count != 1:
        return verb
    return "does" if verb == "do" else f"{verb}s"


# -- explanations -------------------------------------------------------------------------------

#: By how the name of a column begins: what it is called, and what it means.
_WORDS = {
    "pearson": (
        "Pearson",
        "How well a straight line tells the target from the measure: 1 exactly and rising, 0 not "
        "at all, −1 exactly and falling. One extreme network can make or break it.",
    ),
    "pearson_log": (
        "Pearson (log)",
        "The same with the logarithm of the measure: a straight line on a logarithmic axis.",
    ),
    "spearman": (
        "Spearman",
        "Pearson's correlation of the ranks: whether the order of the networks is the same, "
        "however the measure is scaled. 1 means the same order.",
    ),
    "kendall": (
        "Kendall",
        "Take any two networks: how much more often measure and target agree on which is larger "
        "than they disagree. 1: always agree; 0: as often as not.",
    ),
    "granulated": (
        "granulated",
        "Kendall's coefficient among networks that differ in one factor only, averaged over all "
        "such sets, and then over the factors. It does not reward a measure that merely tells one "
        "setting from another. In brackets: the factor that varies.",
    ),
    "information": (
        "information",
        "Conditional mutual information: how much knowing which of two networks has the larger "
        "measure tells of which has the larger gap, once some factors are known, as a share of "
        "what there is to know. 0: nothing, 1: everything. The smallest over the sets of factors.",
    ),
    "information_chance": (
        "information by chance",
        "What a measure that knows nothing would score here: few networks give a number above 0 "
        "by luck. Compare the information with it.",
    ),
    "information_chance_high": (
        "information by chance, high",
        "What such a measure exceeds in one of twenty cases only.",
    ),
    "sign_error_mean": (
        "sign error",
        "How often the measure orders two networks wrongly that differ in one setting only: 0 "
        "never, 0.5 as a coin does. The mean over pairs of settings, and the worst of them.",
    ),
    "partial": (
        "partial",
        "The correlation that is left when a possible confounder (in brackets) is held still. If "
        "it falls to 0, the measure may only repeat what the confounder says.",
    ),
    "before": (
        "before and after",
        "The correlation of the networks as trained, and after each was randomly rescaled: units "
        "are scaled up on one side and down on the other, so that no output changes.",
    ),
    "lost": (
        "lost",
        "How much of the correlation the rescaling took away, with its interval.",
    ),
    "itself": (
        "itself",
        "The rank correlation of a measure with itself across the rescaling. 1: the order of the "
        "networks stayed; a measure that does not depend on how a network is written has 1.",
    ),
    "largest_change": (
        "largest change",
        "The largest relative change of the measure on any network by the rescaling.",
    ),
}

_ALWAYS = {
    "interval": (
        "The range in brackets. The networks are drawn again and again, with repetition, and the "
        "coefficient is computed anew each time (bootstrap). If the range contains 0, these "
        "networks do not show that measure and target go together."
    ),
    "counted": (
        "Only networks that reached the stated training criterion enter statistics; the others "
        "are drawn hollow and grey, and listed."
    ),
    "line and band": (
        "The line of least squares on the scale that is shown (logarithmic where the axis says "
        "so), and where 95 % of the lines through redrawn networks lie."
    ),
}


def explain_statistics(columns: Iterable[str]) -> dict[str, str]:
    """What the columns of these names mean, by name in plain words; unknown ones are left out."""
    found = {}
    bare = {column.split("[")[0] for column in columns}
    for start, (name, meaning) in _WORDS.items():
        if start in bare:
            found[name] = meaning
    return found | _ALWAYS
