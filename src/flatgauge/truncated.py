"""Normal noise that is cut off: the same on every coordinate."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor


@dataclass(frozen=True)
class TruncatedNormal:
    """Independent normal numbers of size σ, given that none is beyond τ in size.

    Attributes:
        sigma: σ, the size before the cut.
        cut: τ; infinite for none.
    """

    sigma: float
    cut: float

    @property
    def mass(self) -> float:
        """How much of the normal distribution is left."""
        return math.erf(self.cut / self.sigma / math.sqrt(2))

    @property
    def variance(self) -> float:
        """Of one number."""
        ratio = self.cut / self.sigma
        if math.isinf(ratio):
            return self.sigma**2
        if ratio < 1e-3:  # Where the difference below cancels, it is uniform.
            return self.cut**2 / 3
        density = math.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
        return self.sigma**2 * (1 - 2 * ratio * density / self.mass)

    def draw(self, count: int, generator: Generator) -> Tensor:
        """Draw a vector, by the inverse of the distribution function.

        Args:
            count: Its length.
            generator: Source of randomness.

        Returns:
            The vector, in double precision.
        """
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        signed = (2 * uniform - 1) * self.mass
        found: Tensor = math.sqrt(2) * self.sigma * torch.erfinv(signed)
        return found.clamp(-self.cut, self.cut)

    def divergence(self, centre: Tensor, prior: float) -> float:
        r"""KL of the noise around a centre from a normal prior around zero.

        Definition:
            .. math:: \sum_k -\ln Z + \ln \frac{\sigma_P}{\sigma} - \frac{s^2}{2 \sigma^2}
                      + \frac{v_k^2 + s^2}{2 \sigma_P^2}

            with Z the mass that is left, and s² the variance of one number.

        Args:
            centre: v.
            prior: The prior's standard deviation σ_P.

        Returns:
            The divergence in nats.
        """
        each = -math.log(self.mass) + math.log(prior / self.sigma)
        spread = self.variance / 2 * (prior**-2 - self.sigma**-2)
        squares = float(centre.double().square().sum())
        return len(centre) * (each + spread) + squares / (2 * prior**2)
