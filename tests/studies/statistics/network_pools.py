"""Frames of networks as a study gives them, with known relations between the columns."""

from itertools import product

import numpy as np
import pandas as pd


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def grid(seeds: int = 5, **factors) -> pd.DataFrame:
    """Every combination of levels with every seed, one row each."""
    names = [*factors, "seed"]
    rows = product(*factors.values(), range(seeds))
    frame = pd.DataFrame([dict(zip(names, row, strict=True)) for row in rows])
    return frame.rename_axis("run")


def pool(seed: int = 0, seeds: int = 5) -> pd.DataFrame:
    """Networks whose gap rises with the batch, and measures that do or do not follow it."""
    frame, source = grid(seeds, init=["a", "b", "c"], batch=[32, 64, 128]), rng(seed)
    size = len(frame)
    step = np.log2(frame["batch"])
    frame["gap"] = 2 * step + source.normal(size=size)
    frame["good"] = np.exp(frame["gap"] + 0.1 * source.normal(size=size))
    frame["by_batch"] = step + 0.1 * source.normal(size=size)
    frame["noise"] = source.normal(size=size)
    frame["same"] = 0.25
    frame["rate"] = 0.1
    return frame


def by_hand() -> pd.DataFrame:
    """Four networks: two factors of two levels, one seed."""
    frame = grid(1, a=[0, 1], b=[0, 1])
    frame["measure"] = [1.0, 2.0, 3.0, 4.0]
    frame["gap"] = [1.0, 3.0, 2.0, 4.0]
    return frame
