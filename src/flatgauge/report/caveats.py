"""What a reader must know before using the numbers of a run, each thing told once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatgauge.analysis.formatting import kind
from flatgauge.symmetry.gauge import GaugeGroup

if TYPE_CHECKING:
    from flatgauge.analysis.certificate import Certificate
    from flatgauge.analysis.measurement import Report


@dataclass(frozen=True)
class Caveat:
    """Something to know, and what it holds for.

    Attributes:
        text: What it is.
        holders: For which models or measures it holds; empty for the whole page.
    """

    text: str
    holders: tuple[str, ...]


@dataclass(frozen=True)
class Caveats:
    """What holds for all numbers, and what holds for single ones.

    Attributes:
        run: Of the runs: no minimum, pinned ops, what was dropped or did not converge.
        notes: Of single numbers, in the order of their footnotes.
    """

    run: list[Caveat]
    notes: list[Caveat]

    def number_of(self, text: str) -> int:
        """The number of the footnote with this text, from 1."""
        return 1 + [caveat.text for caveat in self.notes].index(text)


def caveats_of(
    reports: Mapping[str, Report],
    certificates: Mapping[str, Certificate],
    gauges: Mapping[str, GaugeGroup],
) -> Caveats:
    """Collect what a page must warn of.

    Args:
        reports: By name of the model.
        certificates: By name.
        gauges: By name.

    Returns:
        The caveats.
    """
    run: dict[str, dict[str, None]] = {}
    single: dict[str, dict[str, None]] = {}
    several = len(reports) > 1
    for model, report in reports.items():
        for note in report.facts.notes:
            run.setdefault(note, {})[model] = None
        for mark, told in (("failed", "could not be measured"), ("not converged", "not converged")):
            names = [name for name, e in report.items() if kind(e) == mark]
            if names:
                run.setdefault(f"{told}: {', '.join(names)}", {})[model] = None
        for name, estimate in report.items():
            for note in estimate.notes:
                single.setdefault(note, {})[f"{model}: {name}" if several else name] = None
    for name, certificate in certificates.items():
        for row in certificate.failures:
            told = f"the certificate failed: {row.measure} moves under {row.group}"
            run.setdefault(told, {})[name] = None
    pins = [(name, pin) for name, certificate in certificates.items() for pin in certificate.pinned]
    pins += [(name, str(pin)) for name, gauge in gauges.items() for pin in gauge.pinned]
    for name, pin in pins:
        run.setdefault(f"pinned: {pin}", {})[name] = None
    for name, certificate in certificates.items():
        for note in certificate.notes:
            run.setdefault(note, {})[name] = None
    return Caveats(_listed(run, tell=several), _listed(single, tell=True))


def _listed(found: Mapping[str, Mapping[str, None]], *, tell: bool) -> list[Caveat]:
    return [Caveat(text, tuple(holders) if tell else ()) for text, holders in found.items()]


def shortened(holders: Sequence[str], most: int = 4) -> str:
    """A few names, and how many more there are.

    Args:
        holders: The names.
        most: How many to write.

    Returns:
        The text.

    Example:
        >>> shortened(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    shown = ", ".join(holders[:most])
    return shown + (f" and {len(holders) - most} more" if len(holders) > most else "")
