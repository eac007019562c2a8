"""Noise per row and column whose scales come from a finite set, so that they can be told."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatgauge.curvature.blocks import Block
from flatgauge.layers import Layer
from flatgauge.matrix_scaling import smallest_sum
from flatgauge.measures.normalized_sharpness import scaled
from flatgauge.osborne import Array

#: The scales of the set lie between this power of two and its inverse.
_LOWEST = -128

#: Bits of a set with one scale per octave, and the most that a float64 resolves.
FEWEST_BITS, MOST_BITS = 8, 48

#: What an entry without curvature (or without weight) counts as having: this share of what makes
#: it cost as much as an entry of the layer costs on average.
_SHARE = 0.1


@dataclass(frozen=True)
class Noise:
    """The noise on one layer before it is rounded: variances are products of rows and columns.

    Attributes:
        layer: The layer.
        rows: Scales of its output units (groups, out).
        columns: Scales of its input units (groups, in).
        squares: Of the weights, summed over the kernel (groups, out, in).
        filled: Whether entries without curvature or weight had to be given some.
    """

    layer: Layer
    rows: Array
    columns: Array
    squares: Array
    filled: bool

    @property
    def count(self) -> int:
        """The number of scales."""
        return self.rows.size + self.columns.size

    def rounded(self, factor: float, bits: int) -> Variances:
        """The noise times a factor, with all scales taken from the finite set."""
        rows, clipped_rows = on_grid(self.rows * factor, bits)
        columns, clipped_columns = on_grid(self.columns, bits)
        variances = rows[:, :, None] * columns[:, None, :]
        return Variances(
            self.layer,
            variances,
            float((self.squares / variances).sum()) / 2,
            clipped_rows + clipped_columns,
        )


@dataclass(frozen=True)
class Variances:
    """The noise on one layer.

    Attributes:
        layer: The layer.
        values: Of the variance (groups, out, in).
        divergence: KL of the weights under this noise from zero under the same.
        clipped: How many scales lay beyond the ends of the set.
    """

    layer: Layer
    values: Array
    divergence: float
    clipped: int

    @property
    def weights(self) -> int:
        """The number of weights."""
        return math.prod(self.layer.shape)

    def widened(self, bits: int) -> float:
        r"""KL of the weights under this noise from zero under wider noise, the best there is.

        With a prior of variances τ σ², one τ for the layer, and m the mean of W² / σ² over its n
        weights, the divergence is ½ n (ln τ + (1 + m) / τ − 1). It is smallest at τ = 1 + m; where
        all σ are one number, that is σ_P² = σ² + ‖W‖² / n. Here τ − 1 comes from the finite set.

        Args:
            bits: The size of the set.

        Returns:
            The divergence, without the price of naming τ.
        """
        mean = 2 * self.divergence / self.weights
        if not mean:
            return 0.0  # The least of the set is as good as τ = 1.
        over = float(on_grid(np.array([mean]), bits)[0][0])
        # ln τ − 1 + 1 / τ loses its digits where τ is next to one.
        return self.weights / 2 * (math.log1p(over) + (mean - over) / (1 + over))

    def deviations(self) -> Tensor:
        """The standard deviation of every weight, of the parameter's shape."""
        roots = torch.from_numpy(np.sqrt(self.values))
        taps = math.prod(self.layer.shape) // roots.numel()
        return self.layer.original(roots[..., None].expand(*roots.shape, taps)).contiguous()


def on_grid(scales: Array, bits: int) -> tuple[Array, int]:
    """The nearest members of a set of 2^bits numbers, evenly spaced on a logarithmic scale.

    The set is 2^(k / s) from 2^-128 up to 2^128, with s = 2^(bits − 8) steps per octave. Four
    times a number goes to four times its member, bit for bit.

    Args:
        scales: Positive numbers.
        bits: The size of the set.

    Returns:
        The members, and how many numbers lay beyond the ends.

    Example:
        >>> on_grid(np.array([1.0, 3.1, 0.2]), 8)
        (array([1.  , 4.  , 0.25]), 0)
    """
    mantissas, exponents = np.frexp(scales)
    steps = 2 ** (bits - FEWEST_BITS)
    logs = np.rint(np.log2(mantissas) * steps).astype(np.int64)  # Of the mantissa alone.
    places = exponents.astype(np.int64) * steps + logs
    lowest, highest = _LOWEST * steps, -_LOWEST * steps - 1
    clipped = int(((places < lowest) | (places > highest)).sum())
    places = places.clip(lowest, highest)
    values: Array = np.ldexp(2.0 ** ((places % steps) / steps), places // steps)
    return values, clipped


def noise_of(block: Block) -> Noise:
    """The noise of normalized sharpness on a layer, for λ = 1/2.

    Where no best scales exist (a row without curvature would take infinite noise, a column
    without weights none), entries without curvature are given a little, so that noise is of the
    weights' own size there, and entries without weight likewise. What is chosen here decides how
    good a bound is, not whether it holds.

    Args:
        block: With its diagonal.

    Returns:
        The noise.
    """
    layer = block.layer
    assert layer is not None
    squares = layer.canonical(block.weight.square()).sum(-1).cpu().numpy()
    products = scaled(block).products
    filled = not (products > 0).all()
    if filled:
        diagonal = block.values["diagonal"].clamp_min(0)
        if block.rounding is not None:
            diagonal = diagonal.where(diagonal > block.rounding, 0.0)
        curvature = layer.canonical(diagonal).sum(-1).cpu().numpy()
        products = _filled(curvature, squares, taps=block.weight.numel() // squares.size)
    rows, columns = _split(products)
    return Noise(layer, rows, columns, squares, filled)


def _filled(curvature: Array, squares: Array, taps: int) -> Array:
    """The best products where every entry with curvature or weight has both."""
    roots = np.sqrt(curvature) * np.sqrt(squares)
    typical = _SHARE * float(roots[roots > 0].mean()) if (roots > 0).any() else float(taps)
    # Rescaling multiplies curvature and divides squares: so it does with what is filled in.
    with np.errstate(divide="ignore", over="ignore"):
        ahead = np.where((curvature == 0) & (squares > 0), typical * (typical / squares), curvature)
        back = np.where((squares == 0) & (curvature > 0), typical * (typical / curvature), squares)
    most = 1e300
    return smallest_sum(np.minimum(ahead, most), np.minimum(back, most)).products


def _split(products: Array) -> tuple[Array, Array]:
    """Rows and columns whose products these are; tiny ones for those that have none."""
    rows = np.full(products.shape[:2], 2.0**_LOWEST)
    columns = np.full((len(products), products.shape[2]), 2.0**_LOWEST)
    for group, matrix in enumerate(products):
        left = (matrix > 0).any(1)
        while left.any():  # One connected part after the other: they share no row and no column.
            first = int(left.argmax())
            there = matrix[first] > 0
            column = int(there.argmax())
            members = matrix[:, column] > 0
            # Relative to its first row: a division by a power of four is exact.
            rows[group, members] = matrix[members, column] / matrix[first, column]
            columns[group, there] = matrix[first, there]
            left &= ~members
    return rows, columns
