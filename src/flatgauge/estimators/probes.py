"""Random vectors, drawn from an explicit generator only."""

from __future__ import annotations

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


def direction(matrix: Matrix, generator: Generator) -> Tensor:
    """Gaussian vector ``(p,)``: as a direction, uniform, with a share of every eigenvector."""
    drawn = torch.randn(
        matrix.size, dtype=matrix.dtype, device=generator.device, generator=generator
    )
    return drawn.to(matrix.device)


def signs(matrix: Matrix, count: int, generator: Generator) -> Tensor:
    """Columns ``(p, count)`` of independent random signs (Rademacher vectors)."""
    drawn = torch.randint(
        0,
        2,
        (matrix.size, count),
        dtype=torch.int8,
        device=generator.device,
        generator=generator,
    )
    return (2 * drawn - 1).to(device=matrix.device, dtype=matrix.dtype)
