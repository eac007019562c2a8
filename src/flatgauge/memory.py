"""Memory budgets: how much may be used, and how much a computation keeps."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}

#: Smallest budget that is taken seriously; below it not even bookkeeping fits.
SMALLEST = 2**20


def parse_bytes(text: str | int) -> int:
    """Read an amount of memory such as ``"2GiB"``, ``"500 MB"`` or a number of bytes.

    Args:
        text: The amount.

    Returns:
        The number of bytes.

    Raises:
        ValueError: If the text is no amount of memory, or less than 1 MiB.
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
                f"`memory={text!r}` is no amount of memory; write it as '2GiB', '500MB', "
                "a number of bytes, or 'auto'."
            )
        amount = int(float(match[1]) * _UNITS[match[2]])
    if not isinstance(amount, int) or isinstance(amount, bool):
        raise TypeError(
            f"`memory={text!r}` is a {type(text).__name__}; give a text such as '2GiB', a whole "
            "number of bytes, or 'auto'."
        )
    if amount < SMALLEST:
        raise ValueError(
            f"`memory={text!r}` is too little to work in; give at least '1MiB', or 'auto'."
        )
    return amount


def format_bytes(count: float) -> str:
    """Write a number of bytes for people.

    Args:
        count: The number.

    Returns:
        The number with its unit.

    Example:
        >>> format_bytes(3 * 2**20)
        '3.0 MiB'
    """
    power = min(int(math.log2(max(count, 1)) // 10), 4)
    return f"{count / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def available(device: torch.device) -> int:
    """Bytes that are free on a device now (for the CPU: free to this process)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    free = _meminfo_available()
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        free = min(free, max(limit - used, SMALLEST))
    return free


def _meminfo_available() -> int:
    """The kernel's own estimate of what a new process may take; 4 GiB where it gives none."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 4 * 2**30
    match = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(match[1]) * 1024 if match else 4 * 2**30


def _cgroup(name: str) -> int | None:
    """A memory figure of this process's container, if it has one."""
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def resident() -> int | None:
    """Bytes of this process that lie in memory now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def give_back(*, above: int | None = None) -> None:
    """Return freed memory to the system; the C library keeps what it may need again.

    Pieces of many sizes, freed and taken in turn, otherwise add up to a multiple of what is in use.

    Args:
        above: Only if more bytes than this are resident; None to do so in any case.
    """
    trim = _trim()
    if trim is None or (above is not None and (resident() or 0) <= above):
        return
    trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """The C library's way to return memory; None where it has none."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def saved_bytes(nodes: Iterable[Any], known: Iterable[Tensor]) -> int:
    """Count what a graph keeps for backward, each storage once.

    Args:
        nodes: The graph's nodes.
        known: Tensors whose storage is not counted, as it exists anyway (parameters, inputs).

    Returns:
        The number of bytes.
    """
    seen = {_storage(tensor)[0] for tensor in known}
    total = 0
    for node in nodes:
        for tensor in _saved_by(node):
            place, size = _storage(tensor)
            if place not in seen:
                seen.add(place)
                total += size
    return total


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's storage lies, and its bytes; of wrappers (`torch.func`) which it is."""
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
