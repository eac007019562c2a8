"""The relative flatness of layers with many positions, gathered from columns or gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Relative:
    """Sums ‖Wᵀ G‖² over columns, G = s aᵀ being the weight's gradient, sample by sample.

    With scales σ of the input units, a/σ and W σ stand in for a and W: the same function, written
    with input units of spread one.

    Attributes:
        part: The part that it gathers.

    Args:
        part: ``"relative"`` or ``"normalized"``.
        weight: The layer's weights (groups, out, in, taps).
        samples: How many samples the chunk holds.
        scales: Of the input units (in,), None to take them as they are.
    """

    def __init__(self, part: str, weight: Tensor, samples: int, scales: Tensor | None) -> None:
        self.part = part
        groups, _, inner, taps = weight.shape
        self._inverse: Tensor | None = None
        if scales is not None:
            weight = weight * scales.reshape(groups, 1, inner, 1)
            each = inverse(scales).reshape(groups, inner, 1)
            self._inverse = each.expand(groups, inner, taps)
        rows = weight.flatten(2)
        self._products = rows @ rows.mT  # W Wᵀ, (groups, out, out)
        self._overlaps: Tensor | None = None
        self._total = weight.new_zeros(samples)

    def see(self, seen: Tensor, rows: Callable[[Tensor], Tensor]) -> None:
        """Work by positions: ‖Wᵀ s aᵀ‖² = ⟨sᵀ W Wᵀ s, aᵀ a⟩ is cheaper where these are few.

        Args:
            seen: What every position sees (n, groups, in * taps, positions).
            rows: Brings (..., in, taps) to the order of what is seen.
        """
        if self._inverse is not None:
            seen = seen * rows(self._inverse)[:, :, None]
        self._overlaps = seen.mT @ seen  # (n, groups, positions, positions)

    def hear(self, column: Tensor, factor: Tensor | None) -> None:
        """A column at the output (n, groups, out, positions), where it works by positions."""
        assert self._overlaps is not None  # See `see`.
        between = column.mT @ (self._products @ column)
        sums = between.mul_(self._overlaps).flatten(1).sum(1)
        self._total += sums if factor is None else sums * factor

    def use(
        self,
        gradients: Tensor,
        factors: Tensor | None,
        block: slice,
        rows: Callable[[Tensor], Tensor],
    ) -> None:
        """Add the gradients of some samples, if it does not.

        Args:
            gradients: The gradients (n, groups, c, out, in * taps).
            factors: The columns' weights (n, c), None if all are one.
            block: Which samples these are.
            rows: Brings (..., in, taps) to the order of the gradients.
        """
        if self._inverse is not None:
            gradients = gradients * rows(self._inverse)[:, None, None]
        terms = (self._products[:, None] @ gradients).mul_(gradients).sum((1, 3, 4))  # (n, c)
        self._total[block] += (terms if factors is None else terms * factors).sum(1)

    def take(self) -> Tensor:
        """What every sample adds (n,), since the last time."""
        taken = self._total.clone()
        self._total.zero_()
        return taken


def inverse(scales: Tensor) -> Tensor:
    """One over every scale; zero for zero, which leaves the unit out."""
    return scales.reciprocal().where(scales != 0, 0.0)
