"""The page of a study: does a measure follow the target, and does it survive rescaling?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.files import atomic_write
from flatgauge.measures.registry import GROUPS
from flatgauge.report.frame_table import (
    FrameTable,
    NamedTable,
    column_contents,
    frame_contents,
    frame_table,
)
from flatgauge.report.rendering import (
    Drawable,
    check_drawable,
    choice_contents,
    drawn_contents,
    rendered,
)
from flatgauge.report.sections import Caveat, Caveats, glossary_links, glossary_of, provenance_table
from flatgauge.report.study_headline import study_headline
from flatgauge.report.study_numbers import (
    COEFFICIENTS,
    change_kind,
    change_rows,
    correlation_rows,
    notes_of,
    other_rows,
)
from flatgauge.report.study_pictures import (
    COUNTED,
    Points,
    layer_grids,
    measure_choices,
    pair_choices,
)
from flatgauge.report.study_words import statistics_words
from flatgauge.report.tables import Cell

if TYPE_CHECKING:
    import pandas as pd

#: Fewer networks than this are called few.
FEW = 20


def write_study_page(
    path: str | Path,
    *,
    title: str,
    question: str,
    frame: pd.DataFrame,
    correlations: pd.DataFrame,
    target: str,
    measures: Sequence[str],
    factors: Sequence[str] = (),
    summary: Sequence[str] = (),
    facts: Mapping[str, str] = {},
    skeletons: Mapping[str, str] = {},
    rescaled: pd.DataFrame | None = None,
    before_after: pd.DataFrame | None = None,
    layers: pd.DataFrame | None = None,
    layer_correlations: pd.DataFrame | None = None,
    colour: str | None = None,
    left_out: Sequence[str] = (),
    caveats: Sequence[str] = (),
    tables: Sequence[NamedTable] = (),
    pictures: Sequence[Drawable] = (),
    command: str | None = None,
) -> Path:
    """Write a study as one self-contained HTML file.

    Args:
        path: Where to write; an existing file is replaced.
        title: Of the page.
        question: What the study asks, in a sentence.
        frame: One row per network, by name of the run. Runs whose ``state`` is not "reached" are
            shown, but not counted.
        correlations: One row per measure. Columns that are there are shown: ``pearson``,
            ``pearson_low``, ``pearson_high``, likewise ``spearman`` and ``kendall``; ``count``,
            ``notes``; all others in a second table.
        target: The column of `frame` that measures should follow.
        measures: Columns of `frame`.
        factors: The columns of `frame` that vary by design.
        summary: What was run and what came out, in sentences for the top of the page.
        facts: Where the numbers come from: data, seeds, software, ...
        skeletons: Of the measures of basis paths, by measure.
        rescaled: As `frame`, after every network was randomly rescaled.
        before_after: One row per measure: ``before``, ``after``, with ``_low`` and ``_high``,
            and other columns of numbers.
        layers: Long: ``run``, ``measure``, ``layer``, ``value``.
        layer_correlations: As `correlations`, with the index (measure, layer).
        colour: The column that points are coloured by; None for the first factor.
        left_out: By which rule runs are left out, in sentences.
        caveats: What else a reader must know.
        tables: Further tables.
        pictures: Further pictures.
        command: The command line that repeats the study.

    Returns:
        The path.
    """
    colour = colour or next(iter(factors), None)
    _check(frame, rescaled, layers, target, measures, [*factors, *filter(None, [colour])])
    check_drawable(pictures)
    points = Points(frame, target, colour)
    kind = change_kind(before_after, correlations)
    warned = _caveats(points, [correlations, before_after], left_out, caveats)
    notes = [note.text for note in warned.notes]
    changes = [] if before_after is None else change_rows(before_after, notes)
    scatter = measure_choices(points, measures, correlations)
    pairs = [] if rescaled is None else pair_choices(points, rescaled, measures, changes, kind)
    grids = [] if layers is None else layer_grids(points, layers, layer_correlations)
    shown = [*correlations.columns, *([] if before_after is None else before_after.columns)]
    page: dict[str, Any] = {
        "title": title,
        "question": question,
        "summary": list(summary),
        "command": command,
        "target": target,
        "headline": study_headline(points, correlations, changes),
        "caveats": warned,
        "correlations": correlation_rows(correlations, notes),
        "coefficients": {k: v for k, v in COEFFICIENTS.items() if k in correlations.columns},
        "others": other_rows(correlations),
        "changes": changes,
        "change_kind": kind,
        "scatter": [choice_contents(item) for item in scatter],
        "pairs": [choice_contents(item) for item in pairs],
        "grids": [choice_contents(item) for item in grids],
        "tables": [_named(item) for item in tables],
        "pictures": [drawn_contents(item) for item in pictures],
        "runs": _runs(points, measures, factors),
        "constant": _constant(frame, [target, *measures]),
        "left_out": list(left_out),
        "reached": COUNTED,
        "provenance": provenance_table({"this study": {k: Cell(v) for k, v in facts.items()}}),
        "models": ["this study"],
        "glossary": glossary_of(measures),
        "known": glossary_links(measures, skeletons),
        "groups": GROUPS,
        "marks": {},
        "words": statistics_words(str(column) for column in shown),
    }
    contents: dict[str, Any] = {
        "title": title,
        "question": question,
        "summary": list(summary),
        "command": command,
        "target": target,
        "measures": list(measures),
        "factors": list(factors),
        "facts": dict(facts),
        "left_out": list(left_out),
        "caveats": list(caveats),
        "runs": frame_contents(frame),
        "rescaled": frame_contents(rescaled),
        "layers": column_contents(layers),
        "correlations": frame_contents(correlations),
        "layer_correlations": frame_contents(layer_correlations),
        "before_after": frame_contents(before_after),
        "tables": {item.title: frame_contents(item.frame) for item in tables},
        "pictures": [item.to_dict() for item in pictures],
    }
    return atomic_write(path, rendered("study.html", page, contents, drawn=True))


def _check(
    frame: pd.DataFrame,
    rescaled: pd.DataFrame | None,
    layers: pd.DataFrame | None,
    target: str,
    measures: Sequence[str],
    factors: Sequence[str],
) -> None:
    if not len(frame):
        raise ValueError("`frame` has no row; a study's page needs at least one network.")
    if not measures:
        raise ValueError("`measures` is empty; name at least one column of `frame`.")
    missing = [name for name in (target, *measures, *factors) if name not in frame.columns]
    if missing:
        raise ValueError(
            f"`frame` has no column {', '.join(map(repr, dict.fromkeys(missing)))}; it has "
            f"{', '.join(map(str, frame.columns))}."
        )
    for name, given in (("frame", frame), ("rescaled", rescaled)):
        if given is not None and not given.index.is_unique:
            twice = given.index[given.index.duplicated()][0]
            raise ValueError(f"`{name}` has the run {twice!r} twice; give every run one row.")
    lacking = {"run", "measure", "layer", "value"} - set([] if layers is None else layers.columns)
    if layers is not None and lacking:
        raise ValueError(
            f"`layers` has no column {', '.join(map(repr, sorted(lacking)))}; it needs run, "
            "measure, layer and value, one row for each value."
        )


def _caveats(
    points: Points,
    statistics: Sequence[pd.DataFrame | None],
    left_out: Sequence[str],
    caveats: Sequence[str],
) -> Caveats:
    """What a reader must know: runs left out, few networks, and notes on single measures."""
    told = []
    counted = int(points.counted.sum())
    if "state" in points.frame.columns:
        states = points.frame["state"][~points.counted].value_counts()
        if len(states):
            parts = ", ".join(f"{count} {state}" for state, count in states.items())
            total = len(points.frame)
            verb = "is" if total - counted == 1 else "are"
            told.append(f"{total - counted} of {total} networks {verb} not counted: {parts}.")
    told += list(left_out)
    if counted < FEW:
        told.append(f"Only {counted} networks are counted: the intervals are wide, and rough.")
    told += list(caveats)
    notes: dict[str, dict[str, None]] = {}
    for frame in (item for item in statistics if item is not None):
        for measure in frame.index:
            for text in notes_of(frame, measure):
                notes.setdefault(text, {})[str(measure)] = None
    return Caveats(
        [Caveat(text, ()) for text in dict.fromkeys(told)],
        [Caveat(text, tuple(holders)) for text, holders in notes.items()],
    )


def _named(item: NamedTable) -> FrameTable:
    return frame_table(item.frame, key=item.title, title=item.title, caption=item.caption)


def _runs(points: Points, measures: Sequence[str], factors: Sequence[str]) -> FrameTable:
    """All networks; columns with one value for all are told once, above the table."""
    frame = points.frame
    always = [points.target, *measures]
    same = _constant(frame, always)
    first = [name for name in ("state", *factors, points.target) if name in frame.columns]
    rest = [c for c in frame.columns if c not in [*first, *measures] and str(c) not in same]
    columns = list(dict.fromkeys([*first, *measures, *rest]))
    return frame_table(
        frame.rename_axis(str(frame.index.name or "run")),
        key="runs",
        caption="Every network: its state, what makes it different, what it is to predict, the "
        "measures, and the rest.",
        columns=columns,
    )


def _constant(frame: pd.DataFrame, always: Sequence[str]) -> dict[str, str]:
    """Columns with the same value for every network, that value, and not a word more."""
    if len(frame) < 2:
        return {}
    kept = {*always, "state"}
    return {
        str(column): str(frame[column].iloc[0])
        for column in frame.columns
        if column not in kept and frame[column].nunique(dropna=False) == 1
    }
