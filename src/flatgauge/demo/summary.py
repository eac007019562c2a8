"""The demonstration in five lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flatgauge.measures import registry
from flatgauge.report import Report

if TYPE_CHECKING:
    from flatgauge.demo.running import Demonstration

#: The measure by which the networks are put in order, and the classical one beside it.
OURS, CLASSICAL = "rho_sum", "hessian_trace"


def summary(found: Demonstration, chosen: str, disguised: str) -> list[str]:
    """What the demonstration found.

    Args:
        found: The demonstration.
        chosen: The network that was rescaled.
        disguised: What it is called after that.

    Returns:
        Five lines.
    """
    reports, symbols = found.comparison, {item.name: item.symbol for item in registry}
    trained = {name: report for name, report in reports.items() if name != disguised}
    before, after = reports[chosen], reports[disguised]
    accuracies = ", ".join(f"{name} {found.accuracies[name]:.1%}" for name in trained)
    still = [name for name in before if before[name].value == after[name].value]
    return [
        f"test accuracy: {accuracies}",
        f"flattest first by {symbols[OURS]}: {_ordered(trained, OURS)}",
        f"by {symbols[CLASSICAL]}: {_ordered(trained, CLASSICAL)}; after rescaling {chosen} "
        f"(outputs change by {found.change:g}): {after[CLASSICAL].value:.3g}, "
        f"{after[CLASSICAL].value / before[CLASSICAL].value:,.0f} times as much",
        f"not moved by one bit: {len(still)} of {len(before)} measures, among them "
        f"{symbols[OURS]}, {_symbols(still, symbols)}",
        f"certificate: {_claims(found)}",
    ]


def _ordered(reports: Mapping[str, Report], measure: str) -> str:
    """The networks by a measure, smallest first."""
    order = sorted(reports, key=lambda name: reports[name][measure].value)
    return " < ".join(f"{name} {reports[name][measure]}" for name in order)


def _symbols(names: Iterable[str], symbols: Mapping[str, str]) -> str:
    """A few of the measures that did not move, one of every family."""
    wanted = ("normalized_sharpness", "adaptive_trace", "psi_trace", "path_norm")
    found = set(names)
    return ", ".join(name.replace("_", " ") for name in wanted if name in found)


def _claims(found: Demonstration) -> str:
    """How many claims hold."""
    claims = [row for row in found.certificate.rows if row.claimed and row.verdict != "absent"]
    held = sum(row.verdict == "holds" for row in claims)
    verdict = "passed" if found.certificate.passed else "FAILED"
    return f"{verdict}, {held} of {len(claims)} claims of invariance hold under random rewriting"
