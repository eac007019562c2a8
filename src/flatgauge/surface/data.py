"""The data set as a fixed, finite sum of samples, read in chunks of any size.

What enters: tensors, a list of batches, a data set or a loader. What leaves: a `DataSource` that
visits the same samples in the same order in every pass. Data in memory are sliced. A loader is read
twice and compared: one that only shuffles is put in a fixed order, one whose samples change (random
augmentation, sampling with replacement) is refused. It is kept in memory where it fits `room`, else
read again in every pass.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from flatgauge.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from flatgauge.runtime.isolation import RngState, in_isolation, locate_errors
from flatgauge.runtime.resources import format_bytes
from flatgauge.surface.batch import (
    Batch,
    as_batch,
    can_join,
    check_numbers,
    checksums,
    join,
    join_neighbours,
    sample_digests,
    slice_batches,
    version_counters,
)

#: What is read at most of data that do not say how many they are: they may have no end.
_MOST_SAMPLES, _MOST_BYTES = 2**18, 2**35

EMPTY = "`data` is empty; a loss surface needs at least one sample."

_NO_END = (
    "`data` does not say how long it is (`len(data)` fails), and has not come to an end after {:,} "
    "samples ({}); a loss surface needs a finite set of samples. Take some of them "
    "(`list(itertools.islice(data, 100))` for 100 batches); or, if there is an end, give `data` "
    "(or its IterableDataset) a `__len__`."
)

CHANGED = (
    "the data have changed since the surface was made: something has written into the tensors or "
    "the data set that it was given. Make a new LossSurface(model, loss, data); or give it copies "
    "(`x.clone()`), if it is to keep the old ones."
)


class DataSource:
    """A data set that is visited the same way every time.

    Attributes:
        samples: The number of samples of this process.
        shares: The numbers of samples of all processes that measure together.
        notes: What was done to read them in a fixed way.
    """

    def __init__(
        self, data: Any, *, room: int, check: bool = True, may_be_empty: bool = False
    ) -> None:
        self.notes: list[str] = list(getattr(data, "notes", ())) if isinstance(data, tuple) else []
        self.text = _describe(data)
        self._room = room
        self.processes: ProcessGroup = SINGLE_PROCESS
        self._digests: list[int] | None = None
        self._stored: list[Batch] | None = None
        self._source: Iterable[Any] = ()
        if is_one_batch(data):
            self._stored = [check_numbers(as_batch(data, where="`data`"), "`data`")]
        elif isinstance(data, (list, tuple)):
            self._stored = list(self._read(data))
            if sum(batch.bytes for batch in self._stored) <= room:
                self._stored = join_neighbours(self._stored)
        else:
            self._source = self._as_iterable(data)
            self._stored = self._read_twice(room, check, endless=_length(self._source) is None)
        if self.samples == 0 and not may_be_empty:
            raise ValueError(EMPTY)
        self.shares, self.stored_everywhere = [self.samples], self.in_memory
        self._mark()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataSource:
        return self  # It does not change.

    def _mark(self) -> None:
        """Note what is held, to see that nobody writes to it."""
        held = self._stored or ()
        self._versions = [version_counters(batch) for batch in held]
        self._contents = [checksums(batch) for batch in held]

    def check(self, *, bits: bool) -> None:
        """Refuse to go on where the samples that are held were written to."""
        held = self._stored or ()
        same = [version_counters(batch) for batch in held] == self._versions
        if not same or (bits and [checksums(batch) for batch in held] != self._contents):
            raise ValueError(CHANGED)

    def check_contents(self) -> None:
        """The same for every number, outside of a pass."""
        if not in_isolation():
            self.check(bits=True)

    def share_among(self, processes: ProcessGroup) -> DataSource:
        """The same, as the share of one of several processes in the data of all."""
        self.processes = processes
        found = processes.all_gather((self.samples, self.in_memory))
        self.shares = [samples for samples, _ in found]
        self.stored_everywhere = all(stored for _, stored in found)
        return self

    @property
    def samples(self) -> int:
        """The number of samples here."""
        if self._stored is not None:
            return sum(batch.samples for batch in self._stored)
        return self._streamed_samples

    @property
    def in_memory(self) -> bool:
        """Whether they are held in memory."""
        return self._stored is not None

    @property
    def digest(self) -> str:
        """A short text that identifies data by all samples and their order."""
        found = hashlib.blake2b(digest_size=16)
        for numbers in self.processes.gather("the data", lambda: np.array(self.digests())):
            found.update(numbers.astype(np.int64).tobytes())
        return found.hexdigest()

    def chunks(self, size: int) -> Iterator[Batch]:
        """Visit all samples, about `size` at a time, always in the same order."""
        waiting: list[Batch] = []
        for batch in self:
            fits = sum(item.samples for item in waiting) + batch.samples <= size
            if waiting and not (fits and can_join(waiting[0], batch)):
                yield join(waiting)
                waiting = []
            if batch.splittable and batch.samples < size:
                waiting.append(batch if self.in_memory else batch.copy())
            else:
                yield from batch.split(size)
        if waiting:
            yield join(waiting)

    def first(self, samples: int) -> DataSource:
        """The first samples of all processes; batches that cannot be split count whole."""
        left = samples - sum(self.shares[: self.processes.rank])
        return self.slice(0, min(max(left, 0), self.samples)).share_among(self.processes)

    def digests(self) -> list[int]:
        """One number per sample that identifies it, in any process."""
        if self._digests is None:
            self._digests = [number for batch in self for number in sample_digests(batch)]
        return self._digests

    def slice(self, start: int, stop: int) -> DataSource:
        """Some of the samples alone, by their places; batches that cannot be split come whole."""
        other = copy.copy(self)
        other.notes, other._digests = list(self.notes), None
        if self._stored is not None:
            other._stored = list(slice_batches(self._stored, start, stop))
            other._mark()
            return other
        source = self._source
        if isinstance(source, DataLoader) and in_order(source):
            other._source = rebuild(
                source, batch_size=source.batch_size, sampler=range(start, stop)
            )
        else:
            other._source = _Window(source, start, stop)
        other._stored = other._read_twice(self._room, check=False)
        other._mark()
        return other

    def __iter__(self) -> Iterator[Batch]:
        """Visit the batches as they are held or as the loader gives them."""
        if self._stored is not None:
            return iter(self._stored)
        return self._read_again()

    def _read_again(self) -> Iterator[Batch]:
        """Read the source again; what a whole pass gives must be what the first one gave."""
        found: list[list[int]] = []
        for batch in self._read(_with_own_randomness(self._source), check=False):
            found.append(checksums(batch))
            yield batch
        if found != self._passed:
            raise ValueError(CHANGED)

    def _as_iterable(self, data: Any) -> Iterable[Any]:
        """Turn what the user gave into something that can be iterated again and again."""
        if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            data = DataLoader(data, batch_size=256)
        if isinstance(data, DataLoader):
            return self._in_order(data)
        if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
            raise TypeError(
                f"`data` is a {type(data).__name__}; it must be a DataLoader, a list (or any "
                "re-iterable) of batches, or one pair (inputs, targets)."
            )
        if iter(data) is data:
            raise TypeError(
                f"`data` is a {type(data).__name__} that can be read only once, but a loss "
                "surface visits its data many times; pass `list(data)`, or the DataLoader itself."
            )
        return data

    def _in_order(self, loader: DataLoader[Any]) -> Iterable[Any]:
        """Replace a plain shuffling sampler by the order of the data set."""
        sampler = loader.sampler
        if type(loader) is not DataLoader:  # Its own way of iterating is part of the data.
            return loader
        if isinstance(sampler, DistributedSampler):
            self.notes.append(
                f"the loader's DistributedSampler gives the samples of rank {sampler.rank} of "
                f"{sampler.num_replicas} only; `processes='all'` measures on those of all ranks"
            )
        if type(sampler) is not RandomSampler or sampler.replacement or loader.batch_size is None:
            return _own_workers(loader)
        if sampler.num_samples != len(loader.dataset):  # type: ignore[arg-type]
            return _own_workers(loader)
        self.notes.append("the loader shuffles; its samples are read in the data set's order")
        if loader.drop_last:
            self.notes.append("the loader drops its last batch at random; all samples are read")
        return rebuild(loader, batch_size=loader.batch_size)

    def _read_twice(self, room: int, check: bool, *, endless: bool = False) -> list[Batch] | None:
        """Read twice, compare, and keep the samples if there is room for them."""
        with _keep_randomness(self._source):
            kept: list[Batch] = []
            first: list[int] = []
            size = 0
            self._passed: list[list[int]] = []
            for batch in self._read(self._source):
                first += sample_digests(batch)
                self._passed.append(checksums(batch))
                size += batch.bytes
                if endless and (len(first) > _MOST_SAMPLES or size > _MOST_BYTES):
                    raise ValueError(_NO_END.format(len(first), format_bytes(size)))
                if size <= room:
                    kept.append(batch.copy())  # A loader may fill the same tensors again.
                else:
                    kept.clear()
            self._streamed_samples, self._digests = len(first), first
            if check:
                second = [
                    d for b in self._read(self._source, check=False) for d in sample_digests(b)
                ]
                self._compare(first, second, storable=size <= room)
        return join_neighbours(kept) if size <= room else None

    def _compare(self, first: list[int], second: list[int], *, storable: bool) -> None:
        """Refuse data that change from pass to pass."""
        if first == second:
            return
        if Counter(first) != Counter(second):
            changed = sum((Counter(first) - Counter(second)).values())
            raise ValueError(
                f"`data` gives other samples on a second pass ({changed} of {len(first)} differ): "
                "random augmentation, sampling with replacement, or a random subset. A loss "
                "surface is a fixed function; switch the randomness off, or pass a list of "
                "batches read once."
            )
        if not storable:
            raise ValueError(
                "`data` comes in another order on every pass and is too large for the memory "
                "budget to be held; pass a loader with `shuffle=False`, or raise `memory=`."
            )
        self.notes.append("the data come in random order; the first pass is held in memory")

    @staticmethod
    def _read(source: Iterable[Any], *, check: bool = True) -> Iterator[Batch]:
        """Read batches one by one, looking at their numbers on the first pass."""
        end = object()
        with locate_errors("reading `data`"):
            iterator = iter(source)
        for position in count():
            where = f"batch {position} of `data`"
            with locate_errors(f"reading {where}"):
                raw = next(iterator, end)
            if raw is end:
                return
            batch = raw if isinstance(raw, Batch) else as_batch(raw, where=where)
            yield check_numbers(batch, where) if check else batch


def _length(source: Any) -> int | None:
    """How many batches a source says that it has; None where it does not say."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


