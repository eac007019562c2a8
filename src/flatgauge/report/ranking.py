"""Several models in order of flatness, measure by measure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from flatgauge.measures import registry
from flatgauge.report.blindness import BLINDNESS, by_blindness
from flatgauge.report.mismatches import uneven_options
from flatgauge.report.number import Number, value_of
from flatgauge.report.pairs import DataError, Pairs, pairs_of
from flatgauge.report.ranks import ranked, rounding_of
from flatgauge.report.report import Report


@dataclass(frozen=True)
class Place:
    """A model under one measure.

    Attributes:
        value: Its value.
        rank: 1 for the flattest; None where it has none.
        tied: Whether others share the rank.
    """

    value: Number
    rank: int | None
    tied: bool


@dataclass(frozen=True)
class Line:
    """The order of all models under one measure.

    Attributes:
        measure: Its name.
        places: By model, None where it was not measured.
        why_not: Why there is no order, "" where there is one.
    """

    measure: str
    places: dict[str, Place | None]
    why_not: str


@dataclass(frozen=True)
class Ranking:
    """Several models under all measures.

    Attributes:
        models: Their names.
        groups: For each of `BLINDNESS`, its key, title and lines.
        summary: Whether the measures agree, in sentences.
    """

    models: list[str]
    groups: list[tuple[str, str, list[Line]]]
    summary: list[str]


def ranking_of(reports: Mapping[str, Report], pairs: Pairs | None = None) -> Ranking:
    """Order models by every measure, flattest first.

    Two models that cannot be told apart share a place, see `ranked`.

    Args:
        reports: By name of the model; at least two.
        pairs: How far other samples would move their differences; None reads it from the reports.

    Returns:
        The ranking.
    """
    first = next(iter(reports.values()))
    names = dict.fromkeys(name for report in reports.values() for name in report)
    options = {
        name: next(r[name].options for r in (first, *reports.values()) if name in r.estimates)
        for name in names
    }
    uneven, errors = uneven_options(reports), pairs_of(reports) if pairs is None else pairs
    kinds = by_blindness((name, options[name]) for name in names)
    groups = [
        (
            key,
            BLINDNESS[key],
            [_line(name, reports, errors.get(name, {}), uneven.get(name)) for name in members],
        )
        for key, members in kinds.items()
    ]
    return Ranking(list(reports), groups, _summary(groups, list(reports)))


def _line(
    measure: str,
    reports: Mapping[str, Report],
    errors: Mapping[tuple[str, str], DataError],
    uneven: str | None,
) -> Line:
    """The order of all models under one measure, unless a setting differs."""
    found = {
        name: report.estimates[measure]
        for name, report in reports.items()
        if measure in report.estimates
    }
    known = sum(not math.isnan(estimate.value) for estimate in found.values())
    why = f"not comparable: {uneven}" if uneven else "fewer than two values" if known < 2 else ""
    rounding = max(rounding_of(report.facts.dtype) for report in reports.values())
    ranks = {} if why else ranked(found, errors=errors, rounding=rounding)
    shared = Counter(rank for rank in ranks.values() if rank is not None)
    places = {
        name: Place(value_of(found[name]), ranks.get(name), shared[ranks.get(name) or 0] > 1)
        if name in found
        else None
        for name in reports
    }
    return Line(measure, places, why)


def _summary(groups: list[tuple[str, str, list[Line]]], models: list[str]) -> list[str]:
    """Who is flattest by how many measures, and whether they contradict each other."""
    told = []
    subjects = {
        "units": "measures that no rescaling of units moves",
        "layers": "measures blind to whole layers only",
        "nothing": "classical measures",
    }
    for key, _, lines in groups:
        ranked = [line for line in lines if not line.why_not and _votes(line.measure)]
        if not ranked:
            continue
        firsts = Counter(_first(line) for line in ranked)
        tied = firsts.pop(None, 0)
        counts = [f"{name} by {count}" for name, count in firsts.most_common()]
        counts += [f"{tied} tie for first"] if tied else []
        one = subjects[key].replace("measures", "measure")
        subject = one if len(ranked) == 1 else subjects[key]
        told.append(
            f"Flattest by {len(ranked)} {subject}: {', '.join(counts)}. "
            + _agreement(ranked, models, one_first=len(firsts) == 1 and not tied)
        )
    return told


def _votes(measure: str) -> bool:
    """Whether a measure is one of flatness."""
    return measure not in registry or registry[measure].votes


def _first(line: Line) -> str | None:
    """The flattest model, None where several share the place."""
    first = [name for name, place in line.places.items() if place is not None and place.rank == 1]
    return first[0] if len(first) == 1 else None


def _agreement(lines: list[Line], models: list[str], *, one_first: bool) -> str:
    """Whether measures agree, in a sentence."""
    if not _contradict(lines, models):
        return "They agree."
    if one_first:
        return "They agree on the first and disagree on the others."
    return "The measures disagree."


def _contradict(lines: list[Line], models: list[str]) -> bool:
    """Whether two measures put two models in opposite order."""
    for one, other in combinations(models, 2):
        signs = set()
        for line in lines:
            a, b = line.places[one], line.places[other]
            if a is not None and b is not None and a.rank and b.rank and a.rank != b.rank:
                signs.add(a.rank < b.rank)
        if len(signs) > 1:
            return True
    return False
