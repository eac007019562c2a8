"""The data set as a fixed, finite sum of samples, read in chunks of any size."""

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

from flatgauge.batch import (
    Batch,
    alike,
    as_batch,
    checked,
    contents,
    cut,
    digests,
    join,
    joined,
    versions,
)
from flatgauge.blame import user_code
from flatgauge.isolation import Randomness
from flatgauge.memory import format_bytes
from flatgauge.processes import BY_ITSELF, Processes

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


class Batches:
    """A data set that is visited the same way every time.

    In-memory data are sliced; a loader is read once into memory where it fits `room`, else read
    again in every pass. A loader is read twice at the start, to see that it gives the same
    samples each time: a loader that only shuffles is put in a fixed order, one whose samples
    change (random augmentation, sampling with replacement) is refused.

    Attributes:
        samples: The number of samples here.
        stored: Whether they are held in memory.
        shares: The numbers of samples of all processes that measure together.
        text: What the data are, in words.
        notes: What was done to read them in a fixed way.
    """

    def __init__(
        self, data: Any, *, room: int, check: bool = True, may_be_empty: bool = False
    ) -> None:
        self.notes: list[str] = list(getattr(data, "notes", ())) if isinstance(data, tuple) else []
        self.text = _in_words(data)
        self._room = room
        self.processes: Processes = BY_ITSELF
        self._digests: list[int] | None = None
        self._stored: list[Batch] | None = None
        self._source: Iterable[Any] = ()
        if is_one_batch(data):
            self._stored = [checked(as_batch(data, where="`data`"), "`data`")]
        elif isinstance(data, (list, tuple)):
            self._stored = list(self._read(data))
            if sum(batch.bytes for batch in self._stored) <= room:
                self._stored = joined(self._stored)
        else:
            self._source = self._ordered(data)
            self._stored = self._settle(room, check, endless=_length(self._source) is None)
        if self.samples == 0 and not may_be_empty:
            raise ValueError(EMPTY)
        self.shares, self.stored_everywhere = [self.samples], self.stored
        self._mark()

    def __deepcopy__(self, memo: dict[int, Any]) -> Batches:
        return self  # It does not change.

    def _mark(self) -> None:
        """Note what is held, to see that nobody writes to it."""
        held = self._stored or ()
        self._versions = [versions(batch) for batch in held]
        self._contents = [contents(batch) for batch in held]

    def check(self, *, bits: bool) -> None:
        """Refuse to go on where the samples that are held were written to.

        Args:
            bits: Whether to look at every number; else at what torch has counted, which leaves out
                what is written through NumPy or `.data`.

        Raises:
            ValueError: If they were.
        """
        held = self._stored or ()
        same = [versions(batch) for batch in held] == self._versions
        if not same or (bits and [contents(batch) for batch in held] != self._contents):
            raise ValueError(CHANGED)

    def among(self, processes: Processes) -> Batches:
        """The same, as the share of one of several processes in the data of all."""
        self.processes = processes
        found = processes.gathered((self.samples, self.stored))
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
    def stored(self) -> bool:
        """Whether they are held in memory."""
        return self._stored is not None

    @property
    def digest(self) -> str:
        """A short text that tells data apart by all samples and their order."""
        found = hashlib.blake2b(digest_size=16)
        for numbers in self.processes.collected("the data", lambda: np.array(self.digests())):
            found.update(numbers.astype(np.int64).tobytes())
        return found.hexdigest()

    def chunks(self, size: int) -> Iterator[Batch]:
        """Visit all samples, about `size` at a time, always in the same order.

        Args:
            size: The largest chunk; batches that cannot be split come whole.

        Yields:
            The chunks.
        """
        waiting: list[Batch] = []
        for batch in self:
            fits = sum(item.samples for item in waiting) + batch.samples <= size
            if waiting and not (fits and alike(waiting[0], batch)):
                yield join(waiting)
                waiting = []
            if batch.splittable and batch.samples < size:
                waiting.append(batch if self.stored else batch.copy())
            else:
                yield from batch.split(size)
        if waiting:
            yield join(waiting)

    def first(self, samples: int) -> Batches:
        """The first samples of all processes alone, held in memory.

        Args:
            samples: How many, at most; batches that cannot be split count whole.

        Returns:
            The batches.
        """
        other, left = copy.copy(self), samples - sum(self.shares[: self.processes.rank])
        other._stored, other._digests = [], None
        for batch in self:
            if left <= 0:
                break
            part = batch.rows(slice(left)) if batch.splittable and batch.samples > left else batch
            other._stored.append(part if self.stored else part.copy())
            left -= part.samples
        other._mark()
        return other.among(self.processes)

    def digests(self) -> list[int]:
        """One number per sample that tells it from others, in any process."""
        if self._digests is None:
            self._digests = [number for batch in self for number in digests(batch)]
        return self._digests

    def part(self, start: int, stop: int) -> Batches:
        """Some of the samples alone, by their places; batches that cannot be split come whole.

        Args:
            start: The first.
            stop: Behind the last; whoever has a batch's first sample has a whole batch.

        Returns:
            The batches.
        """
        other = copy.copy(self)
        other.notes, other._digests = list(self.notes), None
        if self._stored is not None:
            other._stored = list(cut(self._stored, start, stop))
            other._mark()
            return other
        source = self._source
        if isinstance(source, DataLoader) and in_order(source):
            other._source = rebuilt(
                source, batch_size=source.batch_size, sampler=range(start, stop)
            )
        else:
            other._source = _Window(source, start, stop)
        other._stored = other._settle(self._room, check=False)
        other._mark()
        return other

    def __iter__(self) -> Iterator[Batch]:
        """Visit the batches as they are held or as the loader gives them."""
        if self._stored is not None:
            return iter(self._stored)
        return self._streamed()

    def _streamed(self) -> Iterator[Batch]:
        """Read the source again; what a whole pass gives must be what the first one gave."""
        found: list[list[int]] = []
        for batch in self._read(_apart_from_randomness(self._source), check=False):
            found.append(contents(batch))
            yield batch
        if found != self._passed:
            raise ValueError(CHANGED)

    def _ordered(self, data: Any) -> Iterable[Any]:
        """Turn what the user gave into something that can be iterated again and again."""
        if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            data = DataLoader(data, batch_size=256)
        if isinstance(data, DataLoader):
            return self._unshuffled(data)
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

    def _unshuffled(self, loader: DataLoader[Any]) -> Iterable[Any]:
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
            return _apart(loader)
        if sampler.num_samples != len(loader.dataset):  # type: ignore[arg-type]
            return _apart(loader)
        self.notes.append("the loader shuffles; its samples are read in the data set's order")
        if loader.drop_last:
            self.notes.append("the loader drops its last batch at random; all samples are read")
        return rebuilt(loader, batch_size=loader.batch_size)

    def _settle(self, room: int, check: bool, *, endless: bool = False) -> list[Batch] | None:
        """Read twice, compare, and keep the samples if there is room for them.

        Args:
            room: The bytes that may be kept.
            check: Whether to read twice.
            endless: Whether the data may have no end.

        Returns:
            The samples, None if there is no room.

        Raises:
            ValueError: If they change, or do not come to an end.
        """
        with _undisturbed(self._source):
            kept: list[Batch] = []
            first: list[int] = []
            size = 0
            self._passed: list[list[int]] = []
            for batch in self._read(self._source):
                first += digests(batch)
                self._passed.append(contents(batch))
                size += batch.bytes
                if endless and (len(first) > _MOST_SAMPLES or size > _MOST_BYTES):
                    raise ValueError(_NO_END.format(len(first), format_bytes(size)))
                if size <= room:
                    kept.append(batch.copy())  # A loader may fill the same tensors again.
                else:
                    kept.clear()
            self._streamed_samples, self._digests = len(first), first
            if check:
                second = [d for b in self._read(self._source, check=False) for d in digests(b)]
                self._compare(first, second, storable=size <= room)
        return joined(kept) if size <= room else None

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
        with user_code("reading `data`"):
            iterator = iter(source)
        for position in count():
            where = f"batch {position} of `data`"
            with user_code(f"reading {where}"):
                raw = next(iterator, end)
            if raw is end:
                return
            batch = raw if isinstance(raw, Batch) else as_batch(raw, where=where)
            yield checked(batch, where) if check else batch


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
        return cut(batches, self._start, self._stop)


