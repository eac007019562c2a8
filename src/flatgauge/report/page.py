"""The report as one HTML file that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.certificate import Certificate
from flatgauge.analysis.comparison import Comparison
from flatgauge.analysis.files import atomic_write, to_plain
from flatgauge.analysis.formatting import MARKS
from flatgauge.analysis.ranking import SamplingErrors
from flatgauge.measures.registry import GROUPS
from flatgauge.report.headline import headline_of
from flatgauge.report.layer_bars import layer_choices, unit_choices
from flatgauge.report.rendering import (
    Drawable,
    check_drawable,
    choice_contents,
    drawn_contents,
    render_page,
)
from flatgauge.report.sections import (
    caveats_of,
    gauge_contents,
    gauge_tables,
    glossary_links,
    glossary_of,
    provenance_table,
    run_facts,
    skeletons_of,
)
from flatgauge.report.views.certificate import change_table, group_table, heading
from flatgauge.report.views.report import estimate_table, values_table

if TYPE_CHECKING:
    from flatgauge.analysis.measurement import Report
    from flatgauge.symmetry import GaugeGroup

#: Over the tables of numbers.
_VALUES = "Every measure of every model. Lower is flatter."
_NUMBERS = (
    "value with its error, the error from the choice of samples, how the number came about, and "
    "what it cost."
)
_CHANGES = (
    "Largest relative change under powers of two / under arbitrary factors; 0: not one bit. "
    "✓ claimed and true, ✗ claimed and not true, ? too noisy to tell, no mark: not claimed."
)


def write_page(
    path: str | Path,
    reports: Mapping[str, Report],
    *,
    title: str | None = None,
    rewritten: Mapping[str, str] = {},
    certificates: Mapping[str, Certificate] = {},
    gauges: Mapping[str, GaugeGroup] = {},
    spectra: Sequence[Drawable] = (),
    landscapes: Sequence[Drawable] = (),
    command: str | None = None,
    remarks: Sequence[str] = (),
    pairs: SamplingErrors | None = None,
) -> Path:
    """Write the reports of one or several models as one self-contained HTML file.

    Args:
        path: Where to write; an existing file is replaced.
        reports: By name of the model.
        title: Of the page; None for the names of the models.
        rewritten: Which reports are those of another model written differently:
            ``{"rescaled": "as trained"}``. The page then opens with what moved.
        certificates: By name of the model.
        gauges: By name of the model.
        spectra: Pictures of spectra.
        landscapes: Pictures of landscapes.
        command: The command line that the reports came from.
        remarks: Further sentences for the top of the page.
        pairs: How far other samples would move the differences of models; None reads it from the
            reports.

    Returns:
        The path.

    Raises:
        TypeError: If `reports` is no mapping from names to reports, or something to be drawn is
            not.
        ValueError: If there is no report, or `rewritten` names one that is not there.
    """
    _check(reports, rewritten, [*spectra, *landscapes])
    single = {name: report for name, report in reports.items() if name not in rewritten}
    comparison = Comparison(single, pairs=pairs)
    contents = {
        "title": title or ", ".join(reports),
        "command": command,
        "remarks": list(remarks),
        "rewritten": dict(rewritten),
        "reports": {name: report.to_dict() for name, report in reports.items()},
        "differences": to_plain([row.to_dict() for row in comparison.difference_rows()]),
        "certificates": {name: found.to_dict() for name, found in certificates.items()},
        "gauges": {name: gauge_contents(gauge) for name, gauge in gauges.items()},
        "spectra": [drawn.to_dict() for drawn in spectra],
        "landscapes": [drawn.to_dict() for drawn in landscapes],
    }
    caveats = caveats_of(reports, certificates, gauges)
    measured = [name for report in reports.values() for name in report]
    measured += [row.measure for found in certificates.values() for row in found.rows]
    page = {
        "title": contents["title"],
        "command": command,
        "remarks": list(remarks),
        "headline": headline_of(reports, rewritten, certificates, comparison),
        "caveats": caveats,
        "values": replace(values_table(reports), title=_VALUES) if len(reports) > 1 else None,
        "numbers": {
            name: replace(
                estimate_table(report, name, caveats.number_of), title=f"{name}: {_NUMBERS}"
            )
            for name, report in reports.items()
        },
        "layers": [choice_contents(choice) for choice in layer_choices(reports)],
        "units": [choice_contents(choice) for choice in unit_choices(reports)],
        "certificates": [
            _certificate_section(name, found, reports.get(name))
            for name, found in certificates.items()
        ],
        "gauges": {name: gauge_tables(gauge) for name, gauge in gauges.items()},
        "spectra": [drawn_contents(drawn) for drawn in spectra],
        "landscapes": [drawn_contents(drawn) for drawn in landscapes],
        "provenance": provenance_table(
            {name: run_facts(report.facts) for name, report in reports.items()}
        ),
        "models": list(reports),
        "glossary": glossary_of(measured),
        "known": glossary_links(measured, skeletons_of(reports)),
        "groups": GROUPS,
        "marks": MARKS,
    }
    drawn = any(page[key] for key in ("layers", "units", "spectra", "landscapes"))
    return atomic_write(path, render_page("page.html", page, contents, drawn=drawn))


def _certificate_section(
    name: str, certificate: Certificate, report: Report | None
) -> dict[str, Any]:
    """A certificate, for a template."""
    about = f"{heading(certificate)}, seed {certificate.seed}."
    if report is not None and report.facts.samples != certificate.samples:
        about += (
            " The values are of these samples; elsewhere on this page they are of "
            f"{report.facts.samples:,}."
        )
    return {
        "name": name,
        "passed": certificate.passed,
        "verdict": certificate.verdict,
        "about": about,
        "changes": replace(change_table(certificate, name), title=_CHANGES),
        "groups": replace(
            group_table(certificate), title="What the moves did to the function itself."
        ),
    }


def _check(
    reports: Mapping[str, Report], rewritten: Mapping[str, str], drawn: Sequence[Drawable]
) -> None:
    from flatgauge.analysis.measurement import Report

    if not isinstance(reports, Mapping):
        raise TypeError(
            f"`reports` is a {type(reports).__name__}; pass a mapping from names to reports: "
            '{"my model": report}.'
        )
    for name, report in reports.items():
        if not isinstance(report, Report):
            raise TypeError(
                f"`reports[{name!r}]` is a {type(report).__name__}; pass a mapping from names to "
                'reports, as `fg.measure` returns them: {"my model": report}.'
            )
    if not reports:
        raise ValueError("`reports` is empty; a page needs at least one report.")
    missing = [name for pair in rewritten.items() for name in pair if name not in reports]
    if missing:
        raise ValueError(
            f"`rewritten` names {', '.join(map(repr, missing))}, but the reports are "
            f"{', '.join(map(repr, reports))}; it maps the name of one report to that of another."
        )
    check_drawable(drawn)
