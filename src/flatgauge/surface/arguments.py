"""What a user gave, read: options, model and data; of several processes, each one's share.

What enters: the arguments of a `LossSurface`. What leaves: a `FunctionalModel`, and a `DataSource`
that reads the data in a fixed order, such that all ranks together read every sample exactly once.
A model sharded by `fully_shard` runs where it is, at values that are written into its shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from flatgauge.estimators.linalg import is_finite
from flatgauge.runtime.distributed import ProcessGroup
from flatgauge.runtime.isolation import locate_errors
from flatgauge.surface.data import (
    EMPTY,
    Batch,
    DataSource,
    as_batch,
    in_order,
    rebuild,
)
from flatgauge.surface.model import FunctionalModel, unwrap

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface

T = TypeVar("T")


def shared_processes(surfaces: Iterable[LossSurface]) -> ProcessGroup:
    """Who measures some surfaces together."""
    found = list({id(surface.processes): surface.processes for surface in surfaces}.values())
    if len(found) > 1:
        raise ValueError(
            "the surfaces are measured by different processes; give all of them the same "
            "`processes=`."
        )
    return found[0]


def check_order(model: Any, loss: Any, data: Any) -> None:
    """Catch arguments in the wrong order, as other tools have them."""
    misplaced = isinstance(loss, nn.Module) and not isinstance(model, nn.Module)
    if misplaced or isinstance(data, nn.Module):
        kinds = ", ".join(type(item).__name__ for item in (model, loss, data))
        raise TypeError(f"LossSurface got ({kinds}); the order is LossSurface(model, loss, data).")


def check_options(chunk: Any, dtype: Any, weight_decay: Any, **switches: Any) -> None:
    """Refuse settings that mean nothing; switches are true or false, or None where allowed."""
    whole = isinstance(chunk, int) and not isinstance(chunk, bool)
    if chunk is not None and (not whole or chunk < 1):
        raise ValueError(f"`chunk={chunk!r}` must be a number of samples, at least 1, or None.")
    if not is_finite(weight_decay) or weight_decay < 0:
        raise ValueError(f"`weight_decay={weight_decay!r}` must be a finite number of at least 0.")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"`dtype={dtype!r}` must be torch.float32, torch.float64 or None.")
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(
            f"`dtype={dtype}` is too coarse for second derivatives; use torch.float32, "
            "torch.float64, or None to follow the model."
        )
    for name, value in switches.items():
        if not isinstance(value, bool) and not (value is None and name == "sharded"):
            raise TypeError(f"`{name}={value!r}` is a {type(value).__name__}; give True or False.")


def make_functional(
    model: Any, dtype: torch.dtype | None, processes: ProcessGroup
) -> FunctionalModel:
    """The model as a function of its parameters, sharded or not."""
    module = unwrap(model)
    parts = [name for name, p in module.named_parameters() if hasattr(p, "full_tensor")]
    if not parts:
        return FunctionalModel(model, dtype)
    kind = getattr(dist.fsdp, "FSDPModule", ())
    if not isinstance(module, kind):
        raise ValueError(
            f"`{parts[0]}` of the model is a DTensor, but the model is not sharded as a whole by "
            "`torch.distributed.fsdp.fully_shard`; tensor parallelism cannot be measured. Load its "
            "full state dict into a plain model."
        )
    if processes.size == 1:
        raise ValueError(
            "the model is sharded by FSDP: no process can run it alone. Make the surface on all "
            "ranks, with `processes='all'`."
        )
    return ShardedModel(module, dtype, processes)


class ShardedModel(FunctionalModel):
    """A model sharded by FSDP: evaluated where it is, at values that are written into its shards.

    Vectors are whole on every rank; parameters, gradients and activations inside the model are as
    FSDP has them. All ranks that the model is sharded over must measure together.
    """

    sharded = True

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None, processes: ProcessGroup
    ) -> None:
        self._processes = processes
        self._held: Sequence[Tensor] | None = None
        self._seen: dict[str, Tensor] = {}
        self._shards: dict[str, nn.Parameter] = {}
        super().__init__(model, dtype)
        own = {parameter.dtype for parameter in model.parameters()}
        if own != {self.dtype}:
            raise ValueError(
                f"a model sharded by FSDP is measured as it is, in {', '.join(map(str, own))}, not "
                f"in {self.dtype}; convert it before it is sharded (`model.float()`)."
            )
        ranks = {p.device_mesh.size() for p in model.parameters()}  # type: ignore[attr-defined]
        if ranks != {processes.size}:
            raise ValueError(
                f"the model is sharded over {', '.join(map(str, ranks))} ranks, but "
                f"{processes.size} measure together; give `processes=` the group of its mesh."
            )

    def refresh(self) -> bool:
        """Read the model again if its parameters or buffers changed on any rank."""
        self._check_parameters()
        tables = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        now = {name: _local(value) for name, value in tables.items()}
        same = now.keys() == self._seen.keys() and all(
            torch.equal(value, self._seen[name]) for name, value in now.items()
        )
        if all(self._processes.all_gather(same)):
            return False
        bad = [name for name, value in now.items() if not torch.isfinite(value).all()]
        named = self._processes.first_available(bad[0] if bad else None)
        if named is not None:
            raise ValueError(
                f"`{named}` of the model holds values that are nan or infinite; the training "
                "diverged, or the checkpoint is damaged."
            )
        self._seen = {name: value.clone() for name, value in now.items()}
        self._others = {
            n: v.clone() for n, v in self.model.named_buffers() if not hasattr(v, "to_local")
        }
        self._number = None
        # Whole on every rank are only those to differentiate by.
        whole: list[Any] = [tables[name] for name in self.names]
        self.leaves = tuple(p.full_tensor().detach().clone().requires_grad_() for p in whole)
        return True

    def __call__(self, leaves: Sequence[Tensor], batch: Batch, *, with_labels: bool) -> Any:
        """Call the model at its own parameters, or at those that are held."""
        assert leaves is self.leaves or leaves is self._held
        arguments, keywords = self.arguments(batch, with_labels=with_labels)
        try:
            with locate_errors("the model"):
                return self.model(*arguments, **keywords)
        finally:
            if not torch.is_grad_enabled():
                self._reshard()

    def first_call(self, batch: Batch, *, with_labels: bool) -> Any:
        """Call the model; its tables are not put back, as FSDP changes them in every call."""
        return self(self.leaves, batch, with_labels=with_labels)

    def with_parameters(self, leaves: Sequence[Tensor], action: Callable[[], T]) -> T:
        """Do something while the shards have other values."""
        # Looked up now: while the model runs, whole parameters stand in the places of shards.
        self._shards = dict(self.model.named_parameters())
        before = [(p, p.grad, _local(p).clone()) for p in self._shards.values()]
        self._held = leaves
        try:
            self._write(leaves)
            return action()
        finally:
            self._held = None
            self._reshard()
            for parameter, slope, value in before:
                _local(parameter).copy_(value)
                parameter.grad = slope

    def differentiate(self, value: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradient of the mean over all ranks: theirs add up to the gradient of the sum."""
        for parameter in self._shards.values():
            parameter.grad = None
        value.backward()
        slopes: list[Any] = [self._shards[name].grad for name in self.names]
        return [None if slope is None else slope.full_tensor().detach() for slope in slopes]

    def in_float64(self) -> FunctionalModel:
        """The same model: its precision cannot be changed."""
        return self

    def _write(self, leaves: Sequence[Tensor]) -> None:
        """Give every shard its part of the values."""
        if leaves is self.leaves:
            return
        from torch.distributed.tensor import distribute_tensor

        for name, leaf in zip(self.names, leaves, strict=True):
            target: Any = self._shards[name]
            part = distribute_tensor(
                leaf.detach(), target.device_mesh, target.placements, src_data_rank=None
            )
            _local(target).copy_(part.to_local())

    def _reshard(self) -> None:
        """Free gathered parameters: the model's tables hold shards again."""
        for module in self.model.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:
                reshard()


