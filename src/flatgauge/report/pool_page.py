"""The page of a pool: does a measure follow the target, and does it survive rescaling?

In: a `PoolResult`, from which `page_of` gathers what the page shows, a `PoolPage` of frames and
sentences. Out: one self-contained HTML file with the same numbers as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatgauge.analysis.files import atomic_write
from flatgauge.analysis.landscapes.grid import landscape
from flatgauge.analysis.landscapes.result import Landscapes
from flatgauge.analysis.request import resolve_measures
from flatgauge.measures.registry import GROUPS
from flatgauge.report.frame_table import (
    FrameTable,
    NamedTable,
    column_contents,
    frame_contents,
    frame_table,
)
from flatgauge.report.pool_pictures import (
    CHANGE_KIND,
    Points,
    layer_grids,
    measure_choices,
    pair_choices,
)
from flatgauge.report.pool_statistics import (
    COEFFICIENTS,
    change_rows,
    correlation_rows,
    explain_statistics,
    notes_of,
    other_rows,
    pool_headline,
)
from flatgauge.report.pool_tables import describe_confounders, describe_left_out, describe_run
from flatgauge.report.rendering import (
    Drawable,
    check_drawable,
    choice_contents,
    drawn_contents,
    render_page,
)
from flatgauge.report.sections import Caveat, Caveats, glossary_links, glossary_of, provenance_table
from flatgauge.report.tables import Cell
from flatgauge.studies.study import Study
from flatgauge.studies.tasks import COUNTED

if TYPE_CHECKING:
    import pandas as pd

    from flatgauge.studies.result import PoolResult

#: Fewer networks than this are called few.
_FEW = 20

#: Samples that landscapes are drawn with, and points along each axis.
_DRAWN, _LINE, _PLANE = 500, 41, 13


@dataclass(frozen=True, kw_only=True)
class PoolPage:
    """What the page of a pool shows.

    Attributes:
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
    """

    title: str
    question: str
    frame: pd.DataFrame
    correlations: pd.DataFrame
    target: str
    measures: Sequence[str]
    factors: Sequence[str] = ()
    summary: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    skeletons: Mapping[str, str] = field(default_factory=dict)
    rescaled: pd.DataFrame | None = None
    before_after: pd.DataFrame | None = None
    layers: pd.DataFrame | None = None
    layer_correlations: pd.DataFrame | None = None
    colour: str | None = None
    left_out: Sequence[str] = ()
    caveats: Sequence[str] = ()
    tables: Sequence[NamedTable] = ()
    pictures: Sequence[Drawable] = ()
    command: str | None = None


def write_pool_page(path: str | Path, result: PoolResult, *, command: str | None = None) -> Path:
    """Write the page of a pool; an existing file is replaced."""
    return write_page(path, page_of(result, command))


def write_page(path: str | Path, page: PoolPage) -> Path:
    """Write frames and sentences as one self-contained HTML file."""
    _check(page)
    check_drawable(page.pictures)
    points = Points(page.frame, page.target, page.colour or next(iter(page.factors), None))
    warned = _caveats(points, [page.correlations, page.before_after], page.left_out, page.caveats)
    notes = [note.text for note in warned.notes]
    changes = [] if page.before_after is None else change_rows(page.before_after, notes)
    scatter = measure_choices(points, page.measures, page.correlations)
    pairs = (
        []
        if page.rescaled is None
        else pair_choices(points, page.rescaled, page.measures, changes, CHANGE_KIND)
    )
    grids = [] if page.layers is None else layer_grids(points, page.layers, page.layer_correlations)
    shown = [
        *page.correlations.columns,
        *([] if page.before_after is None else page.before_after.columns),
    ]
    context: dict[str, Any] = {
        "title": page.title,
        "question": page.question,
        "summary": list(page.summary),
        "command": page.command,
        "target": page.target,
        "headline": pool_headline(points, page.correlations, changes),
        "caveats": warned,
        "correlations": correlation_rows(page.correlations, notes),
        "coefficients": {k: v for k, v in COEFFICIENTS.items() if k in page.correlations.columns},
        "others": other_rows(page.correlations),
        "changes": changes,
        "change_kind": CHANGE_KIND,
        "scatter": [choice_contents(item) for item in scatter],
        "pairs": [choice_contents(item) for item in pairs],
        "grids": [choice_contents(item) for item in grids],
        "tables": [_to_frame_table(item) for item in page.tables],
        "pictures": [drawn_contents(item) for item in page.pictures],
        "runs": _runs(points, page.measures, page.factors),
        "constant": _constant(page.frame, [page.target, *page.measures]),
        "left_out": list(page.left_out),
        "reached": COUNTED,
        "provenance": provenance_table({"this study": {k: Cell(v) for k, v in page.facts.items()}}),
        "models": ["this study"],
        "glossary": glossary_of(page.measures),
        "known": glossary_links(page.measures, page.skeletons),
        "groups": GROUPS,
        "marks": {},
        "words": explain_statistics(str(column) for column in shown),
    }
    contents: dict[str, Any] = {
        "title": page.title,
        "question": page.question,
        "summary": list(page.summary),
        "command": page.command,
        "target": page.target,
        "measures": list(page.measures),
        "factors": list(page.factors),
        "facts": dict(page.facts),
        "left_out": list(page.left_out),
        "caveats": list(page.caveats),
        "runs": frame_contents(page.frame),
        "rescaled": frame_contents(page.rescaled),
        "layers": column_contents(page.layers),
        "correlations": frame_contents(page.correlations),
        "layer_correlations": frame_contents(page.layer_correlations),
        "before_after": frame_contents(page.before_after),
        "tables": {item.title: frame_contents(item.frame) for item in page.tables},
        "pictures": [item.to_dict() for item in page.pictures],
    }
    return atomic_write(path, render_page("study.html", context, contents, drawn=True))


def _check(page: PoolPage) -> None:
    """Refuse frames that lack what the page is about."""
    frame, layers = page.frame, page.layers
    columns = (page.target, *page.measures, *page.factors, *filter(None, [page.colour]))
    if not len(frame):
        raise ValueError("`frame` has no row; a study's page needs at least one network.")
    if not page.measures:
        raise ValueError("`measures` is empty; name at least one column of `frame`.")
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise ValueError(
            f"`frame` has no column {', '.join(map(repr, dict.fromkeys(missing)))}; it has "
            f"{', '.join(map(str, frame.columns))}."
        )
    for name, given in (("frame", frame), ("rescaled", page.rescaled)):
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
    known = []
    counted = int(points.in_statistics.sum())
    if "state" in points.frame.columns:
        states = points.frame["state"][~points.in_statistics].value_counts()
        if len(states):
            parts = ", ".join(f"{count} {state}" for state, count in states.items())
            total = len(points.frame)
            verb = "is" if total - counted == 1 else "are"
            known.append(f"{total - counted} of {total} networks {verb} not counted: {parts}.")
    known += list(left_out)
    if counted < _FEW:
        known.append(f"Only {counted} networks are counted: the intervals are wide, and rough.")
    known += list(caveats)
    notes: dict[str, dict[str, None]] = {}
    for frame in (item for item in statistics if item is not None):
        for measure in frame.index:
            for text in notes_of(frame, measure):
                notes.setdefault(text, {})[str(measure)] = None
    return Caveats(
        [Caveat(text, ()) for text in dict.fromkeys(known)],
        [Caveat(text, tuple(holders)) for text, holders in notes.items()],
    )


def _to_frame_table(item: NamedTable) -> FrameTable:
    return frame_table(item.frame, key=item.title, title=item.title, caption=item.caption)


def _runs(points: Points, measures: Sequence[str], factors: Sequence[str]) -> FrameTable:
    """All networks; columns with one value for all are listed once, above the table."""
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


# -- from a result ------------------------------------------------------------------------------


def page_of(result: PoolResult, command: str | None = None) -> PoolPage:
    """What the page of a result shows."""
    study, frame = result.pool, result.to_frame()
    return PoolPage(
        title=study.name,
        question=study.question or f"Which measures follow the {study.target.replace('_', ' ')}?",
        summary=describe_run(result),
        facts=_facts(result),
        skeletons={
            one.name: one.options.get("skeleton", one.measure.options["skeleton"])
            for one in resolve_measures(study.measures)
            if "skeleton" in one.measure.options
        },
        frame=frame,
        correlations=result.correlations,
        target=study.target,
        measures=result.measures,
        factors=study.factor_names,
        rescaled=result.rescaled_frame(),
        before_after=result.before_after,
        layers=result.layer_frame(),
        layer_correlations=result.layer_correlations,
        left_out=describe_left_out(result),
        caveats=describe_confounders(result),
        tables=_tables(result),
        pictures=_landscapes(result),
        command=command,
    )


def _landscapes(result: PoolResult) -> Sequence[Landscapes]:
    """One network of every level of the first factor, in all spaces asked for."""
    study, counted = result.pool, result.included_frame
    if not study.landscapes or not study.factor_names or counted.empty:
        return []
    factor = study.factor_names[0]
    first = counted.drop_duplicates(factor)
    surfaces = {
        f"{factor} {row[factor]}, {row['test_accuracy']:.1%} on test": result.surface(
            str(run)
        ).subset(_DRAWN)
        for run, row in first.iterrows()
    }
    found = []
    for space in study.landscapes:
        plane = space == "basis_paths"
        found.append(
            landscape(
                surfaces, space=space, dims=2 if plane else 1, points=_PLANE if plane else _LINE
            )
        )
    return found


def _tables(result: PoolResult) -> list[NamedTable]:
    """The cells of the design, and the paper's numbers beside ours."""
    found = []
    published = result.compare_published()
    if not published.empty:
        found.append(
            NamedTable(
                "Beside the paper",
                "Numbers as they are printed, and the same numbers of this study; its networks and "
                "data are smaller where the summary says so.",
                published.set_index("what"),
            )
        )
    if not result.included_frame.empty and result.pool.factor_names:
        found.append(
            NamedTable(
                "Networks of one kind",
                "Mean ± standard deviation over the seeds.",
                _cells_text(result.cells()),
            )
        )
    return found


