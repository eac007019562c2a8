"""Processes that measure one surface together: what adds up over samples adds up over them.

Every process runs the same program on its own samples. Before anything is summed, all of them
exchange a few words: what they are about to add up, whether their part of it went well, and a
digest of what must be the same everywhere. So an error on one rank is an error on all, ranks that
went different ways are told so, and a rank that died is named. Words go through rank 0, which
listens to every other rank by itself and so knows which one is silent; sums go through an
all-reduce, in double precision.
"""

from __future__ import annotations

import io
import pickle
import socket
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

#: How long a rank that neither answers nor dies is waited for, where its group does not say.
PATIENCE = timedelta(minutes=30)

#: Words of up to so many bytes go in one message; sums of up to so many numbers travel together.
_SHORT, _SMALL = 2048, 2**15


class GroupError(ConnectionError):
    """The processes of a group cannot go on together.

    Attributes:
        lost: The rank that does not answer any more, if it is known.
    """

    lost: int | None = None


class Processes:
    """This process alone: what a group of processes does, for one.

    Attributes:
        rank: The number of this process.
        size: How many there are.
        neighbours: How many of them run on this machine.
        bytes: How much this process has added up with others so far.
    """

    rank, size, neighbours, bytes = 0, 1, 1, 0

    def attempt(self, what: str, compute: Callable[[], T], same: Iterable[Tensor] = ()) -> T:
        """Do this process's part of something.

        Args:
            what: What it is.
            compute: The part; nothing may be exchanged in it.
            same: Tensors that must be the same everywhere: parameters, points, directions.

        Returns:
            What this process has computed.
        """
        return compute()

    def collected(
        self, what: str, compute: Callable[[], T], same: Iterable[Tensor] = ()
    ) -> list[T]:
        """Do this process's part of something, and see those of all, in the order of the ranks.

        Args:
            what: What it is.
            compute: The part, which gives something small; nothing may be exchanged in it.
            same: Tensors that must be the same everywhere.

        Returns:
            What every process has computed.
        """
        return [compute()]

    def sum(self, what: str, compute: Callable[[], float], same: Iterable[Tensor] = ()) -> float:
        """Do this process's part of something, and add up the numbers that come out."""
        total = 0.0
        for one in self.collected(what, compute, same):
            total += one
        return total

    def total(self, numbers: Tensor) -> Tensor:
        """Add up tensors of one shape; those of several processes in double precision.

        Args:
            numbers: This process's tensor, which may be written to.

        Returns:
            The sum.
        """
        return numbers

    def added(self, numbers: Mapping[K, Tensor], device: torch.device) -> dict[K, Tensor]:
        """Add up by name, in double precision.

        Args:
            numbers: This process's tensors; without data, it may lack some.
            device: Where it computes.

        Returns:
            The sums.
        """
        return dict(numbers)

    def joined(self, rows: Mapping[K, Tensor], device: torch.device) -> dict[K, Tensor]:
        """Join rows by name, in the order of the ranks.

        Args:
            rows: This process's tensors; without data, it may lack some.
            device: Where it computes.

        Returns:
            The rows of all.
        """
        return dict(rows)

    def gathered(self, item: T) -> list[T]:
        """What every process has, in the order of the ranks."""
        return [item]

    def first(self, item: T | None) -> T | None:
        """What the first process has that has anything."""
        return item

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Meet at the end of something, so that nobody goes on where anyone failed.

        Args:
            what: What it is.

        Yields:
            Nothing.
        """
        yield

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        return self


#: The default: a surface that any process may measure by itself.
BY_ITSELF = Processes()


@dataclass(frozen=True)
class _Words:
    """What a rank says before it goes on.

    Attributes:
        what: What it has done its part of.
        same: A digest of what must be the same everywhere.
        error: Module, name and message of an exception, if it failed.
        leaves: Whether it leaves what all were doing together.
        item: What it gives to all.
    """

    what: str
    same: int = 0
    error: tuple[str, str, str] | None = None
    leaves: bool = False
    item: Any = None


class Group(Processes):
    """The processes of a `torch.distributed` group.

    Args:
        members: The group.
    """

    def __init__(self, members: dist.ProcessGroup) -> None:
        self._ranks = dist.get_process_group_ranks(members)
        self.rank, self.size = dist.get_rank(members), len(self._ranks)
        self.bytes = 0
        self._members = members
        self._broken: GroupError | None = None
        self._depth = 0
        # A group of its own for words, and for sums on the CPU: whatever backend the user's has,
        # and whatever else it carries.
        self._words = dist.new_group(
            self._ranks, _patience(members), "gloo", use_local_synchronization=True
        )
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
    ) -> tuple[T, list[_Words]]:
        """What this process has computed, and what all say of it."""
        try:
            found, digest = compute(), digest_of(same)
        except GroupError:
            raise
        except Exception as error:
            if not _is_told(error):
                self._agree(_Words(what, error=_described(error)), error)
            raise
        return found, self._agree(_Words(what, digest, item=shown(found)))

    def total(self, numbers: Tensor) -> Tensor:
        """Add up tensors of one shape."""
        sums = numbers.cpu() if numbers.device.type == "mps" else numbers
        sums = (sums if sums.dtype is torch.int64 else sums.double()).contiguous()
        try:
            dist.all_reduce(sums, group=self._words if sums.device.type == "cpu" else self._members)
        except RuntimeError as error:
            raise self._over(
                f"rank {self.rank} was adding up {sums.numel():,} numbers with the others when one "
                f"of them was lost ({_first_line(error)})"
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
        return [words.item for words in self._agree(_Words("exchanging", item=item))]

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
            if self._depth == 1 and not isinstance(error, GroupError) and not _is_told(error):
                self._agree(_Words(what, error=_described(error), leaves=True), error)
            raise
        else:
            if self._depth == 1:
                self._agree(_Words(f"end of {what}"))
        finally:
            self._depth -= 1

    def _shapes(self, own: dict[K, tuple[int, ...]]) -> dict[K, tuple[int, ...]]:
        """The shapes of everything that any rank has, in the order of their names."""
        shapes: dict[K, tuple[int, ...]] = {}
        for known in self.gathered(own):
            shapes |= known
        return dict(sorted(shapes.items(), key=lambda item: str(item[0])))

    def _agree(self, own: _Words, error: Exception | None = None) -> list[_Words]:
        """Exchange words; refuse to go on where they do not fit together."""
        words = self._exchange(own)
        failed = [rank for rank, said in enumerate(words) if said.error is not None]
        if failed:
            self._raise(words, failed, error)
        for rank, said in enumerate(words):
            if said.what != words[0].what:
                raise self._over(
                    f"rank 0 is at {words[0].what!r} and rank {rank} at {said.what!r}: every rank "
                    "must call the same functions in the same order, with the same arguments"
                )
        other = [rank for rank, said in enumerate(words) if said.same != words[0].same]
        if other:
            raise _told(
                ValueError(
                    f"rank {other[0]} does not compute `{own.what}` at the same place as rank 0: "
                    "parameters, points or directions differ. Load the same checkpoint on every "
                    "rank, give the same `seed=` (or generators of the same state) everywhere, and "
                    "use the same hardware and thread count."
                )
            )
        return words

    def _raise(self, words: list[_Words], failed: list[int], error: Exception | None) -> None:
        """Raise what the first of the ranks that failed has raised."""
        said = words[failed[0]]
        assert said.error is not None
        module, name, text = said.error
        alike = len(failed) == self.size and all(one.error == said.error for one in words)
        if error is not None and (alike or said.leaves):
            raise _told(error)
        if said.leaves:
            raise GroupError(
                f"rank {failed[0]} of {self.size} has left {said.what!r} with {name}: {text}"
            ) from error
        told = f"rank {failed[0]} of {self.size}: {text}"
        raise _told(_same_type(module, name, told)) from error

    def _exchange(self, own: _Words) -> list[_Words]:
        """Tell rank 0, and hear from it what everybody has said."""
        if self._broken is not None:
            raise self._broken
        if self.rank:
            try:
                self._send(0, own)
                words: list[_Words] | str = self._receive(0)
            except RuntimeError as error:
                raise self._over(
                    f"rank 0 was lost before {own.what!r} was done ({_first_line(error)})", 0
                ) from error
        else:
            words = self._heard(own)
        if isinstance(words, str):
            raise self._over(words)
        return words

    def _heard(self, own: _Words) -> list[_Words] | str:
        """Listen to all ranks, and tell everybody; where one is lost, which."""
        words, lost = [pickle.loads(_pickled(own))], ""  # A copy, as all others have.
        for rank in range(1, self.size):
            try:
                words.append(self._receive(rank))
            except RuntimeError as error:
                lost = lost or (
                    f"rank {rank} of {self.size} was lost before {own.what!r} was done "
                    f"({_first_line(error)}); its own output says why, if it could still write it"
                )
        for rank in range(1, self.size):
            try:
                self._send(rank, lost or words)
            except RuntimeError as error:
                lost = lost or f"rank {rank} was lost at {own.what!r} ({_first_line(error)})"
        return lost or words

    def _over(self, text: str, lost: int | None = None) -> GroupError:
        """Note that nothing can be exchanged any more."""
        self._broken = GroupError(
            f"{text}. Nothing more can be measured together; start all ranks anew."
        )
        self._broken.lost = lost
        return self._broken

    def _send(self, rank: int, item: Any) -> None:
        contents = _pickled(item)
        head = torch.zeros(_SHORT + 8, dtype=torch.uint8)
        head[:8] = torch.tensor([len(contents)]).view(torch.uint8)
        body = torch.frombuffer(bytearray(contents), dtype=torch.uint8)
        head[8 : 8 + min(len(body), _SHORT)] = body[:_SHORT]
        dist.send(head, self._ranks[rank], self._words)
        if len(body) > _SHORT:
            dist.send(body[_SHORT:].clone(), self._ranks[rank], self._words)

    def _receive(self, rank: int) -> Any:
        head = torch.empty(_SHORT + 8, dtype=torch.uint8)
        dist.recv(head, self._ranks[rank], self._words)
        length = int(head[:8].view(torch.int64))
        body = head[8 : 8 + min(length, _SHORT)]
        if length > _SHORT:
            rest = torch.empty(length - _SHORT, dtype=torch.uint8)
            dist.recv(rest, self._ranks[rank], self._words)
            body = torch.cat([body, rest])
        return pickle.loads(body.numpy().tobytes())


class _Pickler(pickle.Pickler):
    """Brings tensors to the CPU: the device of one rank is not that of another."""

    def reducer_override(self, item: Any) -> Any:
        """How to make an object anew; NotImplemented for the usual way."""
        if isinstance(item, Tensor) and item.device.type != "cpu":
            return item.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _pickled(item: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(item)
    return file.getvalue()


#: One for every group: its sockets are opened once.
_GROUPS: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()


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


def _described(error: Exception) -> tuple[str, str, str]:
    return type(error).__module__, type(error).__qualname__, str(error)


def _same_type(module: str, name: str, text: str) -> Exception:
    """An exception of a type that another process has named; `RuntimeError` where it is unknown."""
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            pass
    return RuntimeError(f"{name}: {text}")


def _told(error: Exception) -> Exception:
    """Mark what all ranks raise."""
    error.told_to_all = True  # type: ignore[attr-defined]
    return error


def _is_told(error: Exception) -> bool:
    return getattr(error, "told_to_all", False)


def _first_line(error: Exception) -> str:
    """The first line of a message, without the place in the C++ sources that it begins with."""
    line = str(error).strip().splitlines()[0].split(". ")[0]
    return line.split("] ", 1)[1] if line.startswith("[/") and "] " in line else line
