"""Which samples every process reads: each exactly once, whatever the ranks were given."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from flatgauge.batches import EMPTY, Batches, in_order, rebuilt
from flatgauge.processes import Processes

_SPLIT = "the data are the same on all {} ranks: each reads its share of them"

_OWN = "every one of the {} ranks has samples of its own"


def shard(
    data: Any, processes: Processes, *, sharded: bool | None, room: int, check: bool
) -> Batches:
    """Read the samples of this process.

    A loader with a `DistributedSampler` is read in the order of its data set, without the samples
    that the sampler repeats to fill up. Other data are compared: the same on all ranks, they are
    split; different on all, they are shards already; anything else is refused.

    Args:
        data: What the user gave on this rank.
        processes: Who measures together.
        sharded: Whether the ranks have samples of their own; None to compare them.
        room: Bytes that may be held.
        check: Whether to read a loader twice.

    Returns:
        The batches, none of them where this rank has no samples.

    Raises:
        ValueError: If there are no samples at all, or it is not clear whose they are.
    """
    if processes.size == 1:
        return Batches(data, room=room, check=check)
    known = processes.attempt("looking at the data", lambda: _indexed(data, sharded))
    lengths = processes.gathered(None if known is None else _length(known))
    if len(set(lengths)) > 1:
        listed = ", ".join(
            f"rank {rank} {'other data' if length is None else f'a data set of {length:,}'}"
            for rank, length in enumerate(lengths)
        )
        raise ValueError(
            f"the ranks' data do not fit together: {listed}. Give every rank a loader of the same "
            "data set, or its own samples and `sharded=True`."
        )
    if known is not None:
        start, stop = _range(_length(known), processes)
        chosen: Any = rebuilt(known, batch_size=known.batch_size, sampler=range(start, stop))
        batches = processes.attempt(
            "reading the data",
            lambda: Batches(chosen, room=room, check=check, may_be_empty=True),
        )
        batches.notes.append(_SPLIT.format(processes.size))
    else:
        batches = _compared(data, processes, sharded, room, check)
    batches.among(processes)
    if not sum(batches.shares):
        raise ValueError(EMPTY)
    return batches


def _indexed(data: Any, sharded: bool | None) -> DataLoader[Any] | None:
    """A loader that is known to read a data set that all ranks have, sample by sample."""
    if sharded is False and isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=256)
    if type(data) is not DataLoader or isinstance(data.dataset, IterableDataset):
        return None
    sampler = data.sampler
    if data.batch_size is None:
        return None
    if type(sampler) is DistributedSampler:
        return rebuilt(data, batch_size=data.batch_size)
    if sharded is False and in_order(data):
        return data
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement
    if sharded is False and shuffles and len(sampler) == len(data.dataset):  # type: ignore[arg-type]
        return rebuilt(data, batch_size=data.batch_size)
    return None


def _length(loader: DataLoader[Any]) -> int:
    samples = len(loader.dataset)  # type: ignore[arg-type]
    return samples - samples % (loader.batch_size or 1) if loader.drop_last else samples


def _range(samples: int, processes: Processes) -> tuple[int, int]:
    """The samples of this rank: neighbours, so that all ranks' together are in order."""
    rank, size = processes.rank, processes.size
    return rank * samples // size, (rank + 1) * samples // size


def _compared(
    data: Any, processes: Processes, sharded: bool | None, room: int, check: bool
) -> Batches:
    """Read all that the rank was given, and see whether others were given the same."""

    def read() -> tuple[Batches, NDArray[np.int64]]:
        given = [] if _is_nothing(data) else data
        found = Batches(given, room=room, check=check, may_be_empty=True)
        return found, np.array(() if sharded else found.digests(), dtype=np.int64)

    batches, numbers = processes.attempt("reading the data", read)
    if sharded:
        batches.notes.append(_OWN.format(processes.size))
        return batches
    whole = hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()
    if len(set(processes.gathered(whole))) == 1:
        start, stop = _range(batches.samples, processes)
        found = processes.attempt("splitting the data", lambda: batches.part(start, stop))
        found.notes.append(_SPLIT.format(processes.size))
        return found
    if sharded is False:
        raise ValueError(
            "`sharded=False` says that the data are the same on every rank, but they are not: "
            "loaders that shuffle differently, or samples of their own (`sharded=True`)."
        )
    own = np.unique(numbers)
    everywhere = processes.joined({"": torch.from_numpy(own)}, torch.device("cpu"))[""].numpy()
    repeated = len(everywhere) - len(np.unique(everywhere))
    if repeated:
        raise ValueError(
            f"{repeated:,} samples are on more than one rank, but not all ranks have the same: a "
            "sampler that fills up by repeating samples, or equal samples in the data. Give every "
            "rank all of the data (they are split here), a DataLoader with torch's own "
            "DistributedSampler, or say `sharded=True` to count every rank's samples as they are."
        )
    batches.notes.append(_OWN.format(processes.size))
    return batches


def _is_nothing(data: Any) -> bool:
    """Whether a rank was given no samples: None, an empty list, tensors without rows."""
    if data is None or (isinstance(data, (tuple, list)) and not data):
        return True
    return (
        isinstance(data, (tuple, list))
        and all(isinstance(item, Tensor) for item in data)
        and all(item.dim() > 0 and len(item) == 0 for item in data)
    )
