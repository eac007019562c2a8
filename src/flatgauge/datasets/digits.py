"""The 1,797 handwritten digits of 8×8 pixels that come with scikit-learn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flatgauge.datasets.samples import within


def load_digits(*, split: str, limit: int | None) -> tuple[Tensor, Tensor]:
    """Read one split of the digits: every fifth sample of each class is for testing.

    The set is not split by its authors. Taking every fifth of each class needs no random
    numbers and keeps the classes balanced; the order of the samples is kept too.

    Args:
        split: ``"train"`` (1,442 samples) or ``"test"`` (355).
        limit: Take only the first so many.

    Returns:
        Inputs (N, 1, 8, 8) in [0, 1] and targets (N,).

    Raises:
        ImportError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ImportError(
            "`digits` comes with scikit-learn, which is not installed; run "
            '`pip install "flatgauge[data]"`.'
        ) from error
    bunch = load()
    labels = np.asarray(bunch.target, np.int64)
    rank = np.zeros_like(labels)  # how many of its class came before each sample
    for label in range(10):
        rank[labels == label] = np.arange((labels == label).sum())
    chosen = np.flatnonzero((rank % 5 == 4) == (split == "test"))
    chosen = chosen[: within(limit, len(chosen), f"`digits` ({split})")]
    images = np.asarray(bunch.images, np.float32)[chosen, None] / np.float32(16.0)
    return torch.from_numpy(images), torch.from_numpy(labels[chosen])
