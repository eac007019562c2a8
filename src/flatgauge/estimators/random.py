"""Randomness from explicit seeds and generators, never from the global state.

One seed or generator comes in; `child_generator` derives from it one independent generator for
each purpose, so that what one part draws does not change what another part draws. Random vectors
are drawn where the generator lives and moved to where they are used.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from flatgauge.estimators.linalg import Matrix


#: Seeds are smaller than this: torch's generator on the CPU ignores all bits beyond 32.
SEEDS = 2**32


def check_seed(seed: Any) -> int:
    """Return the seed; refuse anything but a whole number of 32 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise ValueError(f"`seed={seed!r}` must be a whole number from 0 to 2**32 - 1.")
    return seed


def require_generator(generator: Generator | None, *, caller: str, otherwise: str) -> Generator:
    """Return the generator, or raise a `ValueError` that says how to make one."""
    if generator is None:
        raise ValueError(
            f"`{caller}` draws random vectors and needs a generator; pass "
            f"`generator=torch.Generator().manual_seed(0)`, or {otherwise}."
        )
    return generator


def root_seed(generator: Generator) -> int:
    """A seed drawn from a generator, which advances by one number."""
    return int(torch.randint(2**31, (1,), generator=generator, device=generator.device))


def child_seed(seed: int, purpose: str) -> int:
    """The 32-bit seed that belongs to a seed and a purpose."""
    return zlib.crc32(f"{seed} {purpose}".encode())


def child_generator(
    source: int | Generator, purpose: str, device: torch.device | str | None = None
) -> Generator:
    """A generator for one purpose, independent of others, on the source's device or `device`."""
    if isinstance(source, Generator):
        device = device or source.device
        source = root_seed(source)
    return Generator(device=device or "cpu").manual_seed(child_seed(source, purpose))


def digest(generator: Generator | None) -> int:
    """A checksum of a generator's state; 0 for none."""
    return 0 if generator is None else zlib.crc32(generator.get_state().numpy().tobytes())


@contextmanager
def seed_global_rng(seed: int, purpose: str) -> Iterator[None]:
    """Seed torch's global generator for a block, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(child_seed(seed, purpose))
        yield


def random_direction(matrix: Matrix, generator: Generator) -> Tensor:
    """A Gaussian vector ``(p,)``: uniform as a direction, with a part along every eigenvector."""
    drawn = torch.randn(
        matrix.size, dtype=matrix.dtype, device=generator.device, generator=generator
    )
    return drawn.to(matrix.device)


def random_signs(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Independent random signs (Rademacher), one byte each, where the generator draws."""
    drawn = torch.randint(
        0, 2, shape, dtype=torch.int8, device=generator.device, generator=generator
    )
    return drawn.mul_(2).sub_(1)


@dataclass(frozen=True)
class TruncatedNormal:
    """Independent normal numbers, of standard deviation σ before the cut, within ±τ (`cut`)."""

    sigma: float
    cut: float

    @property
    def mass(self) -> float:
        """Probability Z of the interval [-τ, τ]."""
        return math.erf(self.cut / self.sigma / math.sqrt(2))

    @property
    def variance(self) -> float:
        """Variance of one number."""
        ratio = self.cut / self.sigma
        if math.isinf(ratio):
            return self.sigma**2
        if ratio < 1e-3:  # Practically uniform; the difference below would cancel.
            return self.cut**2 / 3
        density = math.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
        return self.sigma**2 * (1 - 2 * ratio * density / self.mass)

    def draw(self, count: int, generator: Generator) -> Tensor:
        """Draw a float64 vector by inverting the distribution function."""
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        signed = (2 * uniform - 1) * self.mass
        found: Tensor = math.sqrt(2) * self.sigma * torch.erfinv(signed)
        return found.clamp(-self.cut, self.cut)

    def divergence(self, centre: Tensor, prior: float) -> float:
        r"""KL divergence in nats of the noise around ``centre`` from a normal prior around zero.

        Definition:
            .. math:: \sum_k -\ln Z + \ln \frac{\sigma_P}{\sigma} - \frac{s^2}{2 \sigma^2}
                      + \frac{v_k^2 + s^2}{2 \sigma_P^2}

            with :math:`s^2` the variance of one number, :math:`v` the centre, and :math:`\sigma_P`
            the prior's standard deviation.

        Returns:
            The divergence.
        """
        each = -math.log(self.mass) + math.log(prior / self.sigma)
        spread = self.variance / 2 * (prior**-2 - self.sigma**-2)
        squares = float(centre.double().square().sum())
        return len(centre) * (each + spread) + squares / (2 * prior**2)
