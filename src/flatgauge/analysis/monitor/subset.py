"""A fixed subset of the data, read once and held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from flatgauge.estimators.linalg import child_generator
from flatgauge.runtime.isolation import preserve_rng
from flatgauge.surface.data import Batch, as_batch, as_tensors, map_tensors
from flatgauge.surface.sharding import is_one_batch

#: Samples per batch that are read from a data set without batches of its own.
_READ = 64


def read_subset(data: Any, samples: int | None, *, seed: int) -> Any:
    """Choose samples, and read them once: a loader is not touched again afterwards.

    Of a pair of tensors, a data set, or a loader of a data set that can be indexed, samples are
    drawn at random, without replacement; of other batches, the first are taken.

    Args:
        data: What a `LossSurface` takes.
        samples: How many at most; None for all.
        seed: Of the choice.

    Returns:
        The samples, as a `LossSurface` takes them.
    """
    with preserve_rng(torch.device("cpu")):
        if is_one_batch(data):
            return _drawn_rows(data, samples, seed)
        if isinstance(data, DataLoader) and data.batch_size is not None:
            if not isinstance(data.dataset, IterableDataset):
                return _draw_samples(data.dataset, data.collate_fn, samples, seed)
        elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            return _draw_samples(data, default_collate, samples, seed)
        if not isinstance(data, Iterable) or iter(data) is data:
            return data  # Errors are reported where a surface is made of it.
        return list(_first(data, samples))


def _choose_indices(count: int, samples: int | None, seed: int) -> list[int]:
    """Some of the indices below `count`, in their order."""
    if samples is None or samples >= count:
        return list(range(count))
    drawn = torch.randperm(count, generator=child_generator(seed, "held samples"))[:samples]
    return sorted(drawn.tolist())


def _drawn_rows(data: Any, samples: int | None, seed: int) -> Any:
    """Some samples of one batch."""
    batch = as_batch(data, where="`data`")
    if not batch.splittable:
        return data
    return _rows(data, _choose_indices(batch.samples, samples, seed))


def _draw_samples(dataset: Any, collate: Any, samples: int | None, seed: int) -> list[Any]:
    """Some samples of a data set, in batches."""
    subset = Subset(dataset, _choose_indices(len(dataset), samples, seed))
    return list(DataLoader(subset, batch_size=_READ, collate_fn=collate))


def _first(data: Iterable[Any], samples: int | None) -> Iterator[Any]:
    """The first batches, the last one cut where that is possible."""
    left = samples
    for position, raw in enumerate(data):
        batch: Batch = as_batch(raw, where=f"batch {position} of `data`")
        if left is not None and batch.splittable and batch.samples > left:
            raw = _rows(raw, list(range(left)))
        yield map_tensors(torch.clone, as_tensors(raw))  # A loader may fill the same tensors again.
        if left is not None:
            left -= batch.samples
            if left <= 0:
                return


def _rows(data: Any, index: list[int]) -> Any:
    """Some samples of a batch, which keeps its form."""
    return map_tensors(lambda tensor: tensor[index], as_tensors(data))
