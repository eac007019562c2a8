"""What a pool found as one page: the parts of the page are gathered here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatgauge.analysis.landscapes.computing import landscape
from flatgauge.analysis.landscapes.several import Landscapes
from flatgauge.analysis.request import resolve_measures
from flatgauge.report.frame_table import NamedTable
from flatgauge.report.pool_tables import (
    describe_confounders,
    describe_left_out,
    describe_run,
)
from flatgauge.report.study_page import write_study_page
from flatgauge.studies.study import Study

if TYPE_CHECKING:
    import pandas as pd

    from flatgauge.studies.result import PoolResult

#: Samples that landscapes are drawn with, and points along each axis.
_DRAWN, _LINE, _PLANE = 500, 41, 13


def write_pool_page(path: str | Path, findings: PoolResult, *, command: str | None = None) -> Path:
    """Write the page of a study.

    Args:
        path: Where to.
        findings: What was found.
        command: The command line that repeats the study.

    Returns:
        The path.
    """
    study, frame = findings.pool, findings.to_frame()
    return write_study_page(
        path,
        title=study.name,
        question=study.question or f"Which measures follow the {study.target.replace('_', ' ')}?",
        summary=describe_run(findings),
        facts=_facts(findings),
        skeletons={
            one.name: one.options.get("skeleton", one.measure.options["skeleton"])
            for one in resolve_measures(study.measures)
            if "skeleton" in one.measure.options
        },
        frame=frame,
        correlations=findings.correlations,
        target=study.target,
        measures=findings.measures,
        factors=study.factor_names,
        rescaled=findings.rescaled_frame(),
        before_after=findings.before_after,
        layers=findings.layer_frame(),
        layer_correlations=findings.layer_correlations,
        left_out=describe_left_out(findings),
        caveats=describe_confounders(findings),
        tables=_tables(findings),
        pictures=pictures(findings),
        command=command,
    )


def pictures(findings: PoolResult) -> Sequence[Landscapes]:
    """Landscapes of one network of every level of the first factor, in all spaces asked for.

    Args:
        findings: What was found.

    Returns:
        Pictures; none where a study asks for none.
    """
    study, counted = findings.pool, findings.counted
    if not study.landscapes or not study.factor_names or counted.empty:
        return []
    factor = study.factor_names[0]
    first = counted.drop_duplicates(factor)
    surfaces = {
        f"{factor} {row[factor]}, {row['test_accuracy']:.1%} on test": findings.surface(
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


def _tables(findings: PoolResult) -> list[NamedTable]:
    """The cells of the design, and the paper's numbers beside ours."""
    found = []
    published = findings.compare_published()
    if not published.empty:
        found.append(
            NamedTable(
                "Beside the paper",
                "Numbers as they are printed, and the same numbers of this study; its networks and "
                "data are smaller where the summary says so.",
                published.set_index("what"),
            )
        )
    if not findings.counted.empty and findings.pool.factor_names:
        found.append(
            NamedTable(
                "Networks of one kind",
                "Mean ± standard deviation over the seeds.",
                _cells_text(findings.cells()),
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


def _facts(findings: PoolResult) -> dict[str, str]:
    """Where the numbers come from."""
    from importlib import metadata

    import torch

    study = findings.pool
    software = f"flatgauge {metadata.version('flatgauge')}, torch {torch.__version__}"
    if not isinstance(study, Study):
        return {"factors": ", ".join(study.factor_names) or "none", "software": software}
    fixed = {
        name: value
        for name, value in study.recipe.to_dict().items()
        if name not in study.varied and name != "seed" and value is not None
    }
    return {
        "recipe": ", ".join(f"{name} {value}" for name, value in fixed.items()),
        "factors": "; ".join(f"{key}: {list(values)}" for key, values in study.factors.items()),
        "seeds": ", ".join(map(str, study.declaration()["seeds"])),
        "software": software,
    }
