"""The data set as a fixed, finite sum of samples, read in chunks of any size.

What enters: batches as a loader gives them (a pair, a dict, inputs alone), with tensors anywhere in
nested tuples, lists and mappings. What leaves: a `DataSource` that visits the same `Batch`es in the
same order in every pass. Data in memory are sliced. A loader is read twice and compared: one whose
samples change (random augmentation, sampling with replacement) is refused. It is kept in memory
where it fits `room`, else read again in every pass.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, SequentialSampler

from flatgauge.runtime.distributed import SINGLE_PROCESS, ProcessGroup
from flatgauge.runtime.isolation import RngState, in_isolation, locate_errors
from flatgauge.runtime.resources import format_bytes

#: Where a dict batch keeps its targets, in the order of looking.
LABEL_KEYS = ("labels", "label", "targets", "target", "y")

#: The label that PyTorch and Hugging Face leave out of a loss.
IGNORED = -100

#: Whole numbers by the bytes they take.
_WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16}

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


def leaves(tree: Any) -> Iterator[Any]:
    """Yield what nested mappings, tuples and lists hold, in a fixed order."""
    inside: Iterable[Any] = tree.values() if isinstance(tree, Mapping) else tree
    if isinstance(tree, (Mapping, tuple, list)):
        for item in inside:
            yield from leaves(item)
    else:
        yield tree


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nested structure, in a fixed order."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, Tensor))


def _map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Rebuild a nested structure of other leaves, its mappings as dicts."""
    if isinstance(tree, Mapping):
        return {key: _map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [_map_leaves(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return function(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Rebuild a nested structure with every tensor replaced; other leaves stay as they are."""
    return _map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def as_tensors(tree: Any) -> Any:
    """Turn the NumPy arrays and plain mappings of a nested structure into tensors and dicts."""
    return _map_leaves(lambda x: torch.as_tensor(x) if isinstance(x, np.ndarray) else x, tree)


@dataclass(frozen=True)
class Batch:
    """Some samples: what the model is called with, and what the loss compares to.

    Attributes:
        inputs: A tensor, or a tuple (positional arguments) or dict (keyword arguments) of them.
        target: What belongs to the inputs, or None. A dict batch keeps it in `inputs` too.
        splittable: Whether every tensor has the samples along its first dimension.
        label_key: Where a dict batch keeps the target.
    """

    inputs: Any
    target: Any
    samples: int
    splittable: bool
    label_key: str | None = None

    @property
    def bytes(self) -> int:
        """What its tensors take."""
        return sum(t.numel() * t.element_size() for t in tensors((self.inputs, self.target)))

    @property
    def kind(self) -> Hashable:
        """What it is up to its number of samples: batches of one kind can be joined."""
        found, spec = pytree.tree_flatten((self.inputs, self.target))
        return spec, *(
            (x.dtype, x.device.type, tuple(x.shape[1:])) if isinstance(x, Tensor) else repr(x)
            for x in found
        )

    def copy(self) -> Batch:
        """The same samples in tensors of their own."""
        inputs, target = map_tensors(torch.clone, (self.inputs, self.target))
        return replace(self, inputs=inputs, target=target)

    def rows(self, index: slice | list[int]) -> Batch:
        """Take some of the samples, in the order of the index."""
        inputs, target = map_tensors(lambda tensor: tensor[index], (self.inputs, self.target))
        count = next(tensors((target, inputs))).shape[0]
        return replace(self, inputs=inputs, target=target, samples=count)

    def split(self, size: int) -> Iterator[Batch]:
        """Cut into the fewest pieces of at most `size` samples, all nearly equal."""
        if self.samples <= size or not self.splittable:
            yield self
            return
        pieces = -(-self.samples // size)
        edges = [round(i * self.samples / pieces) for i in range(pieces + 1)]
        for start, stop in pairwise(edges):
            yield self.rows(slice(start, stop))


def as_batch(raw: Any, *, where: str) -> Batch:
    """Read one batch as the user's loader gives it."""
    raw = as_tensors(raw)
    inputs, target, key = raw, None, None
    if isinstance(raw, Mapping):
        key = next((key for key in LABEL_KEYS if key in raw), None)
        target = None if key is None else raw[key]
    elif isinstance(raw, (tuple, list)):
        if len(raw) not in (1, 2):
            raise ValueError(
                f"{where} is a {type(raw).__name__} of {len(raw)} items, but a batch is a pair "
                "(inputs, targets); for several inputs give ((first, second), targets), or a "
                "dict of keyword arguments."
            )
        inputs, target = raw[0], raw[1] if len(raw) == 2 else None
    if any(tensor.layout is not torch.strided for tensor in tensors((inputs, target))):
        raise ValueError(
            f"{where} holds a sparse or nested tensor, which cannot be cut into samples; make it "
            "dense with `.to_dense()` (`.to_padded_tensor(0.0)` if nested)."
        )
    if any(tensor.is_meta for tensor in tensors((inputs, target))):
        raise ValueError(
            f"{where} holds a tensor on the device `meta`, which has no values; give data that are "
            "in memory."
        )
    sizes = [tensor.shape[0] for tensor in tensors((target, inputs)) if tensor.dim() > 0]
    if sizes and sizes[0] == 0:
        raise ValueError(f"{where} holds no samples; remove it, or give data that has some.")
    # Slicing the tensors must slice all there is per sample.
    whole = all(
        leaf.dim() > 0 if isinstance(leaf, Tensor) else leaf is None or isinstance(leaf, bool)
        for leaf in leaves((inputs, target))
    )
    splittable = bool(sizes) and len(set(sizes)) == 1 and whole
    return Batch(inputs, target, sizes[0] if sizes else 1, splittable, key)


def why_whole(batch: Batch) -> str:
    """Why a batch cannot be cut into samples, as text."""
    odd = [
        type(leaf).__name__
        for leaf in leaves((batch.inputs, batch.target))
        if not isinstance(leaf, (Tensor, bool, type(None)))
    ]
    if odd:
        return f"they hold items of type {odd[0]}"
    if not all(tensor.dim() for tensor in tensors((batch.inputs, batch.target))):
        return "they hold tensors without dimensions"
    return "their tensors differ in the first dimension"


def check_numbers(batch: Batch, where: str) -> Batch:
    """Refuse inputs or targets that are not finite."""
    for role, tree in (("inputs", batch.inputs), ("targets", batch.target)):
        for tensor in tensors(tree):
            # In pieces: asked of all at once, it takes more than the data themselves.
            pieces = tensor.split(256) if tensor.dim() else (tensor,)
            if tensor.is_floating_point() and not all(torch.isfinite(x).all() for x in pieces):
                bad = int((~torch.isfinite(tensor)).sum())
                raise ValueError(
                    f"the {role} of {where} hold {bad} values that are nan or infinite; "
                    "clean the data first (`torch.isfinite` finds them)."
                )
    return batch


def version_counters(batch: Batch) -> list[int]:
    """How often the tensors of a batch have been written to by torch."""
    held = tensors((batch.inputs, batch.target))
    return [0 if tensor.is_inference() else tensor._version for tensor in held]


def checksums(batch: Batch) -> list[int]:
    """Two numbers per tensor of a batch that change with its bits, and with the order of rows."""
    found = []
    for tensor in tensors((batch.inputs, batch.target)):
        total = ordered = place = 0
        for piece in (tensor if tensor.dim() else tensor[None]).split(1024):  # Copied in pieces.
            flat = piece.detach().reshape(len(piece), -1).contiguous()
            bits = flat.view(_WHOLE.get(flat.element_size(), torch.uint8))
            rows = bits.sum(1, dtype=torch.int64)
            total += int(rows.sum())
            places = torch.arange(place + 1, place + len(rows) + 1, device=rows.device)
            ordered += int((rows * places).sum())
            place += len(rows)
        found += [total, ordered]
    return found


def can_join(first: Batch, second: Batch) -> bool:
    """Whether two batches can be joined into one."""
    return first.splittable and second.splittable and first.kind == second.kind


def join(batches: list[Batch]) -> Batch:
    """Make one batch of several of one kind, along the samples of each of their tensors."""
    if len(batches) == 1:
        return batches[0]
    found, spec = zip(*(pytree.tree_flatten((b.inputs, b.target)) for b in batches), strict=True)
    parts = zip(*found, strict=True)
    joined = [torch.cat(part) if isinstance(part[0], Tensor) else part[0] for part in parts]
    inputs, target = pytree.tree_unflatten(joined, spec[0])
    samples = sum(batch.samples for batch in batches)
    return replace(batches[0], inputs=inputs, target=target, samples=samples)


def join_neighbours(batches: Iterable[Batch]) -> list[Batch]:
    """Join neighbours of one signature, so that later chunks are slices and not copies."""
    runs: list[list[Batch]] = []
    for batch in batches:
        if runs and can_join(runs[-1][0], batch):
            runs[-1].append(batch)
        else:
            runs.append([batch])
    return [join(run) for run in runs]


def slice_batches(batches: Iterable[Batch], start: int, stop: int) -> Iterator[Batch]:
    """The samples from one place to another; what cannot be cut belongs where it begins."""
    place = 0
    for batch in batches:
        if place >= stop:
            return
        first, behind = max(start - place, 0), min(stop - place, batch.samples)
        if batch.splittable:
            if first < behind:
                yield batch if behind - first == batch.samples else batch.rows(slice(first, behind))
        elif start <= place:
            yield batch
        place += batch.samples


def fingerprint(tree: Any, *, depth: int = 8) -> Hashable:
    """What identifies a structure by content; objects of unknown kind by their attributes."""
    kind = type(tree).__name__
    if depth == 0 or tree is None or isinstance(tree, (str, bytes, int, float, complex)):
        return kind if depth == 0 else (kind, repr(tree))
    if isinstance(tree, Tensor):
        if tree.layout is not torch.strided:
            tree = tree.to_dense()
        flat = tree.detach().cpu().contiguous().reshape(-1)
        return kind, str(tree.dtype), tuple(tree.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(tree, np.ndarray):
        return kind, str(tree.dtype), tree.shape, tree.tobytes()
    if isinstance(tree, Mapping):
        return kind, tuple((repr(k), fingerprint(v, depth=depth - 1)) for k, v in tree.items())
    if isinstance(tree, (tuple, list)):
        return kind, tuple(fingerprint(item, depth=depth - 1) for item in tree)
    if isinstance(tree, (set, frozenset)):
        return kind, frozenset(fingerprint(item, depth=depth - 1) for item in tree)
    slots = [name for part in type(tree).__mro__ for name in getattr(part, "__slots__", ())]
    inside = {name: getattr(tree, name, None) for name in slots} | getattr(tree, "__dict__", {})
    return kind, fingerprint(inside, depth=depth - 1)


def sample_digests(batch: Batch) -> list[int]:
    """One number per sample that identifies it, in whatever batch or process it comes."""
    if not batch.splittable:  # It counts all its samples by the one number it has.
        return [_number(repr(fingerprint((batch.inputs, batch.target))).encode())] * batch.samples
    columns = []
    for tensor in tensors((batch.inputs, batch.target)):
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        columns.append(flat.reshape(batch.samples, flat.numel() // batch.samples).numpy())
    return [_number(*(column[i].tobytes() for column in columns)) for i in range(batch.samples)]


def _number(*pieces: bytes) -> int:
    """A number of 64 bits with a sign, made of bytes."""
    found = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        found.update(len(piece).to_bytes(8, "little"))
        found.update(piece)
    return int.from_bytes(found.digest(), "little", signed=True)


class DataSource:
    """A data set that is visited the same way every time.

    Attributes:
        samples: The number of samples of this process.
        shares: The numbers of samples of all processes that measure together.
        notes: What was done to read them in a fixed way.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        room: int,
        check: bool = True,
        may_be_empty: bool = False,
        text: str = "",
        notes: Iterable[str] = (),
    ) -> None:
        self.text, self.notes = text, list(notes)
        self._room, self._source = room, source
        self.processes: ProcessGroup = SINGLE_PROCESS
        self._digests: list[int] | None = None
        self._stored: list[Batch] | None = None
        if isinstance(source, (list, tuple)):
            self._stored, self._source = list(self._read(source)), ()
            if sum(batch.bytes for batch in self._stored) <= room:
                self._stored = join_neighbours(self._stored)
        else:
            self._stored = self._read_twice(room, check, endless=_length(source) is None)
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
            where = "`data`" if raw is batch else where
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