def in_order(loader: DataLoader[Any]) -> bool:
    """Whether a loader gives the samples of its data set one after the other."""
    plain = type(loader) is DataLoader and loader.batch_size is not None
    return plain and type(loader.sampler) is SequentialSampler


def rebuilt(loader: DataLoader[Any], **order: Any) -> DataLoader[Any]:
    """A plain loader of the same batches, in an order of its own."""
    return DataLoader(
        loader.dataset,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        **order,
    )


def _apart(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader that shares no running workers with the user's, who may be reading it now."""
    if not loader.persistent_workers or isinstance(loader.dataset, IterableDataset):
        return loader
    if loader.batch_sampler is None:
        return rebuilt(loader, batch_size=None, sampler=loader.sampler)
    return rebuilt(loader, batch_sampler=loader.batch_sampler)


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
    # Batches of one kind come as a list of one kind: a tensor beside a tuple or dict is a pair.
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


def _apart_from_randomness(source: Iterable[Any]) -> Iterator[Any]:
    """Read a loader with random states of its own, while everybody else keeps theirs."""
    # Not one block around the pass: what is done between two batches is not the loader's.
    inner: Randomness | None = None
    iterator: Iterator[Any] | None = None
    while True:
        with _undisturbed(source):
            if inner is not None:
                inner.restore()
            iterator = iter(source) if iterator is None else iterator
            try:
                raw = next(iterator)
            except StopIteration:
                return
            inner = Randomness(_generators(source))
        yield raw


def _generators(source: Iterable[Any]) -> list[torch.Generator]:
    """The generators that a loader draws from."""
    loaders = [source, getattr(source, "sampler", None), getattr(source, "batch_sampler", None)]
    found = [getattr(item, "generator", None) for item in loaders]
    return [item for item in found if isinstance(item, torch.Generator)]


@contextmanager
def _undisturbed(source: Iterable[Any]) -> Iterator[None]:
    """Read a loader without advancing any random state of the user's.

    The two passes of the check run under different random states on purpose.
    """
    before = Randomness(_generators(source))
    try:
        yield
    finally:
        before.restore()


def _in_words(data: Any) -> str:
    """What the user gave as data."""
    if isinstance(data, DataLoader):
        return f"{type(data).__name__} of {type(data.dataset).__name__}"
    if not (isinstance(data, (tuple, list)) and all(isinstance(item, Tensor) for item in data)):
        return type(data).__name__
    shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in data)
    names = [getattr(data, key, "") for key in ("name", "split")]
    named = ", ".join(name for name in names if isinstance(name, str) and name)
    return f"{named}: {shapes}" if named else f"tensors {shapes}"