class _Window:
    """Some of the samples of a source, by their places."""

    def __init__(self, source: Iterable[Any], start: int, stop: int) -> None:
        self._source, self._start, self._stop = source, start, stop
        self.generator = getattr(source, "generator", None)
        self.sampler = getattr(source, "sampler", None)
        self.batch_sampler = getattr(source, "batch_sampler", None)

    def __iter__(self) -> Iterator[Batch]:
        batches = (as_batch(raw, where="`data`") for raw in self._source)
        return slice_batches(batches, self._start, self._stop)


def in_order(loader: DataLoader[Any]) -> bool:
    """Whether a loader gives the samples of its data set one after the other."""
    plain = type(loader) is DataLoader and loader.batch_size is not None
    return plain and type(loader.sampler) is SequentialSampler


def rebuild(loader: DataLoader[Any], **order: Any) -> DataLoader[Any]:
    """A plain loader of the same batches, in an order of its own."""
    return DataLoader(
        loader.dataset,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        **order,
    )


def _own_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader that shares no running workers with the user's, who may be reading it now."""
    if not loader.persistent_workers or isinstance(loader.dataset, IterableDataset):
        return loader
    if loader.batch_sampler is None:
        return rebuild(loader, batch_size=None, sampler=loader.sampler)
    return rebuild(loader, batch_sampler=loader.batch_sampler)


