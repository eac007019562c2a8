"""Noise on a layer whose scales come from a finite set, and what it costs to name the rest.

A block of the Hessian enters `layer_noise`: the best variances are products of a scale per row
and one per column. `LayerNoise.round_scales` takes both from a finite set, so that naming them
costs bits. `description_length` counts the numbers of the model that have no noise and are named
outright, under a prior that is uniform over all numbers of a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flatgauge.curvature.blocks import Block
from flatgauge.curvature.sweep.backprop import sweep_of
from flatgauge.estimators.matrix_scaling import Array, minimize_scaled_sum
from flatgauge.graph.layers import Layer
from flatgauge.measures.normalized_sharpness import best_scales
from flatgauge.surface.surface import LossSurface

#: The scales of the set lie between this power of two and its inverse.
_LOWEST = -128

#: Bits of a set with one scale per octave, and the most that a float64 resolves.
FEWEST_BITS, MOST_BITS = 8, 48

#: What an entry without curvature (or without weight) counts as having: this share of what makes
#: it cost as much as an entry of the layer costs on average.
_SHARE = 0.1

#: What frozen parameters count as: named outright, or given before the data were seen.
FROZEN = ("told", "given")


@dataclass(frozen=True)
class LayerNoise:
    """The noise on one layer: variances are products of rows and columns.

    Attributes:
        rows: Scales of its output units (groups, out).
        columns: Scales of its input units (groups, in).
        squares: Of the weights, summed over the kernel (groups, out, in).
        filled: Whether entries without curvature or weight had to be given some.
        clipped: How many scales lay beyond the ends of the finite set.
    """

    layer: Layer
    rows: Array
    columns: Array
    squares: Array
    filled: bool
    clipped: int = 0

    def round_scales(self, factor: float, bits: int) -> LayerNoise:
        """The noise times a factor, with all scales taken from the finite set."""
        rows, clipped_rows = on_grid(self.rows * factor, bits)
        columns, clipped_columns = on_grid(self.columns, bits)
        return replace(self, rows=rows, columns=columns, clipped=clipped_rows + clipped_columns)

    @property
    def count(self) -> int:
        """The number of scales."""
        return self.rows.size + self.columns.size

    @cached_property
    def variances(self) -> Array:
        """The variances (groups, out, in)."""
        products: Array = self.rows[:, :, None] * self.columns[:, None, :]
        return products

    @cached_property
    def divergence(self) -> float:
        """KL of the weights under this noise from zero under the same."""
        return float((self.squares / self.variances).sum()) / 2

    def smallest_divergence(self, bits: int) -> float:
        """Return the smallest KL of the weights under this noise from zero under wider noise.

        With a prior of variances τ σ², one τ for the layer, and m the mean of W² / σ² over its n
        weights, the divergence is ½ n (ln τ + (1 + m) / τ − 1). It is smallest at τ = 1 + m; where
        all σ are one number, that is σ_P² = σ² + ‖W‖² / n. Here τ − 1 comes from the finite set;
        the price of naming it is left out.
        """
        weights = math.prod(self.layer.shape)
        mean = 2 * self.divergence / weights
        if not mean:
            return 0.0  # The least of the set is as good as τ = 1.
        over = float(on_grid(np.array([mean]), bits)[0][0])
        # ln τ − 1 + 1 / τ loses its digits where τ is next to one.
        return weights / 2 * (math.log1p(over) + (mean - over) / (1 + over))

    def deviations(self) -> Tensor:
        """The standard deviation of every weight, of the parameter's shape."""
        roots = torch.from_numpy(np.sqrt(self.variances))
        taps = math.prod(self.layer.shape) // roots.numel()
        return self.layer.original(roots[..., None].expand(*roots.shape, taps)).contiguous()


def on_grid(scales: Array, bits: int) -> tuple[Array, int]:
    """Return the nearest members of a set of 2^bits numbers, and how many scales lay beyond it.

    The set is 2^(k / s) from 2^-128 up to 2^128, with s = 2^(bits − 8) steps per octave. Four
    times a number goes to four times its member, bit for bit.

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


def layer_noise(block: Block) -> LayerNoise:
    """Return the noise of normalized sharpness on a layer, for λ = 1/2, from a block's diagonal.

    Where no best scales exist (a row without curvature would take infinite noise, a column
    without weights none), entries without curvature are given a little, so that noise is of the
    weights' own size there, and entries without weight likewise. What is chosen here decides how
    good a bound is, not whether it holds.
    """
    layer = block.layer
    assert layer is not None
    squares = layer.canonical(block.weight.square()).sum(-1).cpu().numpy()
    products = best_scales(block).products
    filled = not (products > 0).all()
    if filled:
        diagonal = block.values["diagonal"].clamp_min(0)
        if block.rounding is not None:
            diagonal = diagonal.where(diagonal > block.rounding, 0.0)
        curvature = layer.canonical(diagonal).sum(-1).cpu().numpy()
        products = _fill_zeros(curvature, squares, taps=block.weight.numel() // squares.size)
    rows, columns = _factorize(products)
    return LayerNoise(layer, rows, columns, squares, filled)


def _fill_zeros(curvature: Array, squares: Array, taps: int) -> Array:
    """The best products where every entry with curvature or weight has both."""
    roots = np.sqrt(curvature) * np.sqrt(squares)
    typical = _SHARE * float(roots[roots > 0].mean()) if (roots > 0).any() else float(taps)
    # Rescaling multiplies curvature and divides squares: so it does with what is filled in.
    with np.errstate(divide="ignore", over="ignore"):
        ahead = np.where((curvature == 0) & (squares > 0), typical * (typical / squares), curvature)
        back = np.where((squares == 0) & (curvature > 0), typical * (typical / curvature), squares)
    most = 1e300
    return minimize_scaled_sum(np.minimum(ahead, most), np.minimum(back, most)).products


def _factorize(products: Array) -> tuple[Array, Array]:
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


@dataclass(frozen=True)
class DescriptionLength:
    """Numbers that a bound names one by one: how many, the bits that they take, and which."""

    numbers: int
    bits: int
    note: str


def description_length(
    surface: LossSurface, noisy: Collection[str], frozen: str
) -> DescriptionLength:
    """Count what the model reads except parameters under noise, and the bits of their dtypes."""
    graph = sweep_of(surface).plan.graph
    read = {name for node, name in graph.parameter_names.items() if node.users}
    trained = set(surface.names)
    found: dict[str, list[Tensor]] = {
        "trained parameters": [],
        "frozen parameters": [],
        "stored numbers": [],
    }
    for name, parameter in surface.model.named_parameters():
        if name in read and name not in noisy and (name in trained or frozen == "told"):
            found["trained parameters" if name in trained else "frozen parameters"].append(
                parameter
            )
    stored = {name for node, name in graph.buffer_names.items() if node.users}
    for name, buffer in surface.model.named_buffers():
        if name in stored and buffer.is_floating_point():
            found["stored numbers"].append(buffer)
    counts = {kind: sum(tensor.numel() for tensor in tensors) for kind, tensors in found.items()}
    note = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "nothing"
    if frozen == "given":
        note += "; frozen parameters count as given before the data were seen (`frozen='given'`)"
    everything = [tensor for tensors in found.values() for tensor in tensors]
    bits = sum(tensor.numel() * 8 * tensor.element_size() for tensor in everything)
    return DescriptionLength(sum(counts.values()), bits, note)
