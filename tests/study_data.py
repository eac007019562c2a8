"""A study by hand: networks with two factors, measures that follow the gap and some that do not."""

from __future__ import annotations

import functools
import math

import numpy as np
import pandas as pd

MEASURES = [
    "rho_sum",
    "normalized_sharpness",
    "riemannian_max_eigenvalue_nodewise",
    "hessian_trace",
    "hessian_max_eigenvalue",
    "kappa_trace_sum",
]

#: Which of them do not move when a network is rescaled.
INVARIANT = MEASURES[:3]

LAYERS = ["conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight", "head.weight"]

BATCHES = (64, 256, 1024, 4096)
STARTS = ("kaiming", "xavier")


def study_frame() -> pd.DataFrame:
    """24 networks: four batch sizes, two initialisations, three seeds; one run not reached."""
    draw = np.random.default_rng(8)
    rows = []
    for batch in BATCHES:
        for init in STARTS:
            for seed in range(3):
                hidden = math.log10(batch) + (0.4 if init == "xavier" else 0.0)
                hidden += 0.25 * draw.standard_normal()
                gap = 0.02 + 0.012 * hidden + 0.004 * draw.standard_normal()
                rows.append(
                    {
                        "run": f"init={init},batch={batch},seed={seed}",
                        "data": "mnist",
                        "samples": 6000,
                        "network": "lenet5",
                        "init": init,
                        "optimizer": "sgd",
                        "rate": 0.05,
                        "batch": batch,
                        "seed": seed,
                        "state": "reached",
                        "epochs": int(20 + 10 * draw.random()),
                        "train_loss": 1e-3 * (1 + draw.random()),
                        "train_accuracy": 1.0,
                        "test_accuracy": 1.0 - gap,
                        "accuracy_gap": gap,
                        "norm": 12 + draw.standard_normal(),
                        **_measures(hidden, draw),
                    }
                )
    frame = pd.DataFrame(rows).set_index("run")
    late = frame.index[-1]
    frame.loc[late, "state"] = "not reached"
    frame.loc[late, "train_accuracy"] = 0.93
    frame.loc[late, "normalized_sharpness"] = math.nan
    return frame


def _measures(hidden: float, draw: np.random.Generator) -> dict[str, float]:
    strength = {name: 0.9 if name in INVARIANT else 0.5 for name in MEASURES}
    return {
        name: float(10 ** (strength[name] * hidden + 0.3 * draw.standard_normal() + place / 2))
        for place, name in enumerate(MEASURES)
    }


def rescaled_frame() -> pd.DataFrame:
    """The same networks after a random rescaling: some measures move by decades."""
    draw = np.random.default_rng(9)
    frame = study_frame()
    for name in MEASURES:
        if name not in INVARIANT:
            frame[name] *= 10 ** draw.uniform(0, 6, len(frame))
    return frame


def layer_frame() -> pd.DataFrame:
    """Two measures for every layer of every network, long."""
    draw = np.random.default_rng(10)
    frame = study_frame()
    return pd.DataFrame(
        [
            {
                "run": run,
                "measure": name,
                "layer": layer,
                "value": frame.loc[run, name] * 10 ** (-place / 2 + 0.2 * draw.standard_normal()),
            }
            for run in frame.index
            for name in ("rho_sum", "kappa_trace_sum")
            for place, layer in enumerate(LAYERS)
        ]
    )


