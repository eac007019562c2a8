"""Sources of randomness made of a seed and a purpose, so that one never disturbs another."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SEEDS = 2**32


def check_seed(seed: Any) -> int:
    """Refuse what is no seed.

    Args:
        seed: What the user gave.

    Returns:
        The seed.

    Raises:
        ValueError: If it is not a whole number that fits into 32 bits.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise ValueError(f"`seed={seed!r}` must be a whole number from 0 to 2**32 - 1.")
    return seed


def number_for(seed: int, purpose: str) -> int:
    """A number that belongs to a seed and a purpose.

    Args:
        seed: The seed.
        purpose: What it is for.

    Returns:
        A seed of 32 bits: torch's generator on the CPU ignores all higher ones.
    """
    return zlib.crc32(f"{seed} {purpose}".encode())


def source(seed: int, purpose: str) -> torch.Generator:
    """A generator of this seed that belongs to one purpose.

    Args:
        seed: The seed.
        purpose: What is drawn from it.

    Returns:
        A generator on the CPU.
    """
    return torch.Generator().manual_seed(number_for(seed, purpose))


@contextmanager
def drawing_from(seed: int, purpose: str) -> Iterator[None]:
    """Let code that draws from torch's global generator draw from a source of its own.

    Args:
        seed: The seed.
        purpose: What is drawn from it.

    Yields:
        Nothing; afterwards the global generator is where it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number_for(seed, purpose))
        yield
