"""A study by hand: networks with two factors, measures that follow the gap and some that do not."""

from __future__ import annotations

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
