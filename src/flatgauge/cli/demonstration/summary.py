"""The demonstration in five lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flatgauge.analysis.measurement import Report
from flatgauge.measures import registry

if TYPE_CHECKING:
    from flatgauge.cli.demonstration.running import Demonstration

#: The measure by which the networks are put in order, and the classical one beside it.
OURS, CLASSICAL = "rho_sum", "hessian_trace"

#: Measures of four families that must not move.
NAMED = ("rho_sum", "normalized_sharpness", "adaptive_trace", "psi_trace", "path_norm")


def summary(found: Demonstration, chosen: str) -> list[str]:
    """What the demonstration found.

    Args:
        found: The demonstration.
        chosen: The network that was rescaled.

    Returns:
        Five lines.
    """
    trained, symbols = found.comparison, {item.name: item.symbol for item in registry}
    before, after = trained[chosen], found.disguise
    accuracies = ", ".join(f"{name} {share:.1%}" for name, share in found.accuracies.items())
    still = [name for name in before if before[name].value == after[name].value]
    return [
        f"Test accuracy: {accuracies}.",
        f"Flattest first by {symbols[OURS]} ({OURS}): {_ordered(trained, OURS)}.",
        f"By {symbols[CLASSICAL]} ({CLASSICAL}): {_ordered(trained, CLASSICAL)}. "
        f"With {chosen} rescaled (largest change of any output: {found.change:g}) it is "
        f"{after[CLASSICAL].value:,.0f}, "
        f"{after[CLASSICAL].value / before[CLASSICAL].value:,.0f} times as much.",
        f"Not moved by one bit: {len(still)} of {len(before)} measures, among them "
        f"{', '.join(name for name in NAMED if name in still)}.",
        f"Certificate: {_claims(found)}.",
    ]


def _ordered(reports: Mapping[str, Report], measure: str) -> str:
    """The networks by a measure, smallest first."""
    order = sorted(reports, key=lambda name: reports[name][measure].value)
    return " < ".join(f"{name} {reports[name][measure]}" for name in order)


def _claims(found: Demonstration) -> str:
    """How many claims hold."""
    claims = [row for row in found.certificate.rows if row.claimed and row.verdict != "absent"]
    held = sum(row.verdict == "holds" for row in claims)
    verdict = "passed" if found.certificate.passed else "FAILED"
    return f"{verdict}, {held} of {len(claims)} claims of invariance hold under random rewriting"
