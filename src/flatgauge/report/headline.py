"""What a reader of a page should see first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flatgauge.analysis.comparison import Comparison
from flatgauge.analysis.formatting import MARKS, kind
from flatgauge.analysis.measurement import Report
from flatgauge.analysis.ranking import claimed_groups, invariance_class
from flatgauge.report.rewrite_effects import RewriteEffects, certified_effects, effects_between
from flatgauge.report.tables import Cell, Table
from flatgauge.report.views.comparison import difference_table, ranking_table
from flatgauge.report.views.report import data_error_cell, value_cell

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

#: Over the table of ranks, and over that of differences.
_RANKS = (
    "Values, each with its place from the flattest, 1, upwards. Models that cannot be told apart "
    "share a place: 1=."
)
_DIFFERENCES = (
    "The first model minus the second, sample by sample: negative where the first is flatter. The "
    "interval is for other samples of the same kind, each pair for itself."
)


@dataclass(frozen=True)
class Card:
    """One number that matters.

    Attributes:
        measure: Its name.
        value: The value.
        data_error: The error from the choice of samples, empty where it is not known.
        mark: How it came about.
        sees: Whether it depends on how the network is written, in words.
    """

    measure: str
    value: Cell
    data_error: Cell
    mark: str
    sees: str


@dataclass(frozen=True)
class Headline:
    """What stands at the top of a page.

    Attributes:
        cards: The numbers that matter, of a single model.
        trust: How many numbers are exact, estimated, ..., with the models that this holds for.
        moves: What moved and what did not.
        summary: Whether the measures agree on the order of several models, in sentences.
        ranking: The ranks of several models, None for one.
        differences: Their paired differences, None where there are none.
    """

    cards: list[Card]
    trust: dict[str, list[str]]
    moves: list[RewriteEffects]
    summary: list[str]
    ranking: Table | None
    differences: Table | None


def headline_of(
    reports: Mapping[str, Report],
    rewritten: Mapping[str, str],
    certificates: Mapping[str, Certificate],
    comparison: Comparison,
) -> Headline:
    """What to say first.

    Args:
        reports: By name of the model.
        rewritten: Which of them are another one written differently.
        certificates: By name.
        comparison: All models that are not another one written differently.

    Returns:
        The headline.
    """
    moves = [
        effects_between(reports[old], reports[new], (old, new)) for new, old in rewritten.items()
    ]
    if not rewritten and len(comparison) == 1:
        moves = [certified_effects(certificate) for certificate in certificates.values()]
    broken = {row.measure for found in certificates.values() for row in found.failures}
    headline = Headline(
        cards=[],
        trust=_trust(reports),
        moves=[move for move in moves if move.groups],
        summary=[],
        ranking=None,
        differences=None,
    )
    if len(comparison) == 1:
        return replace(headline, cards=_cards(next(iter(comparison.values())), broken))
    ranks = replace(ranking_table(comparison), title=_RANKS)
    differences = replace(difference_table(comparison, every=True), title=_DIFFERENCES)
    return replace(
        headline,
        summary=list(_agreement_sentences(comparison)),
        ranking=ranks,
        differences=differences if differences.rows else None,
    )


def _agreement_sentences(comparison: Comparison) -> Iterator[str]:
    """Who is flattest by the measures of each class, and whether they contradict each other."""
    subjects = {
        "units": "invariant measures",
        "layers": "measures blind to whole layers only",
        "nothing": "classical measures",
    }
    for key, subject in subjects.items():
        agreement = comparison.agreement(key)
        if agreement.ranks:
            odd = ". They disagree on the order of models" * agreement.contradictory
            yield f"{agreement.verdict(subject)}{odd}."


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
            value_cell(report[name]),
            data_error_cell(report[name]),
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