def _local(value: Tensor) -> Tensor:
    """The part of a tensor that lies here."""
    found: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found.detach()


_SPLIT = "the data are the same on all {} ranks: each reads its share of them"

_OWN = "every one of the {} ranks has samples of its own"


def shard(
    data: Any, processes: ProcessGroup, *, sharded: bool | None, room: int, check: bool
) -> DataSource:
    """Read the samples of this process."""
    # A loader with a `DistributedSampler` is read in the order of its data set, without the samples
    # that the sampler repeats to fill up. Other data are compared: the same on all ranks, they are
    # split; different on all, they are shards already; anything else is refused.
    if processes.size == 1:
        return open_data(data, room=room, check=check)
    known = processes.run("looking at the data", lambda: _known_loader(data, sharded))
    lengths = processes.all_gather(None if known is None else _length(known))
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
        chosen: Any = rebuild(known, batch_size=known.batch_size, sampler=range(start, stop))
        batches = processes.run(
            "reading the data",
            lambda: open_data(chosen, room=room, check=check, may_be_empty=True),
        )
        batches.notes.append(_SPLIT.format(processes.size))
    else:
        batches = _read_and_compare(data, processes, sharded, room, check)
    batches.share_among(processes)
    if not sum(batches.shares):
        raise ValueError(EMPTY)
    return batches


