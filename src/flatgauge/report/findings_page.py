"""A study's findings as files: tables, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flatgauge.analysis.files import atomic_write
from flatgauge.analysis.landscapes.computing import landscape
from flatgauge.analysis.landscapes.several import Landscapes
from flatgauge.analysis.request import resolve_measures
from flatgauge.report.findings_text import confounding_words, left_out, run_words
from flatgauge.report.frame_table import NamedTable
from flatgauge.report.study_page import write_study_page

if TYPE_CHECKING:
    import pandas as pd

    from flatgauge.studies.findings import Findings

#: Samples that landscapes are drawn with, and points along each axis.
_DRAWN, _LINE, _PLANE = 500, 41, 13


def write_results(findings: Findings) -> None:
    """Write the rows of a study into its folder, whether they count or not.

    Args:
        findings: What was found.
    """
    atomic_write(findings.store.folder / "results.csv", findings.to_frame().to_csv())


def write_tables(findings: Findings) -> None:
    """Write what follows from the rows of a study into its folder.

    Args:
        findings: What was found.
    """
    tables = {
        "rescaled": findings.rescaled_frame(),
        "layers": findings.layer_frame().set_index("run"),
        "correlations": findings.correlations,
        "layer_correlations": findings.layer_correlations,
        "before_after": findings.before_after,
        "published": findings.beside_published().set_index("source"),
    }
    for name, frame in tables.items():
        if frame is not None and not frame.empty:
            atomic_write(findings.store.folder / f"{name}.csv", frame.to_csv())


def write_findings(findings: Findings, path: str | Path, *, command: str | None = None) -> Path:
    """Write the page of a study.

    Args:
        findings: What was found.
        path: Where to.
        command: The command line that repeats the study.

    Returns:
        The path.
    """
    study, frame = findings.study, findings.to_frame()
    return write_study_page(
        path,
        title=study.name,
        question=study.question or f"Which measures follow the {study.target.replace('_', ' ')}?",
        summary=run_words(findings),
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
        left_out=left_out(findings),
        caveats=confounding_words(findings),
        tables=_tables(findings),
        pictures=pictures(findings),
        command=command,
    )


def pictures(findings: Findings) -> Sequence[Landscapes]:
    """Landscapes of one network of every level of the first factor, in all spaces asked for.

    Args:
        findings: What was found.

    Returns:
        Pictures; none where a study asks for none.
    """
    study, counted = findings.study, findings.counted
    if not study.landscapes or counted.empty:
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


def _tables(findings: Findings) -> list[NamedTable]:
    """The cells of the design, and the paper's numbers beside ours."""
    found = []
    published = findings.beside_published()
    if not published.empty:
        found.append(
            NamedTable(
                "Beside the paper",
                "Numbers as they are printed, and the same numbers of this study; its networks and "
                "data are smaller where the summary says so.",
                published.set_index("what"),
            )
        )
    if not findings.counted.empty:
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


def _facts(findings: Findings) -> dict[str, str]:
    """Where the numbers come from."""
    from importlib import metadata

    import torch

    study = findings.study
    fixed = {
        name: value
        for name, value in study.recipe.to_dict().items()
        if name not in study.varied and name != "seed" and value is not None
    }
    return {
        "recipe": ", ".join(f"{name} {value}" for name, value in fixed.items()),
        "factors": "; ".join(f"{key}: {list(values)}" for key, values in study.factors.items()),
        "seeds": ", ".join(map(str, study.declaration()["seeds"])),
        "software": f"flatgauge {metadata.version('flatgauge')}, torch {torch.__version__}",
    }
