"""The processes of a `torch.distributed` group, as one that sums over all of their samples."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatgauge.processes import BY_ITSELF, K, Processes, T
from flatgauge.words import (
    GroupError,
    Wire,
    Words,
    described,
    first_line,
    is_told,
    same_type,
    told,
)

#: How long a rank that neither answers nor dies is waited for, where its group does not say.
PATIENCE = timedelta(minutes=30)

#: Sums of up to so many numbers travel together.
_SMALL = 2**15


class Group(Processes):
    """The processes of a `torch.distributed` group.

    Args:
        members: The group.
    """

    def __init__(self, members: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(members)
        self.rank, self.size, self.bytes = dist.get_rank(members), len(ranks), 0
        self._members = members
        self._wire = Wire(ranks, self.rank, _patience(members))
        self._depth = 0
        hosts = self.gathered(socket.gethostname())
        self.neighbours = hosts.count(hosts[self.rank])

    def attempt(self, what: str, compute: Callable[[], T], same: Iterable[Tensor] = ()) -> T:
        """Do this process's part; an error of one rank is raised on all."""
        return self._done(what, compute, same, lambda found: None)[0]

    def collected(
        self, what: str, compute: Callable[[], T], same: Iterable[Tensor] = ()
    ) -> list[T]:
        """Do this process's part, and see those of all."""
        words = self._done(what, compute, same, lambda found: found)[1]
        return [said.item for said in words]

    def _done(
        self,
        what: str,
        compute: Callable[[], T],
        same: Iterable[Tensor],
        shown: Callable[[T], Any],
    ) -> tuple[T, list[Words]]:
        """What this process has computed, and what all say of it."""
        try:
            found, digest = compute(), digest_of(same)
        except GroupError:
            raise
        except Exception as error:
            if not is_told(error):
                self._agree(Words(what, error=described(error)), error)
            raise
        return found, self._agree(Words(what, digest, item=shown(found)))

    def total(self, numbers: Tensor) -> Tensor:
        """Add up tensors of one shape."""
        sums = numbers.cpu() if numbers.device.type == "mps" else numbers
        sums = (sums if sums.dtype is torch.int64 else sums.double()).contiguous()
        group = self._wire.group if sums.device.type == "cpu" else self._members
        try:
            dist.all_reduce(sums, group=group)
        except RuntimeError as error:
            raise self._wire.over(
                f"rank {self.rank} was adding up {sums.numel():,} numbers with the others when one "
                f"of them was lost ({first_line(error)})"
            ) from error
        self.bytes += sums.numel() * sums.element_size()
        return sums.to(numbers.device)

    def added(self, numbers: Mapping[K, Tensor], device: torch.device) -> dict[K, Tensor]:
        """Add up by name; small tensors travel together."""
        shapes = self._shapes({name: tuple(part.shape) for name, part in numbers.items()})
        found: dict[K, Tensor] = {}
        small: dict[K, Tensor] = {}
        for name, shape in shapes.items():
            part = numbers.get(name)
            if part is None:
                part = torch.zeros(shape, dtype=torch.float64, device=device)
            if part.numel() > _SMALL:
                found[name] = self.total(part)
            else:
                small[name] = part.to(device, torch.float64).reshape(-1)
        if small:
            together = self.total(torch.cat(list(small.values())))
            pieces = together.split([part.numel() for part in small.values()])
            for name, piece in zip(small, pieces, strict=True):
                found[name] = piece.reshape(shapes[name])
        return {name: found[name] for name in shapes}

    def joined(self, rows: Mapping[K, Tensor], device: torch.device) -> dict[K, Tensor]:
        """Join rows by name: every rank adds its own to zeros in the places of the others'."""
        lengths = self.gathered({name: len(part) for name, part in rows.items()})
        shapes = self._shapes({name: tuple(part.shape[1:]) for name, part in rows.items()})
        whole = {name for name, part in rows.items() if part.dtype is torch.int64}
        whole = set().union(*self.gathered(whole))
        places = {}
        for name, shape in shapes.items():
            counts = [known.get(name, 0) for known in lengths]
            dtype = torch.int64 if name in whole else torch.float64
            place = torch.zeros((sum(counts), *shape), dtype=dtype, device=device)
            if name in rows:
                start = sum(counts[: self.rank])
                place[start : start + len(rows[name])] = rows[name]
            places[name] = place
        if whole:
            return {name: self.total(place) for name, place in places.items()}
        return self.added(places, device)

    def gathered(self, item: T) -> list[T]:
        """What every process has, in the order of the ranks."""
        return [words.item for words in self._agree(Words("exchanging", item=item))]

    def first(self, item: T | None) -> T | None:
        """What the first process has that has anything."""
        having = self.gathered(item is not None)
        if not any(having):
            return None
        chosen = having.index(True)
        return self.gathered(item if self.rank == chosen else None)[chosen]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Meet at the end of something; what ends it early on one rank ends it on all."""
        self._depth += 1
        try:
            yield
        except Exception as error:
            if self._depth == 1 and not isinstance(error, GroupError) and not is_told(error):
                self._agree(Words(what, error=described(error), leaves=True), error)
            raise
        else:
            if self._depth == 1:
                self._agree(Words(f"end of {what}"))
        finally:
            self._depth -= 1

    def _shapes(self, own: dict[K, tuple[int, ...]]) -> dict[K, tuple[int, ...]]:
        """The shapes of everything that any rank has, in the order of their names."""
        shapes: dict[K, tuple[int, ...]] = {}
        for known in self.gathered(own):
            shapes |= known
        return dict(sorted(shapes.items(), key=lambda item: str(item[0])))

    def _agree(self, own: Words, error: Exception | None = None) -> list[Words]:
        """Exchange words; refuse to go on where they do not fit together."""
        words = self._wire.exchange(own)
        failed = [rank for rank, said in enumerate(words) if said.error is not None]
        if failed:
            self._raise(words, failed, error)
        for rank, said in enumerate(words):
            if said.what != words[0].what:
                raise self._wire.over(
                    f"rank 0 is at {words[0].what!r} and rank {rank} at {said.what!r}: every rank "
                    "must call the same functions in the same order, with the same arguments"
                )
        other = [rank for rank, said in enumerate(words) if said.same != words[0].same]
        if other:
            raise told(
                ValueError(
                    f"rank {other[0]} does not compute `{own.what}` at the same place as rank 0: "
                    "parameters (frozen ones too), buffers, points or directions differ. Load the "
                    "same checkpoint on every rank, buffers included (after training with DDP: "
                    "`for b in model.buffers(): torch.distributed.broadcast(b, 0)`), give the same "
                    "`seed=` (or generators of the same state) everywhere, and use the same "
                    "hardware and thread count."
                )
            )
        return words

    def _raise(self, words: list[Words], failed: list[int], error: Exception | None) -> None:
        """Raise what the first of the ranks that failed has raised."""
        said = words[failed[0]]
        assert said.error is not None
        module, name, text = said.error
        alike = len(failed) == self.size and all(one.error == said.error for one in words)
        if error is not None and (alike or said.leaves):
            raise told(error)
        if said.leaves:
            raise GroupError(
                f"rank {failed[0]} of {self.size} has left {said.what!r} with {name}: {text}"
            ) from error
        text = f"rank {failed[0]} of {self.size}: {text}"
        raise told(same_type(module, name, text)) from error


#: One for every group: its sockets are opened once.
_GROUPS: dict[dist.ProcessGroup, Group] = {}


def processes_of(processes: Any) -> Processes:
    """The processes that measure together.

    Args:
        processes: None for this one alone, ``"all"`` for the default group, or a group.

    Returns:
        The processes.

    Raises:
        ValueError: If no group has been initialised, or this process is not in it.
        TypeError: If it is no group.
    """
    if processes is None or isinstance(processes, Processes):
        return processes or BY_ITSELF
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"`processes={processes!r}` needs a process group, and none is initialised; call "
            "`torch.distributed.init_process_group()` in a program started by `torchrun`, or leave "
            "`processes` out to measure in this process alone."
        )
    members = dist.group.WORLD if processes == "all" else processes
    if members is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this process is no member of the group given as `processes`; make the surface on the "
            "group's own ranks only."
        )
    if not isinstance(members, dist.ProcessGroup):
        raise TypeError(
            f"`processes={processes!r}` must be None (this process alone), 'all' (the default "
            "group), or a torch.distributed ProcessGroup."
        )
    if members not in _GROUPS:
        _GROUPS[members] = Group(members)
    return _GROUPS[members]


def digest_of(values: Iterable[Tensor]) -> int:
    """A number that tells tensors apart by their bits; the same in whatever order they are read."""
    found = 0
    for place, value in enumerate(values, 1):
        flat = value.detach().contiguous().reshape(-1)
        whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(flat.element_size())
        bits = flat.view(whole) if whole else flat.view(torch.uint8)
        found += place * int(bits.sum(dtype=torch.int64))
    return found


def _patience(members: dist.ProcessGroup) -> timedelta:
    """How long a group waits for a rank."""
    try:
        backend = members._get_backend(members._device_types[0])
        return timedelta(seconds=backend.options._timeout.total_seconds())
    except (AttributeError, IndexError, RuntimeError):
        return PATIENCE
