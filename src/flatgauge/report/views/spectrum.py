"""The numbers of one or several spectra as a table, one column each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flatgauge.estimators.estimate import Estimate, format_with_error
from flatgauge.report.tables import Cell, Column, Table
from flatgauge.runtime.resources import duration

if TYPE_CHECKING:
    from flatgauge.analysis.spectra import Spectrum


def spectrum_tables(spectra: Mapping[str, Spectrum], title: str) -> list[Table]:
    """What was measured, the numbers under a title, and the notes; one alone has no name."""
    items = list(spectra.values())
    heads = [str(items[0].facts)] if len(items) == 1 else _heads(spectra)
    columns = (Column(""), *(Column(name) for name in spectra))
    rows = tuple(tuple(Cell(text) for text in row) for row in _rows(items))
    return [
        *(Table(head) for head in heads),
        Table(title, columns, rows, notes=tuple(_notes(spectra))),
    ]


def _heads(spectra: Mapping[str, Spectrum]) -> list[str]:
    """What was measured, several surfaces, with their own caveats."""
    lines = []
    for name, item in spectra.items():
        facts = item.facts
        lines.append(
            f"{name}: {facts.model}, {facts.parameters:,} parameters, {facts.samples:,} samples, "
            f"loss ({facts.loss_name}) {facts.loss:.6g}, ‖gradient‖ {facts.gradient_norm:.3g}"
        )
        lines += [f"note on {name}: {note}" for note in facts.notes]
    return lines


def _rows(items: list[Spectrum]) -> list[tuple[str, ...]]:
    """The numbers."""
    count = max(len(item.top) for item in items)
    tops = [
        (f"λ{k + 1}", *(str(item.top[k]) if k < len(item.top) else "" for item in items))
        for k in range(count)
    ]
    return [
        ("eigenvalues", *(f"{item.size:,}" for item in items)),
        *tops,
        ("smallest seen", *(str(item.smallest) for item in items)),
        ("trace", *(str(item.trace) for item in items)),
        ("negative", *(f"{_share(i.negative)} below {-i.resolution:.2g}" for i in items)),
        ("near zero", *(f"{_share(i.near_zero)} within {i.resolution:.2g}" for i in items)),
        ("products", *(f"{item.matvecs} ({duration(item.seconds)})" for item in items)),
    ]


def _share(share: Estimate) -> str:
    """A share in percent, with its error."""
    if not share.value and share.error:
        return f"under {100 * share.error:.1g} %"
    if share.error < 5e-5:
        return f"{100 * share.value:.4g} %"
    return f"{format_with_error(100 * share.value, 100 * share.error)} %"


def _notes(spectra: Mapping[str, Spectrum]) -> list[str]:
    """All notes, each once."""
    holders: dict[str, list[str]] = {}
    for name, item in spectra.items():
        for note in item.notes:
            holders.setdefault(note, []).append(name)
    return [
        f"note on {', '.join(names)}: {note}" if len(names) < len(spectra) else f"note: {note}"
        for note, names in holders.items()
    ]
