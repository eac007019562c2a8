"""Processes that measure one surface together: what adds up over samples adds up over them.

Every process runs the same program on its own samples. Before anything is summed, each rank sends
its `Status` to rank 0: what it is about to add up, whether its part succeeded, and a digest of
what must be equal everywhere (parameters, buffers, points, directions). Rank 0 receives from the
others one by one and sends all statuses back. So an error on one rank is raised on all, ranks that
took different paths get an error that says where, and a rank that died is named, which
`torch.distributed.monitored_barrier` does on rank 0 only. Sums go through an all-reduce, in double
precision.
"""

from __future__ import annotations

import io
import pickle
import socket
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

#: How long to wait for a rank that neither answers nor dies, where its group does not say.
DEFAULT_TIMEOUT = timedelta(minutes=30)

#: Tensors of up to this many numbers are summed together.
_SMALL = 2**15

#: Why a model sharded by FSDP is refused.
SHARDED = (
    "the model is sharded by FSDP, and only its loss, its gradient and differences of the gradient "
    "can be computed so: `epsilon_sharpness`, `expected_sharpness`, `adaptive_sharpness`, and "
    "eigenvalues and traces by products. For everything else load the full state dict "
    "(`torch.distributed.checkpoint.state_dict.get_model_state_dict` with `full_state_dict=True`) "
    "into a plain model, on every rank; the data may stay sharded."
)


class GroupError(ConnectionError):
    """The processes of a group cannot go on together.

    Attributes:
        lost: The rank that does not answer any more, if it is known.
    """

    lost: int | None = None


@dataclass(frozen=True)
class Status:
    """What a rank reports before it goes on."""

    what: str  # What it has computed its part of.
    digest: int = 0  # Of what must be equal on all ranks.
    # Module, name and message of its exception, if it failed.
    error: tuple[str, str, str] | None = None
    leaves: bool = False  # Whether it leaves the scope that all are in.
    item: Any = None  # What it gives to all.


