"""How much the loss rises on average when the point is shaken."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from flatgauge.estimators import Estimate


def expected_increase(
    loss: Callable[[Tensor], float],
    origin: Tensor,
    *,
    sigma: float,
    pairs: int,
    generator: Generator,
) -> Estimate:
    r"""Mean rise of the loss under Gaussian noise, by antithetic pairs.

    Definition:
        .. math:: E\,[L(\sigma u)] - L(0), \quad u \sim N(0, I)

        Each draw is the mean over u and -u, which cancels every odd order: the gradient does
        not add to the error.

    Args:
        loss: The loss at a displacement.
        origin: The zero displacement; gives length, precision and device.
        sigma: The size of the noise in every coordinate.
        pairs: Number of pairs, at least 2.
        generator: Source of randomness, on the CPU.

    Returns:
        The signed mean with its standard error; infinite if some displacement has infinite loss.

    Raises:
        ValueError: If `sigma` is not positive or there are fewer than two pairs.
    """
    if not (math.isfinite(sigma) and sigma > 0):
        raise ValueError(f"`sigma={sigma!r}` must be a positive finite number.")
    if pairs < 2:
        raise ValueError(f"`pairs={pairs!r}` gives no standard error; draw at least 2 pairs.")
    base = loss(origin)
    rises = []
    for _ in range(pairs):
        noise = torch.randn(len(origin), generator=generator, dtype=origin.dtype).to(origin.device)
        rises.append((loss(sigma * noise) + loss(-sigma * noise)) / 2 - base)
    draws = torch.tensor(rises, dtype=torch.float64)
    options = {"sigma": sigma, "pairs": pairs}
    if not torch.isfinite(draws).all():
        share = int((~torch.isfinite(draws)).sum())
        note = f"the loss overflows at {share} of {pairs} pairs; take a smaller `sigma`"
        return Estimate(math.inf, converged=False, options=options, notes=(note,))
    stderr = float(draws.std()) / math.sqrt(pairs)
    return Estimate(float(draws.mean()), stderr=stderr, options=options)
