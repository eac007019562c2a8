"""What a reader of a page should see first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flatgauge.report.blindness import blindness
from flatgauge.report.certificate import Certificate
from flatgauge.report.moves import Moves, moves_between, moves_of
from flatgauge.report.number import MARKS, Number, data_error_of, mark_of, value_of
from flatgauge.report.pairs import Pairs
from flatgauge.report.ranking import Ranking, ranking_of
from flatgauge.report.report import Report

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
    moves: list[Moves]
    ranking: Ranking | None


def headline_of(
    reports: Mapping[str, Report],
    rewritten: Mapping[str, str],
    certificates: Mapping[str, Certificate],
    pairs: Pairs,
) -> Headline:
    """What to say first.

    Args:
        reports: By name of the model.
        rewritten: Which of them are another one written differently.
        certificates: By name.
        pairs: How far other samples would move the differences of models.

    Returns:
        The headline.
    """
    single = [name for name in reports if name not in rewritten]
    moves = [
        moves_between(reports[old], reports[new], (old, new)) for new, old in rewritten.items()
    ]
    if not rewritten and len(single) == 1:
        moves = [moves_of(certificate) for certificate in certificates.values()]
    broken = {row.measure for found in certificates.values() for row in found.failures}
    return Headline(
        cards=_cards(reports[single[0]], broken) if len(single) == 1 else [],
        trust=_trust(reports),
        moves=[move for move in moves if move.groups],
        ranking=ranking_of({n: reports[n] for n in single}, pairs) if len(single) > 1 else None,
    )


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
            mark_of(report[name]),
            "moves although it claims not to: see the certificate"
            if name in broken
            else sees[blindness(name, report[name].options)],
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
    marks = [mark_of(estimate) for estimate in report.values()]
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