class ProcessGroup:
    """The processes that measure together: a `torch.distributed` group, or this one by itself.

    Attributes:
        rank: Which of them this process is.
        size: How many there are.
        ranks_on_host: How many of them run on this machine.
        bytes_summed: How much this process has added up with others so far.
    """

    rank, size, ranks_on_host, bytes_summed = 0, 1, 1, 0

    def __init__(self, members: dist.ProcessGroup | None = None) -> None:
        self._members = members
        if members is None:
            return
        self._ranks = dist.get_process_group_ranks(members)
        self.rank, self.size = dist.get_rank(members), len(self._ranks)
        # A second group, on the CPUs: the user's may have another backend and other traffic.
        self._cpu_group = dist.new_group(
            self._ranks, _timeout(members), "gloo", use_local_synchronization=True
        )
        self._broken: GroupError | None = None
        self._depth = 0
        hosts = self.all_gather(socket.gethostname())
        self.ranks_on_host = hosts.count(hosts[self.rank])

    def run(self, what: str, compute: Callable[[], T], same: Iterable[Tensor] = ()) -> T:
        """Compute this part; an error on one rank, or unequal `same`, is raised on all ranks."""
        return self._compute(what, compute, same)[0]

    def gather(self, what: str, compute: Callable[[], T], same: Iterable[Tensor] = ()) -> list[T]:
        """As `run`, but return the (small) results of all processes, in the order of the ranks."""
        return [status.item for status in self._compute(what, compute, same, share=True)[1]]

    def gather_sum(
        self, what: str, compute: Callable[[], float], same: Iterable[Tensor] = ()
    ) -> float:
        """As `gather`, but add the numbers up."""
        total = 0.0
        for number in self.gather(what, compute, same):
            total += number
        return total

    def all_gather(self, item: T) -> list[T]:
        """The items of all processes, in the order of the ranks."""
        return self.gather("exchanging", lambda: item)

    def first_available(self, item: T | None) -> T | None:
        """The item of the first process that has one; only that one is sent."""
        available = self.all_gather(item is not None)
        if not any(available):
            return None
        chosen = available.index(True)
        return self.all_gather(item if self.rank == chosen else None)[chosen]

    def all_sum(self, numbers: Tensor) -> Tensor:
        """Add up tensors of one shape, which may be overwritten; in double precision if several."""
        if self._members is None:
            return numbers
        sums = numbers.cpu() if numbers.device.type == "mps" else numbers
        sums = (sums if sums.dtype is torch.int64 else sums.double()).contiguous()
        group = self._cpu_group if sums.device.type == "cpu" else self._members
        try:
            dist.all_reduce(sums, group=group)
        except RuntimeError as error:
            raise self._break(
                f"rank {self.rank} was adding up {sums.numel():,} numbers with the others when one "
                f"of them was lost ({_first_line(error)})"
            ) from error
        self.bytes_summed += sums.numel() * sums.element_size()
        return sums.to(numbers.device)

    def sum_named(self, numbers: Mapping[K, Tensor], device: torch.device) -> dict[K, Tensor]:
        """Add up tensors by name, in double precision; without data, a process may lack some."""
        if self._members is None:
            return dict(numbers)
        shapes = _by_name(self.all_gather({name: part.shape for name, part in numbers.items()}))
        found: dict[K, Tensor] = {}
        small: dict[K, Tensor] = {}  # They travel together.
        for name, shape in shapes.items():
            part = numbers.get(name)
            if part is None:
                part = torch.zeros(shape, dtype=torch.float64, device=device)
            if part.numel() > _SMALL:
                found[name] = self.all_sum(part)
            else:
                small[name] = part.to(device, torch.float64).reshape(-1)
        if small:
            sums = self.all_sum(torch.cat(list(small.values())))
            pieces = sums.split([part.numel() for part in small.values()])
            for name, piece in zip(small, pieces, strict=True):
                found[name] = piece.reshape(shapes[name])
        return {name: found[name] for name in shapes}

    def concat_named(self, rows: Mapping[K, Tensor], device: torch.device) -> dict[K, Tensor]:
        """Concatenate rows by name, in the order of the ranks; a process may lack some."""
        if self._members is None:
            return dict(rows)
        known = self.all_gather({name: (part.shape, part.dtype) for name, part in rows.items()})
        places: dict[K, Tensor] = {}  # Zeros in the places of the others' rows; then added up.
        for name, (shape, dtype) in _by_name(known).items():
            counts = [own[name][0][0] if name in own else 0 for own in known]
            dtype = torch.int64 if dtype is torch.int64 else torch.float64
            place = torch.zeros((sum(counts), *shape[1:]), dtype=dtype, device=device)
            if name in rows:
                start = sum(counts[: self.rank])
                place[start : start + len(rows[name])] = rows[name]
            places[name] = place
        if any(place.dtype is torch.int64 for place in places.values()):
            return {name: self.all_sum(place) for name, place in places.items()}
        return self.sum_named(places, device)

    @contextmanager
    def scope(self, what: str) -> Iterator[None]:
        """Wait for all at the end of the outermost scope; an error of one rank ends it on all."""
        if self._members is None:
            yield
            return
        self._depth += 1
        try:
            yield
        except Exception as error:
            if self._depth == 1 and not isinstance(error, GroupError):
                self._report(what, error, leaves=True)
            raise
        else:
            if self._depth == 1:
                self._agree(Status(f"end of {what}"))
        finally:
            self._depth -= 1

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessGroup:
        return self

    def _compute(
        self, what: str, compute: Callable[[], T], same: Iterable[Tensor], *, share: bool = False
    ) -> tuple[T, list[Status]]:
        """This process's result, and the statuses of all; with ``share``, they hold the results."""
        if self._members is None:
            found = compute()
            return found, [Status(what, item=found)]
        try:
            found, digest = compute(), digest_of(same)
        except GroupError:
            raise
        except Exception as error:
            self._report(what, error)
            raise
        return found, self._agree(Status(what, digest, item=found if share else None))

    def _report(self, what: str, error: Exception, *, leaves: bool = False) -> None:
        """Report an exception of this rank to the others, unless they all raise it."""
        if not getattr(error, "raised_on_all_ranks", False):
            kind = type(error)
            known = (kind.__module__, kind.__qualname__, str(error))
            self._agree(Status(what, error=known, leaves=leaves), error)

    def _agree(self, own: Status, error: Exception | None = None) -> list[Status]:
        """Exchange statuses, and raise where the ranks cannot go on with the same thing."""
        statuses = self._exchange(own)
        failed = [rank for rank, status in enumerate(statuses) if status.error is not None]
        if failed:
            self._raise(statuses, failed, error)
        for rank, status in enumerate(statuses):
            if status.what != statuses[0].what:
                raise self._break(
                    f"rank 0 is at {statuses[0].what!r} and rank {rank} at {status.what!r}: every "
                    "rank must call the same functions in the same order, with the same arguments"
                )
        other = [rank for rank, one in enumerate(statuses) if one.digest != statuses[0].digest]
        if other:
            raise _mark_collective(
                ValueError(
                    f"rank {other[0]} does not compute `{own.what}` at the same place as rank 0: "
                    "parameters (frozen ones too), buffers, points or directions differ. Load the "
                    "same checkpoint on every rank, buffers included (after training with DDP: "
                    "`for b in model.buffers(): torch.distributed.broadcast(b, 0)`), give the same "
                    "`seed=` (or generators of the same state) everywhere, and use the same "
                    "hardware and thread count."
                )
            )
        return statuses

    def _raise(self, statuses: list[Status], failed: list[int], error: Exception | None) -> None:
        """Raise the error of the first rank that failed; this rank's own if all have the same."""
        first = statuses[failed[0]]
        assert first.error is not None
        module, name, text = first.error
        common = len(failed) == self.size and all(one.error == first.error for one in statuses)
        if error is not None and (common or first.leaves):
            raise _mark_collective(error)
        if first.leaves:
            raise GroupError(
                f"rank {failed[0]} of {self.size} has left {first.what!r} with {name}: {text}"
            ) from error
        text = f"rank {failed[0]} of {self.size}: {text}"
        raise _mark_collective(_rebuild_error(module, name, text)) from error

    def _exchange(self, own: Status) -> list[Status]:
        """Send this rank's status to rank 0, and receive the statuses of all."""
        if self._broken is not None:
            raise self._broken
        if not self.rank:
            return self._relay(own)
        try:
            self._send(0, _pickle(own))
            found: list[Status] | str = pickle.loads(self._receive(0))
        except RuntimeError as error:
            raise self._break(
                f"rank 0 was lost before {own.what!r} was done ({_first_line(error)})", 0
            ) from error
        if isinstance(found, str):
            raise self._break(found)
        return found

    def _relay(self, own: Status) -> list[Status]:
        """On rank 0: collect all statuses and send them to all, or a message if a rank is lost."""
        statuses, lost = [pickle.loads(_pickle(own))], ""  # A copy, as the other ranks have.
        for rank in range(1, self.size):
            try:
                statuses.append(pickle.loads(self._receive(rank)))
            except RuntimeError as error:
                lost = lost or (
                    f"rank {rank} of {self.size} was lost before {own.what!r} was done "
                    f"({_first_line(error)}); its own output says why, if it could still write it"
                )
        answer = _pickle(lost or statuses)
        for rank in range(1, self.size):
            try:
                self._send(rank, answer)
            except RuntimeError as error:
                lost = lost or f"rank {rank} was lost at {own.what!r} ({_first_line(error)})"
        if lost:
            raise self._break(lost)
        return statuses

    def _send(self, rank: int, message: bytes) -> None:
        dist.send_object_list([message], self._ranks[rank], self._cpu_group)

    def _receive(self, rank: int) -> bytes:
        message: list[Any] = [None]
        dist.recv_object_list(message, self._ranks[rank], self._cpu_group)
        found: bytes = message[0]
        return found

    def _break(self, text: str, lost: int | None = None) -> GroupError:
        """The error that this and every later exchange raises."""
        self._broken = GroupError(
            f"{text}. Nothing more can be measured together; restart all ranks."
        )
        self._broken.lost = lost
        return self._broken


