"""Random vectors, drawn from an explicit generator only."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from flatgauge.estimators.matrix import Matrix


def required(generator: Generator | None, *, caller: str, otherwise: str) -> Generator:
    """Hand the generator through, or say how to make one.

    Args:
        generator: What the user passed.
        caller: The call as the user would write it.
        otherwise: What to pass to do without randomness.

    Returns:
        The same generator.

    Raises:
        ValueError: If there is none.
    """
    if generator is None:
        raise ValueError(
            f"`{caller}` draws random vectors and needs a generator; pass "
            f"`generator=torch.Generator().manual_seed(0)`, or {otherwise}."
        )
    return generator


def digest(generator: Generator | None) -> int:
    """A number that tells the states of generators apart."""
    return 0 if generator is None else zlib.crc32(generator.get_state().numpy().tobytes())


def branches(generator: Generator) -> Callable[[str], Generator]:
    """Make sources of randomness that do not depend on each other's use.

    Args:
        generator: Where they come from; it advances by one number.

    Returns:
        Gives the source that belongs to a purpose.
    """
    root = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))

    def branch(purpose: str) -> Generator:
        # One number of 32 bits: torch's generator on the CPU ignores all higher ones.
        seed = zlib.crc32(f"{root} {purpose}".encode())
        return Generator(device=generator.device).manual_seed(seed)

    return branch


def direction(matrix: Matrix, generator: Generator) -> Tensor:
    """Gaussian vector ``(p,)``: as a direction, uniform, with a share of every eigenvector."""
    drawn = torch.randn(
        matrix.size, dtype=matrix.dtype, device=generator.device, generator=generator
    )
    return drawn.to(matrix.device)


def signs(matrix: Matrix, count: int, generator: Generator) -> Tensor:
    """Columns ``(p, count)`` of independent random signs (Rademacher vectors), a byte each."""
    drawn = torch.randint(
        0,
        2,
        (matrix.size, count),
        dtype=torch.int8,
        device=generator.device,
        generator=generator,
    )
    return drawn.mul_(2).sub_(1).to(matrix.device)
