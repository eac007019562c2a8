"""Processes that measure one surface together: what adds up over samples adds up over them.

Every process runs the same program on its own samples. Before anything is summed, all of them
exchange a few words: what they are about to add up, whether their part of it went well, and a
digest of what must be the same everywhere. So an error on one rank is an error on all, ranks that
went different ways are told so, and a rank that died is named. Words go through rank 0, which
listens to every other rank by itself and so knows which one is silent; sums go through an
all-reduce, in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


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
