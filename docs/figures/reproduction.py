"""Tables and pictures of docs/reproduction.md, from folders that `flatgauge study` wrote.

    python docs/figures/reproduction.py STUDIES [DIRECTORY]

`STUDIES` holds the folders named in that page (`random-labels-medium/mnist-mlp`, ...); those that
are not there are left out. Tables and pictures go to `docs/results` if no directory is given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from flatgauge.studies import PoolResult
from flatgauge.studies.published import published_study
from flatgauge.studies.store import PoolStore

#: Measures of the pictures before and after rescaling, classical ones below ours.
PAIRS = {
    "random-labels": ["normalized_sharpness", "hessian_trace"],
    "init-batch": ["kappa_trace_sum", "hessian_trace"],
}

#: Further pictures by study.
PICTURES: dict[str, dict[str, Callable[[PoolResult], Figure]]] = {
    "mnist-layers": {
        "layers": lambda found: found.plot_layers("kappa_trace_sum"),
        "sums": lambda found: found.plot(
            ["kappa_trace_sum", "kappa_trace_max", "rho_sum", "rho_max"]
        ),
    },
    "random-labels": {"measures": lambda found: found.plot()},
    "batch-size": {"measures": lambda found: found.plot()},
    "init-batch": {"layers": lambda found: found.plot_layers("kappa_trace_sum")},
}

#: Columns of the networks that are kept; the study's own folder has all.
COLUMNS = [
    *("state", "trained_epochs", "steps", "train_loss", "train_accuracy"),
    *("test_loss", "test_accuracy", "norm"),
]


def main() -> None:
    """Write what there is."""
    root = Path(sys.argv[1])
    place = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent.parent / "results"
    place.mkdir(exist_ok=True)
    for folder in sorted(path.parent for path in root.glob("*/*/pool.json")):
        name, _, preset = folder.parent.name.rpartition("-")
        study = published_study(name, preset)[folder.name]
        found = PoolResult(study, PoolStore(folder))
        write(found, place, name, f"{name}-{preset}-{folder.name}")


def write(found: PoolResult, place: Path, name: str, label: str) -> None:
    """The networks, the correlations and the pictures of one study."""
    frame, study = found.to_frame(), found.pool
    columns = [*study.factor_names, "seed", *COLUMNS, *found.measures]
    frame[columns].to_csv(place / f"{label}.csv", float_format="%.6g")
    for kind, table in (
        ("correlations", found.correlations),
        ("layers", found.layer_correlations),
        ("rescaled", found.before_after),
        ("published", found.compare_published().set_index("source")),
    ):
        if table is not None and not table.empty:
            kept = table.drop(columns="notes", errors="ignore").dropna(axis=1, how="all")
            kept.to_csv(place / f"{label}-{kind}.csv", float_format="%.4g")
    if name in PAIRS:
        found.plot_rescaled(PAIRS[name]).savefig(place / f"{label}-rescaled.png", dpi=110)
    for kind, draw in PICTURES.get(name, {}).items():
        draw(found).savefig(place / f"{label}-{kind}.png", dpi=110)
    print(f"{label}\n{found!r}\n")


if __name__ == "__main__":
    main()