#: The default: a surface that any process may measure by itself.
SINGLE_PROCESS = ProcessGroup()

#: One for every `torch.distributed` group: its sockets are opened once.
_GROUPS: dict[dist.ProcessGroup, ProcessGroup] = {}


def resolve_processes(processes: Any) -> ProcessGroup:
    """The processes that measure together: None for this one, ``"all"`` for the default group."""
    if processes is None or isinstance(processes, ProcessGroup):
        return processes or SINGLE_PROCESS
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"`processes={processes!r}` needs a process group, and none is initialised; call "
            "`torch.distributed.init_process_group()` in a program started by `torchrun`, or leave "
            "`processes` out to measure in this process alone."
        )
    members = dist.group.WORLD if processes == "all" else processes
    if members is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this process is not a member of the group given as `processes`; make the surface on "
            "the group's own ranks only."
        )
    if not isinstance(members, dist.ProcessGroup):
        raise TypeError(
            f"`processes={processes!r}` must be None (this process alone), 'all' (the default "
            "group), or a torch.distributed ProcessGroup."
        )
    if members not in _GROUPS:
        _GROUPS[members] = ProcessGroup(members)
    return _GROUPS[members]


def digest_of(tensors: Iterable[Tensor]) -> int:
    """A checksum of tensors, exact in their bits and independent of the order of summation."""
    found = 0
    for place, tensor in enumerate(tensors, 1):
        flat = tensor.detach().contiguous().reshape(-1)
        whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(flat.element_size())
        bits = flat.view(whole) if whole else flat.view(torch.uint8)
        found += place * int(bits.sum(dtype=torch.int64))
    return found