def is_one_batch(data: Any) -> bool:
    """Whether the data are one batch rather than several."""
    if isinstance(data, (Mapping, Tensor)):
        return True
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    first, second = data
    if hasattr(second, "shape"):
        if isinstance(data, list) and hasattr(first, "shape"):
            return not _two_batches(first, second)
        return True
    # Batches of one kind come as a list of one kind: a tensor next to a tuple or dict is a pair.
    nested = isinstance(second, (tuple, list, Mapping))
    kinds = (hasattr(first, "shape"), isinstance(first, Mapping), isinstance(first, (tuple, list)))
    return nested and (kinds[0] or kinds[1:] != _kind(second))


def _kind(item: Any) -> tuple[bool, bool]:
    return isinstance(item, Mapping), isinstance(item, (tuple, list))


def _two_batches(first: Any, second: Any) -> bool:
    """Whether a list of two arrays is two batches of inputs rather than a pair."""
    if first.shape[1:] != second.shape[1:] or first.dtype != second.dtype:
        return False
    if len(first) != len(second):
        return True
    raise ValueError(
        f"`data` is a list of two tensors of shape {tuple(first.shape)}, which may be inputs with "
        "their targets or two batches of inputs; give a tuple (inputs, targets), or a list of "
        "batches [(first,), (second,)]."
    )


def _with_own_randomness(source: Iterable[Any]) -> Iterator[Any]:
    """Read a loader with random states of its own, while everybody else keeps theirs."""
    # Not one block around the pass: what is done between two batches is not the loader's.
    inner: RngState | None = None
    iterator: Iterator[Any] | None = None
    while True:
        with _keep_randomness(source):
            if inner is not None:
                inner.restore()
            iterator = iter(source) if iterator is None else iterator
            try:
                raw = next(iterator)
            except StopIteration:
                return
            inner = RngState(_generators(source))
        yield raw


def _generators(source: Iterable[Any]) -> list[torch.Generator]:
    """The generators that a loader draws from."""
    loaders = [source, getattr(source, "sampler", None), getattr(source, "batch_sampler", None)]
    found = [getattr(item, "generator", None) for item in loaders]
    return [item for item in found if isinstance(item, torch.Generator)]


@contextmanager
def _keep_randomness(source: Iterable[Any]) -> Iterator[None]:
    """Read a loader without advancing any random state of the user's."""
    # The two passes of the check run under different random states on purpose.
    before = RngState(_generators(source))
    try:
        yield
    finally:
        before.restore()


def _describe(data: Any) -> str:
    """What the user gave as data."""
    if isinstance(data, DataLoader):
        return f"{type(data).__name__} of {type(data.dataset).__name__}"
    if not (isinstance(data, (tuple, list)) and all(isinstance(item, Tensor) for item in data)):
        return type(data).__name__
    shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in data)
    names = [getattr(data, key, "") for key in ("name", "split")]
    named = ", ".join(name for name in names if isinstance(name, str) and name)
    return f"{named}: {shapes}" if named else f"tensors {shapes}"