def _cells_text(cells: pd.DataFrame) -> pd.DataFrame:
    """Means with deviations as text, one row per kind."""
    import pandas as pd

    names = [name for name in cells.columns.unique(0) if name != "networks"]
    rows = {}
    for key, row in cells.iterrows():
        label = ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
        rows[label] = {"networks": int(row["networks", ""])} | {
            name: _mean_text(row[name, "mean"], row[name, "std"]) for name in names
        }
    found = pd.DataFrame.from_dict(rows, orient="index")
    return found.rename_axis(", ".join(str(name) for name in cells.index.names))


def _mean_text(mean: float, deviation: float) -> str:
    """A mean with its deviation, where there is one."""
    if mean != mean:
        return "—"
    return f"{mean:.4g} ± {deviation:.2g}" if deviation == deviation else f"{mean:.4g}"


def _facts(result: PoolResult) -> dict[str, str]:
    """Where the numbers come from."""
    from importlib import metadata

    import torch

    study = result.pool
    software = f"flatgauge {metadata.version('flatgauge')}, torch {torch.__version__}"
    if not isinstance(study, Study):
        return {"factors": ", ".join(study.factor_names) or "none", "software": software}
    fixed = {
        name: value
        for name, value in study.recipe.to_dict().items()
        if name not in study.varying_fields and name != "seed" and value is not None
    }
    return {
        "recipe": ", ".join(f"{name} {value}" for name, value in fixed.items()),
        "factors": "; ".join(f"{key}: {list(values)}" for key, values in study.factors.items()),
        "seeds": ", ".join(map(str, study.declaration()["seeds"])),
        "software": software,
    }
