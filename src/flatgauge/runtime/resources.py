"""Memory and threads of this process: how much may be used, and how it is shared out.

A `MemoryBudget` divides an amount of memory among vectors of the model's size, a Lanczos basis,
autograd graphs and chunks of a sweep; it knows nothing of the model but its number of parameters.
With fewer Lanczos vectors a search restarts more often, and finds the same.
The functions read and write amounts, measure what is free, resident, or saved by a graph, and
limit the threads of the numerical libraries.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}

#: The smallest budget; below it not even bookkeeping fits.
MIN_BUDGET = 2**20

#: Most vectors of the model's size in use at a time: the surface's own copy of the parameters,
#: gradients, products and their sums, a diagonal in double precision. Peaks are tested.
_RESERVED = 10

#: How many vectors a search for eigenvalues keeps if it may, and how many more than the values
#: asked for it always needs.
_BASIS, _MIN_EXTRA = 40, 3

#: Shares of what the reserved vectors leave: a Lanczos basis, a chunk of a sweep, and the factor
#: vectors that a sweep keeps. A basis and a sweep are never held together.
_BASIS_SHARE, _SWEEP_SHARE, _FACTOR_SHARE = 1 / 3, 0.6, 0.35

#: Vectors that each further column of a Hessian product takes: itself, its product, and the sum
#: over chunks in double precision.
_PER_COLUMN = 4

#: Most threads per processor, and in any case, as a container may hide some processors.
_THREADS_EACH, _THREADS_ANYWHERE = 4, 64


@dataclass(frozen=True)
class MemoryBudget:
    """What may be used on top of what the process held when the surface was made, in bytes."""

    total: int  # All of it.
    params: int  # The number of trainable parameters p.
    itemsize: int  # Of one number in the precision of the computation.

    @property
    def vector(self) -> int:
        """One vector of the model's size."""
        return self.params * self.itemsize

    @property
    def reserved_bytes(self) -> int:
        """The vectors of the model's size that every measurement uses."""
        return _RESERVED * self.vector

    @property
    def free(self) -> int:
        """What the reserved vectors leave; negative if they do not fit."""
        return self.total - self.reserved_bytes

    @property
    def sweep(self) -> int:
        """For one chunk of a sweep."""
        return int(_SWEEP_SHARE * self.free)

    @property
    def factors(self) -> float:
        """For the factor vectors that a sweep keeps."""
        return _FACTOR_SHARE * self.free

    def hvp(self, columns: int = 1) -> int:
        """For the graphs of Hessian products with several columns, next to a Lanczos basis."""
        others = self.lanczos_vectors() + _PER_COLUMN * (columns - 1)
        return self.free - others * self.vector

    def hvp_columns(self, most: int) -> int:
        """How many vectors to multiply by the Hessian together, from one to ``most``."""
        # A chunk at work takes half of it, and columns beyond the first the other half.
        return max(1, min(most, 1 + int(self.hvp() // (2 * _PER_COLUMN * self.vector))))

    def lanczos_vectors(self, length: int | None = None, count: int = 1) -> int:
        """The vectors a search may keep: 40 or 2 count + 20 if they fit, never below count + 3."""
        length = self.params if length is None else length
        fitting = int(_BASIS_SHARE * max(self.free, 0) // (length * self.itemsize))
        return max(count + _MIN_EXTRA, min(fitting, max(2 * count + 20, _BASIS)))

    def shortage(self, what: str, needed: float) -> MemoryError:
        """The error for what needs this many bytes on top of the vectors, with what to do."""
        vectors = self.reserved_bytes + self.lanczos_vectors() * self.vector
        narrower = "measure in float32, " if self.itemsize > 4 else ""
        return MemoryError(
            f"{what} needs about {format_bytes(needed)}, on top of {format_bytes(vectors)} for "
            f"vectors of {self.params:,} parameters, but the budget is {format_bytes(self.total)}; "
            f"raise `memory=` to {format_bytes(1.1 * (2 * needed + vectors))} or more, {narrower}"
            "or freeze parameters (`requires_grad_(False)`)."
        )


def parse_bytes(text: str | int) -> int:
    """Read an amount of memory such as ``"2GiB"``, ``"500 MB"`` or a number of bytes.

    Returns:
        The number of bytes.

    Raises:
        ValueError: If the text is not an amount of memory, or less than 1 MiB.
        TypeError: If it is neither text nor a whole number.

    Example:
        >>> parse_bytes("2GiB")
        2147483648
    """
    amount = text
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9]{0,15}\.?[0-9]{1,15})\s*([kmgt]?i?)b?\s*", text.lower())
        if match is None or match[2] == "i":
            raise ValueError(
                f"`memory={text!r}` is not an amount of memory; write it as '2GiB', '500MB', "
                "a number of bytes, or 'auto'."
            )
        amount = int(float(match[1]) * _UNITS[match[2]])
    if not isinstance(amount, int) or isinstance(amount, bool):
        raise TypeError(
            f"`memory={text!r}` is a {type(text).__name__}; give a text such as '2GiB', a whole "
            "number of bytes, or 'auto'."
        )
    if amount < MIN_BUDGET:
        raise ValueError(
            f"`memory={text!r}` is too little to work in; give at least '1MiB', or 'auto'."
        )
    return amount


def format_bytes(count: float) -> str:
    """A number of bytes with a unit, as in ``3.0 MiB``."""
    power = min(int(math.log2(max(count, 1)) // 10), 4)
    return f"{count / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def duration(seconds: float) -> str:
    """Write a time for people.

    Returns:
        The time with its unit.

    Example:
        >>> duration(0.0123), duration(4.2), duration(480)
        ('12 ms', '4.2 s', '8.0 min')
    """
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def available_bytes(device: torch.device) -> int:
    """Bytes that are free on a device now (for the CPU: free to this process)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    free = int(match[1]) * 1024 if match else 4 * 2**30
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        free = min(free, max(int(limit) - int(used), MIN_BUDGET))
    return free


def resident_bytes() -> int | None:
    """Bytes of this process that lie in memory now; None where the system does not say."""
    fields = _read("/proc/self/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else None


def _read(path: str) -> str:
    """The text of a file of the system's, empty where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def trim_heap(*, above: int | None = None) -> None:
    """Return freed memory to the system, if more than ``above`` bytes are resident.

    The C library keeps freed memory; pieces of many sizes, freed and taken in turn, add up to a
    multiple of what is in use.
    """
    trim = _malloc_trim()
    if trim is not None and (above is None or (resident_bytes() or 0) > above):
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The C library's function that returns freed memory; None where it has none."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def saved_bytes(nodes: Iterable[Any], known: Iterable[Tensor]) -> int:
    """Bytes that nodes of an autograd graph keep for backward, without tensors in `known`."""
    counted = {_storage(tensor)[0] for tensor in known}
    total = 0
    for node in nodes:
        for tensor in _saved_by(node):
            place, size = _storage(tensor)
            if place not in counted:
                counted.add(place)
                total += size
    return total


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor's storage; of a wrapper (`torch.func`) its identity."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return id(tensor), tensor.numel() * tensor.element_size()


def _saved_by(node: Any) -> Iterator[Tensor]:
    """The tensors that one node of an autograd graph holds."""
    names = [name for name in dir(type(node)) if name.startswith("_saved_")]
    for name in [*names, "saved_tensors"]:
        value = getattr(node, name, None)
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Tensor) and item.layout is torch.strided:
                yield item


def set_threads(threads: int | None) -> None:
    """Let all numerical libraries use no more than this many threads; None for their own choice."""
    if threads is None:
        return
    processors = os.cpu_count() or 1
    most = max(_THREADS_EACH * processors, _THREADS_ANYWHERE)
    if not 1 <= threads <= most:
        raise ValueError(
            f"{threads} threads cannot be used: this machine has {processors} processors; give a "
            f"number from 1 to {most}, best {processors} or fewer."
        )
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(threads)
