"""A few words exchanged by all ranks of a group, through rank 0, which knows who is silent."""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Words of up to so many bytes go in one message.
_SHORT = 2048


class GroupError(ConnectionError):
    """The processes of a group cannot go on together.

    Attributes:
        lost: The rank that does not answer any more, if it is known.
    """

    lost: int | None = None


@dataclass(frozen=True)
class Words:
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


class Wire:
    """Carries words between the ranks of a group, and knows when that has come to an end.

    Args:
        ranks: The global ranks of the group.
        rank: The number of this process among them.
        patience: How long one that neither answers nor dies is waited for.

    Attributes:
        group: A group of its own, of the ranks' CPUs: whatever backend the user's has, and
            whatever else it carries.
    """

    def __init__(self, ranks: list[int], rank: int, patience: timedelta) -> None:
        self._ranks, self._rank = ranks, rank
        self._broken: GroupError | None = None
        self.group = dist.new_group(ranks, patience, "gloo", use_local_synchronization=True)

    def exchange(self, own: Words) -> list[Words]:
        """Tell rank 0, and hear from it what everybody has said."""
        if self._broken is not None:
            raise self._broken
        if self._rank:
            try:
                self._send(0, own)
                words: list[Words] | str = self._receive(0)
            except RuntimeError as error:
                raise self.over(
                    f"rank 0 was lost before {own.what!r} was done ({first_line(error)})", 0
                ) from error
        else:
            words = self._heard(own)
        if isinstance(words, str):
            raise self.over(words)
        return words

    def _heard(self, own: Words) -> list[Words] | str:
        """Listen to all ranks, and tell everybody; where one is lost, which."""
        words, lost = [pickle.loads(_pickled(own))], ""  # A copy, as all others have.
        for rank in range(1, len(self._ranks)):
            try:
                words.append(self._receive(rank))
            except RuntimeError as error:
                lost = lost or (
                    f"rank {rank} of {len(self._ranks)} was lost before {own.what!r} was done "
                    f"({first_line(error)}); its own output says why, if it could still write it"
                )
        for rank in range(1, len(self._ranks)):
            try:
                self._send(rank, lost or words)
            except RuntimeError as error:
                lost = lost or f"rank {rank} was lost at {own.what!r} ({first_line(error)})"
        return lost or words

    def over(self, text: str, lost: int | None = None) -> GroupError:
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
        dist.send(head, self._ranks[rank], self.group)
        if len(body) > _SHORT:
            dist.send(body[_SHORT:].clone(), self._ranks[rank], self.group)

    def _receive(self, rank: int) -> Any:
        head = torch.empty(_SHORT + 8, dtype=torch.uint8)
        dist.recv(head, self._ranks[rank], self.group)
        length = int(head[:8].view(torch.int64))
        body = head[8 : 8 + min(length, _SHORT)]
        if length > _SHORT:
            rest = torch.empty(length - _SHORT, dtype=torch.uint8)
            dist.recv(rest, self._ranks[rank], self.group)
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


def described(error: Exception) -> tuple[str, str, str]:
    """Module and name of an exception's type, and its message."""
    return type(error).__module__, type(error).__qualname__, str(error)


def same_type(module: str, name: str, text: str) -> Exception:
    """An exception of a type that another process has named; `RuntimeError` where it is unknown."""
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            pass
    return RuntimeError(f"{name}: {text}")


def told(error: Exception) -> Exception:
    """Mark what all ranks raise."""
    error.told_to_all = True  # type: ignore[attr-defined]
    return error


def is_told(error: Exception) -> bool:
    """Whether all ranks raise it."""
    return getattr(error, "told_to_all", False)


def first_line(error: Exception) -> str:
    """The first line of a message, without the place in the C++ sources that it begins with."""
    line = str(error).strip().splitlines()[0].split(". ")[0]
    return line.split("] ", 1)[1] if line.startswith("[/") and "] " in line else line
