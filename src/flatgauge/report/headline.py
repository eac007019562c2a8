"""What a reader of a page should see first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatgauge.analysis.formatting import MARKS, Number, data_error_of, kind, value_of
from flatgauge.analysis.measurement import Report
from flatgauge.analysis.ranking import (
    INVARIANCE_CLASSES,
    Agreement,
    MeasureRanking,
    by_invariance_class,
    claimed_groups,
    invariance_class,
)
from flatgauge.analysis.rewrite_effects import RewriteEffects, certified_effects, effects_between

if TYPE_CHECKING:
    from flatgauge.analysis.certificate import Certificate

#: Shown on cards where they were measured: one of every paper, and the classical one.
CARDS = (
    "normalized_sharpness",
    "rho_sum",
    "adaptive_trace",
    "psi_trace",
    "riemannian_max_eigenvalue_nodewise",
    "kappa_trace_sum",
    "hessian_trace",
)

_MOST_CARDS = 4


@dataclass(frozen=True)
class Card:
    """One number that matters.

    Attributes:
        measure: Its name.
        value: The value.
        data_error: The error from the choice of samples, None where it is not known.
        mark: How it came about.
        sees: Whether it depends on how the network is written, in words.
    """

    measure: str
    value: Number
    data_error: Number | None
    mark: str
    sees: str


@dataclass(frozen=True)
class ModelPlace:
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
class PlacesByMeasure:
    """The order of all models under one measure.

    Attributes:
        measure: Its name.
        places: By model, None where it was not measured.
        why_not: Why there is no order, "" where there is one.
    """

    measure: str
    places: dict[str, ModelPlace | None]
    why_not: str


@dataclass(frozen=True)
class RankingView:
    """Several models under all measures.

    Attributes:
        models: Their names.
        groups: For each of `INVARIANCE_CLASSES`, its key, title and lines.
        summary: Whether the measures agree, in sentences.
    """

    models: list[str]
    groups: list[tuple[str, str, list[PlacesByMeasure]]]
    summary: list[str]


@dataclass(frozen=True)
class Headline:
    """What stands at the top of a page.

    Attributes:
        cards: The numbers that matter, of a single model.
        trust: How many numbers are exact, estimated, ..., with the models that this holds for.
        moves: What moved and what did not.
        ranking: The order of several models, None for one.
    """

    cards: list[Card]
    trust: dict[str, list[str]]
    moves: list[RewriteEffects]
    ranking: RankingView | None


def headline_of(
    reports: Mapping[str, Report],
    rewritten: Mapping[str, str],
    certificates: Mapping[str, Certificate],
    table: Mapping[str, MeasureRanking],
) -> Headline:
    """What to say first.

    Args:
        reports: By name of the model.
        rewritten: Which of them are another one written differently.
        certificates: By name.
        table: The ranks of all models that are not another one written differently, by measure.

    Returns:
        The headline.
    """
    single = [name for name in reports if name not in rewritten]
    moves = [
        effects_between(reports[old], reports[new], (old, new)) for new, old in rewritten.items()
    ]
    if not rewritten and len(single) == 1:
        moves = [certified_effects(certificate) for certificate in certificates.values()]
    broken = {row.measure for found in certificates.values() for row in found.failures}
    return Headline(
        cards=_cards(reports[single[0]], broken) if len(single) == 1 else [],
        trust=_trust(reports),
        moves=[move for move in moves if move.groups],
        ranking=ranking_view(table, single) if len(single) > 1 else None,
    )


def ranking_view(table: Mapping[str, MeasureRanking], models: list[str]) -> RankingView:
    """Prepare the ranks of models for a page, by what the measures claim not to see."""
    classes = by_invariance_class({name: ranking.claims for name, ranking in table.items()})
    groups, summary = [], []
    for key, members in classes.items():
        lines = [_places(table[name], models) for name in members]
        groups.append((key, INVARIANCE_CLASSES[key], lines))
        counted = [table[line.measure] for line in lines if not line.why_not]
        counted = [ranking for ranking in counted if ranking.votes]
        if counted:
            ranks = {ranking.measure: ranking.known_ranks for ranking in counted}
            summary.append(_agreement_sentence(key, Agreement(ranks, tuple(models))))
    return RankingView(models, groups, summary)


def _places(ranking: MeasureRanking, models: list[str]) -> PlacesByMeasure:
    """The order of all models under one measure, unless a setting differs."""
    known = sum(not math.isnan(estimate.value) for estimate in ranking.estimates.values())
    few = "fewer than two values" if known < 2 else ""
    why = f"not comparable: {ranking.uneven}" if ranking.uneven else few
    places = {
        model: ModelPlace(
            value_of(ranking.estimates[model]),
            None if why else ranking.ranks[model],
            not why and ranking.is_tied(model),
        )
        if model in ranking.estimates
        else None
        for model in models
    }
    return PlacesByMeasure(ranking.measure, places, why)


def _agreement_sentence(key: str, agreement: Agreement) -> str:
    """Who is flattest by how many measures of a class, and whether they contradict each other."""
    subjects = {
        "units": "measures that no rescaling of units moves",
        "layers": "measures blind to whole layers only",
        "nothing": "classical measures",
    }
    firsts = {model: count for model, count in agreement.flattest.items() if count}
    counts = [f"{name} by {n}" for name, n in sorted(firsts.items(), key=lambda item: -item[1])]
    counts += [f"{agreement.undecided_count} tie for first"] if agreement.undecided_count else []
    total = len(agreement.ranks)
    subject = subjects[key] if total > 1 else subjects[key].replace("measures", "measure")
    if not agreement.contradictory:
        whole = "They agree."
    elif len(firsts) == 1 and not agreement.undecided_count:
        whole = "They agree on the first and disagree on the others."
    else:
        whole = "The measures disagree."
    return f"Flattest by {total} {subject}: {', '.join(counts)}. {whole}"


def _trust(reports: Mapping[str, Report]) -> dict[str, list[str]]:
    """What can be said of the numbers of every report, each sentence once."""
    found: dict[str, list[str]] = {}
    for name, report in reports.items():
        found.setdefault(trust(report), []).append(name)
    return found


def _cards(report: Report, broken: set[str]) -> list[Card]:
    """A few numbers: invariant ones first, in the order of `CARDS`."""
    known = [n for n in report if not math.isnan(report[n].value)]
    chosen = [name for name in CARDS if name in known] or known
    sees = {
        "units": "does not depend on how the network is written",
        "layers": "depends on the scales of units",
        "nothing": "depends on how the network is written",
    }
    return [
        Card(
            name,
            value_of(report[name]),
            data_error_of(report[name]),
            kind(report[name]),
            "moves although it claims not to: see the certificate"
            if name in broken
            else sees[invariance_class(claimed_groups(name, report[name].options))],
        )
        for name in chosen[:_MOST_CARDS]
    ]


def trust(report: Report) -> str:
    """How the numbers of a report came about, in one sentence.

    Args:
        report: The report.

    Returns:
        The sentence.
    """
    marks = [kind(estimate) for estimate in report.values()]
    counts = [f"{marks.count(mark)} {mark}" for mark in MARKS if mark in marks]
    shaky = [mark for mark in ("not converged", "failed") if mark in marks]
    errors = {
        name: estimate.error / abs(estimate.value)
        for name, estimate in report.items()
        if estimate.error > 0 and estimate.value and math.isfinite(estimate.value)
    }
    text = f"{len(marks)} numbers: {', '.join(counts)}."
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        text += f" The largest error of an estimate is {errors[worst]:.2g} of its value ({worst})."
    if not shaky:
        text += " Every solver has converged."
    return text