def correlation_frame(frame: pd.DataFrame, values: pd.DataFrame | None = None) -> pd.DataFrame:
    """Correlations of every measure with the gap, with bootstrap intervals and what goes beside."""
    draw = np.random.default_rng(11)
    kept = frame[frame["state"] == "reached"]
    values = kept if values is None else values.loc[kept.index]
    rows = {}
    for name in MEASURES:
        pair = pd.DataFrame({"x": values[name], "y": kept["accuracy_gap"]})
        row: dict[str, object] = {}
        again = [pair.iloc[draw.integers(len(pair), size=len(pair))] for _ in range(20)]
        for method in ("pearson", "pearson_log", "spearman", "kendall"):
            row[method] = _correlation(pair, method)
            drawn = [_correlation(part, method) for part in again]
            row[f"{method}_low"], row[f"{method}_high"] = np.nanquantile(drawn, (0.025, 0.975))
        row |= {"granulated": 0.35, "granulated_low": 0.1, "granulated_high": 0.6}
        row |= {"granulated[batch]": 0.2, "granulated[init]": 0.5}
        row |= {"information": 0.12, "information_chance": 0.03, "information_chance_high": 0.08}
        for confounder in ("norm", "train_loss"):
            partial = f"partial[{confounder}]"
            row |= {partial: 0.3, f"{partial}_low": -0.1, f"{partial}_high": 0.6}
        row |= {"partial[rate]": math.nan, "count": len(pair), "notes": ""}
        rows[name] = row
    found = pd.DataFrame.from_dict(rows, orient="index").rename_axis("measure")
    found.loc["hessian_max_eigenvalue", "notes"] = "Lanczos did not converge for 2 networks."
    return found


def _correlation(pair: pd.DataFrame, method: str) -> float:
    if method == "pearson_log":
        return float(np.log(pair["x"]).corr(pair["y"]))
    if method == "spearman":
        pair, method = pair.rank(), "pearson"
    return float(pair["x"].corr(pair["y"], method=method))


def before_after_frame() -> pd.DataFrame:
    """Spearman's correlation before and after the rescaling, and how far measures moved."""
    frame, after = study_frame(), rescaled_frame()
    found = pd.DataFrame(index=pd.Index(MEASURES, name="measure"))
    for time, values in (("before", frame), ("after", after)):
        table = correlation_frame(frame, values)
        for end in ("", "_low", "_high"):
            found[f"{time}{end}"] = table[f"spearman{end}"]
    found["itself"] = [frame[n].rank().corr(after[n].rank()) for n in MEASURES]
    found["largest_change"] = [float((after[n] / frame[n] - 1).abs().max()) for n in MEASURES]
    return found


def layer_correlation_frame() -> pd.DataFrame:
    """Pearson's correlation of every layer's share with the gap."""
    frame, layers = study_frame(), layer_frame()
    rows = {}
    for key, part in layers.groupby(["measure", "layer"], sort=False):
        values = part.set_index("run")["value"]
        rows[key] = {"pearson": float(values.corr(frame["accuracy_gap"]))}
    found = pd.DataFrame.from_dict(rows, orient="index")
    found.index = pd.MultiIndex.from_tuples(found.index, names=["measure", "layer"])
    return found


def published() -> pd.DataFrame:
    """A table of a paper beside ours."""
    rows = {"rho_sum": (0.91, 0.87), "hessian_trace": (0.71, math.nan)}
    found = pd.DataFrame.from_dict(rows, orient="index", columns=["published", "ours"])
    return found.rename_axis("measure")


@functools.cache
def whole_study() -> dict[str, object]:
    """Everything that a page can show."""
    frame = study_frame()
    return {
        "title": "init-batch",
        "question": "Do measures of flatness follow the generalization gap?",
        "summary": [
            "24 LeNet-5 networks were trained on 6,000 images of MNIST, with two initialisations, "
            "four batch sizes and three seeds each.",
        ],
        "facts": {"data": "mnist, 6,000 images", "seed": "0", "software": "flatgauge 0.1.0"},
        "frame": frame,
        "rescaled": rescaled_frame(),
        "layers": layer_frame(),
        "layer_correlations": layer_correlation_frame(),
        "correlations": correlation_frame(frame),
        "before_after": before_after_frame(),
        "factors": ["init", "batch"],
        "target": "accuracy_gap",
        "measures": MEASURES,
        "colour": "batch",
        "left_out": ["A network counts if its training accuracy reached 99 %."],
        "caveats": ["The learning rate was the same for all batch sizes."],
        "command": "flatgauge study init-batch --preset quick",
    }
