"""A certificate in a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatgauge.analysis.formatting import Number, number
from flatgauge.report.certificate_table import change_text, size_text, tail
from flatgauge.symmetry.transforms import TRANSFORM_GROUPS

if TYPE_CHECKING:
    from flatgauge.analysis.certificate import Certificate, CertificateRow, GroupCheck

#: What the verdicts mean.
VERDICTS = {
    "holds": "claimed and true",
    "FAILS": "claimed and not true",
    "moves": "not claimed, and it moves",
    "still": "not claimed, and it did not move",
    "unproven": "claimed, but too noisy to tell",
    "unmeasured": "could not be measured",
    "absent": "the model has no such group",
}


@dataclass(frozen=True)
class CertificateCell:
    """One measure under one group.

    Attributes:
        change: The largest relative change, with its mark.
        verdict: A key of `VERDICTS`.
        told: The verdict in words, with the value that was reached.
    """

    change: str
    verdict: str
    told: str


@dataclass(frozen=True)
class CertificateView:
    """A certificate, ready to be shown.

    Attributes:
        name: Of the model.
        passed: Whether every claim holds.
        verdict: The same in a sentence.
        told: What was tried.
        groups: The groups that the model has.
        lines: For every measure its value and its cells by group.
        kept: What every group did to the function: group, moves, outputs, loss, ReLU signs.
        absent: Groups that were not tried, with the reason.
    """

    name: str
    passed: bool
    verdict: str
    told: str
    groups: list[str]
    lines: list[tuple[str, Number, dict[str, CertificateCell]]]
    kept: list[tuple[str, ...]]
    absent: dict[str, str]


def certificate_view(
    name: str, certificate: Certificate, measured: int | None = None
) -> CertificateView:
    """Prepare a certificate.

    Args:
        name: Of the model.
        certificate: The certificate.
        measured: The number of samples that the page's other values of the model are of.

    Returns:
        What to show.
    """
    rows = [row for row in certificate.rows if row.verdict != "absent"]
    groups = list(dict.fromkeys(row.group for row in rows))
    measures = dict.fromkeys(row.measure for row in rows)
    lines = []
    for measure in measures:
        mine = [row for row in rows if row.measure == measure]
        cells = {row.group: _cell(row) for row in mine}
        lines.append((measure, number(mine[0].before), cells))
    trials = f"{certificate.trials} move{'s' if certificate.trials > 1 else ''} of each kind"
    other = (
        f" The values are of these samples; elsewhere on this page they are of {measured:,}."
        if measured is not None and measured != certificate.samples
        else ""
    )
    return CertificateView(
        name=name,
        passed=certificate.passed,
        verdict=_verdict(certificate),
        told=f"{certificate.model}: {certificate.scales:,} independent scales, "
        f"{certificate.samples:,} samples, {certificate.dtype}, {trials}, "
        f"seed {certificate.seed}.{other}",
        groups=groups,
        lines=lines,
        kept=[_kept(kept) for kept in certificate.kept],
        absent={row.group: row.note for row in certificate.rows if row.verdict == "absent"},
    )


def _verdict(certificate: Certificate) -> str:
    """The last lines of the certificate's own text."""
    lines: Sequence[str] = tail(certificate)
    said = [line for line in lines if line.startswith(("FAILED: ", "passed: "))]
    return " ".join(line.split(": ", 1)[1] for line in said)


def _cell(row: CertificateRow) -> CertificateCell:
    told = VERDICTS[row.verdict]
    if row.after is not None and row.verdict in ("moves", "FAILS"):
        told += f": from {row.before:.6g} to {row.after:.6g}"
    if row.note:
        told += f" ({row.note})"
    return CertificateCell(change_text(row) or "—", row.verdict, told)


def _kept(kept: GroupCheck) -> tuple[str, ...]:
    """What a group did to the function, cell by cell."""
    bits = "" if kept.outputs is None else _in_words(kept.outputs)
    rest = "" if kept.outputs_any is None else _in_words(kept.outputs_any)
    signs = f"{kept.flipped:,} of {kept.signs:,}" if kept.signs else ""
    if not TRANSFORM_GROUPS[kept.group].preserves_outputs:
        held = "outputs are meant to change"
    else:
        held = "the same function" if kept.held else "NOT the same function"
    return (kept.group, str(kept.moves), bits, rest, _in_words(kept.loss), signs, held)


def _in_words(change: float) -> str:
    return "not by one bit" if change == 0 else size_text(change)
