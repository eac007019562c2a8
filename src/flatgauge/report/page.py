"""The report as one HTML file that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatgauge.analysis.certificate import Certificate
from flatgauge.analysis.files import atomic_write, to_plain
from flatgauge.analysis.formatting import MARKS
from flatgauge.analysis.ranking import SamplingErrors, rank_models
from flatgauge.measures.registry import GROUPS
from flatgauge.report.certificate_view import VERDICTS, certificate_view
from flatgauge.report.difference_table import difference_views
from flatgauge.report.headline import headline_of
from flatgauge.report.layer_bars import layer_choices, unit_choices
from flatgauge.report.number_table import number_tables
from flatgauge.report.rendering import (
    Drawable,
    check_drawable,
    choice_contents,
    drawn_contents,
    rendered,
)
from flatgauge.report.sections import (
    caveats_of,
    gauge_contents,
    gauge_view,
    glossary_links,
    glossary_of,
    provenance_of,
    skeletons_of,
)

if TYPE_CHECKING:
    from flatgauge.analysis.measurement import Report
    from flatgauge.symmetry import GaugeGroup


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
    table = rank_models(single, pairs)
    differences = [row for ranking in table.values() for row in ranking.differences()]
    contents = {
        "title": title or ", ".join(reports),
        "command": command,
        "remarks": list(remarks),
        "rewritten": dict(rewritten),
        "reports": {name: report.to_dict() for name, report in reports.items()},
        "differences": to_plain([row.to_dict() for row in differences]),
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
        "headline": headline_of(reports, rewritten, certificates, table),
        "differences": difference_views(differences),
        "caveats": caveats,
        "tables": number_tables(reports, caveats),
        "layers": [choice_contents(choice) for choice in layer_choices(reports)],
        "units": [choice_contents(choice) for choice in unit_choices(reports)],
        "certificates": [
            certificate_view(name, found, reports[name].facts.samples if name in reports else None)
            for name, found in certificates.items()
        ],
        "gauges": [gauge_view(name, gauge) for name, gauge in gauges.items()],
        "spectra": [drawn_contents(drawn) for drawn in spectra],
        "landscapes": [drawn_contents(drawn) for drawn in landscapes],
        "provenance": provenance_of(reports),
        "models": list(reports),
        "glossary": glossary_of(measured),
        "known": glossary_links(measured, skeletons_of(reports)),
        "groups": GROUPS,
        "marks": MARKS,
        "verdicts": VERDICTS,
    }
    drawn = any(page[key] for key in ("layers", "units", "spectra", "landscapes"))
    return atomic_write(path, rendered("page.html", page, contents, drawn=drawn))


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