def _timeout(members: dist.ProcessGroup) -> timedelta:
    """How long a group waits for a rank."""
    try:
        backend = members._get_backend(members._device_types[0])
        return timedelta(seconds=backend.options._timeout.total_seconds())
    except (AttributeError, IndexError, RuntimeError):
        return DEFAULT_TIMEOUT


def _by_name(known: list[dict[K, T]]) -> dict[K, T]:
    """What any rank has under each name, in the same order on all ranks."""
    found = {name: value for own in known for name, value in own.items()}
    return dict(sorted(found.items(), key=lambda item: str(item[0])))


class _CpuPickler(pickle.Pickler):
    """Moves tensors to the CPU: one rank may not have the device of another."""

    def reducer_override(self, item: Any) -> Any:
        """Reduce tensors of other devices to tensors on the CPU, and the rest as usual."""
        if isinstance(item, Tensor) and item.device.type != "cpu":
            return item.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _pickle(item: Any) -> bytes:
    file = io.BytesIO()
    _CpuPickler(file).dump(item)
    return file.getvalue()


def _rebuild_error(module: str, name: str, text: str) -> Exception:
    """An exception of a type named by another process; `RuntimeError` if it is unknown here."""
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):
            return kind(text)
    return RuntimeError(f"{name}: {text}")


def _mark_collective(error: Exception) -> Exception:
    """Mark an error as one that all ranks raise, so that it is not reported again."""
    error.raised_on_all_ranks = True  # type: ignore[attr-defined]
    return error


def _first_line(error: Exception) -> str:
    """The first line of a message, without the place in the C++ sources that it begins with."""
    line = str(error).strip().splitlines()[0].split(". ")[0]
    return line.split("] ", 1)[1] if line.startswith("[/") and "] " in line else line