def _known_loader(data: Any, sharded: bool | None) -> DataLoader[Any] | None:
    """A loader that is known to read a data set that all ranks have, sample by sample."""
    if sharded is False and isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=256)
    if type(data) is not DataLoader or isinstance(data.dataset, IterableDataset):
        return None
    sampler = data.sampler
    if data.batch_size is None:
        return None
    if type(sampler) is DistributedSampler:
        return rebuild(data, batch_size=data.batch_size)
    if sharded is False and in_order(data):
        return data
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement
    if sharded is False and shuffles and len(sampler) == len(data.dataset):  # type: ignore[arg-type]
        return rebuild(data, batch_size=data.batch_size)
    return None


def _length(loader: DataLoader[Any]) -> int:
    samples = len(loader.dataset)  # type: ignore[arg-type]
    return samples - samples % (loader.batch_size or 1) if loader.drop_last else samples


def _range(samples: int, processes: ProcessGroup) -> tuple[int, int]:
    """The samples of this rank: neighbours, so that all ranks' together are in order."""
    rank, size = processes.rank, processes.size
    return rank * samples // size, (rank + 1) * samples // size


def _read_and_compare(
    data: Any, processes: ProcessGroup, sharded: bool | None, room: int, check: bool
) -> DataSource:
    """Read all that the rank was given, and see whether others were given the same."""

    def read() -> tuple[DataSource, NDArray[np.int64]]:
        given = [] if _is_nothing(data) else data
        found = open_data(given, room=room, check=check, may_be_empty=True)
        return found, np.array(() if sharded else found.digests(), dtype=np.int64)

    batches, numbers = processes.run("reading the data", read)
    if sharded:
        batches.notes.append(_OWN.format(processes.size))
        return batches
    whole = hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()
    if len(set(processes.all_gather(whole))) == 1:
        start, stop = _range(batches.samples, processes)
        found = processes.run("splitting the data", lambda: batches.slice(start, stop))
        found.notes.append(_SPLIT.format(processes.size))
        return found
    if sharded is False:
        raise ValueError(
            "`sharded=False` says that the data are the same on every rank, but they are not: "
            "loaders that shuffle differently, or samples of their own (`sharded=True`)."
        )
    own = np.unique(numbers)
    everywhere = processes.concat_named({"": torch.from_numpy(own)}, torch.device("cpu"))[
        ""
    ].numpy()
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


def open_data(data: Any, *, room: int, check: bool, may_be_empty: bool = False) -> DataSource:
    """Read what the user gave, in an order that is the same in every pass."""
    notes = list(getattr(data, "notes", ())) if isinstance(data, tuple) else []
    text = _describe(data)
    if is_one_batch(data):
        data = [as_batch(data, where="`data`")]
    elif not isinstance(data, (list, tuple)):
        data = _as_iterable(data, notes)
    return DataSource(
        data, room=room, check=check, may_be_empty=may_be_empty, text=text, notes=notes
    )


def _as_iterable(data: Any, notes: list[str]) -> Iterable[Any]:
    """Turn what the user gave into something that can be iterated again and again."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=256)
    if isinstance(data, DataLoader):
        return _in_fixed_order(data, notes)
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


def _in_fixed_order(loader: DataLoader[Any], notes: list[str]) -> Iterable[Any]:
    """Replace a plain shuffling sampler by the order of the data set."""
    sampler = loader.sampler
    if type(loader) is not DataLoader:  # Its own way of iterating is part of the data.
        return loader
    if isinstance(sampler, DistributedSampler):
        notes.append(
            f"the loader's DistributedSampler gives the samples of rank {sampler.rank} of "
            f"{sampler.num_replicas} only; `processes='all'` measures on those of all ranks"
        )
    if type(sampler) is not RandomSampler or sampler.replacement or loader.batch_size is None:
        return _own_workers(loader)
    if sampler.num_samples != len(loader.dataset):  # type: ignore[arg-type]
        return _own_workers(loader)
    notes.append("the loader shuffles; its samples are read in the data set's order")
    if loader.drop_last:
        notes.append("the loader drops its last batch at random; all samples are read")
    return rebuild(loader, batch_size=loader.batch_size)


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
