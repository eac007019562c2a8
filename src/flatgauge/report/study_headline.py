"""What a reader of a study's page should see first: the answer, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatgauge.report.coefficient import Coefficient, coefficient
from flatgauge.report.sections import shortened
from flatgauge.report.study_numbers import COEFFICIENTS, ChangeRow, spoken

if TYPE_CHECKING:
    import pandas as pd

    from flatgauge.report.study_pictures import Points

#: Names in one sentence.
_MOST_NAMES = 6


@dataclass(frozen=True)
class StudyCard:
    """One number that matters.

    Attributes:
        name: Of what; a measure, or words.
        value: The number, as text.
        interval: Its interval, as text; may be empty.
        about: What it is.
    """

    name: str
    value: str
    interval: str
    about: str


@dataclass(frozen=True)
class StudyHeadline:
    """What stands at the top of a study's page.

    Attributes:
        cards: The numbers that matter.
        answer: Which measures follow the target, and what a rescaling does to that.
    """

    cards: list[StudyCard]
    answer: list[str]


def study_headline(
    points: Points, correlations: pd.DataFrame, changes: Sequence[ChangeRow]
) -> StudyHeadline:
    """What to say first.

    Args:
        points: The networks.
        correlations: One row per measure.
        changes: What a rescaling did; empty where none was tried.

    Returns:
        The headline.
    """
    counted, total = int(points.counted.sum()), len(points.frame)
    cards = [StudyCard("networks", f"{counted} of {total}", "", "enter the statistics")]
    column = spoken(correlations)
    found: dict[str, Coefficient] = {}
    if column is not None:
        rows = {str(name): coefficient(correlations, name, column) for name in correlations.index}
        known = {n: item for n, item in rows.items() if item and item.known}
        found = dict(sorted(known.items(), key=lambda pair: -pair[1].value))
    answer: list[str] = []
    if column is not None and found:
        best = next(iter(found))
        about = f"the highest {COEFFICIENTS[column]} correlation with {points.target}"
        cards.append(StudyCard(best, found[best].number.shown, found[best].interval, about))
        answer += _followers(found, f"{COEFFICIENTS[column]} correlation", points.target)
    cards += _change_cards(changes)
    return StudyHeadline(cards, answer + _changes(changes))


def _followers(found: dict[str, Coefficient], what: str, target: str) -> list[str]:
    """Which measures follow the target, which do not, in sentences."""
    judged = {name: item for name, item in found.items() if item.follows is not None}
    if not judged:
        told = [f"{name} {item.text}" for name, item in found.items()]
        return [f"{what} with {target}: {shortened(told, _MOST_NAMES)}."]
    yes = [f"{name} {item.text}" for name, item in judged.items() if item.follows]
    no = [f"{name} {item.text}" for name, item in judged.items() if not item.follows]
    lines = []
    if yes:
        lines.append(
            f"{_counted(len(yes), len(judged))} {_verb(len(yes), 'follow')} {target} (the interval "
            f"of the {what} lies above 0): {shortened(yes, _MOST_NAMES)}."
        )
    if no:
        lines.append(
            f"{_counted(len(no), len(judged))} {_verb(len(no), 'do')} not, as far as these "
            f"networks tell: {shortened(no, _MOST_NAMES)}."
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
            f"{_counted(len(names), total).lower()} {_verb(len(names), 'correlate')} with the "
            f"target as before: {shortened(names, _MOST_NAMES)}."
        )
    if kinds["apart"]:
        told = [_from_to(row) for row in kinds["apart"]]
        lines.append(
            f"{_counted(len(told), total)} {_verb(len(told), 'fall')} apart under the rescaling "
            f"(the interval lay above 0 and no longer does): {shortened(told, _MOST_NAMES)}."
        )
    if kinds["moved"]:
        told = [_from_to(row) for row in kinds["moved"]]
        lines.append(
            f"{_counted(len(told), total)} {_verb(len(told), 'change')} under the rescaling: "
            f"{shortened(told, _MOST_NAMES)}."
        )
    return lines


def _change_cards(changes: Sequence[ChangeRow]) -> list[StudyCard]:
    """The strongest measure that falls apart, and the strongest that does not move."""
    words = {"apart": "falls apart when networks are rescaled", "same": "unmoved by rescaling"}
    cards = []
    for how, about in words.items():
        rows = [row for row in changes if row.how == how and row.before and row.after]
        if rows:
            best = max(rows, key=lambda row: row.before.value if row.before else 0.0)
            cards.append(StudyCard(best.measure, _arrow(best), "", about))
    return cards


def _arrow(row: ChangeRow) -> str:
    assert row.before is not None
    assert row.after is not None
    return f"{row.before.number.shown} → {row.after.number.shown}"


def _from_to(row: ChangeRow) -> str:
    if row.before is None or row.after is None:
        return row.measure
    return f"{row.measure} from {row.before.number.shown} to {row.after.text}"


def _counted(count: int, total: int) -> str:
    if count == total:
        return f"All {total} measures" if total > 1 else "The measure"
    return f"{count} of {total} measures"


def _verb(count: int, verb: str) -> str:
    if count != 1:
        return verb
    return "does" if verb == "do" else f"{verb}s"
