"""Blocks of the Hessian by products with random vectors, where the sweep is not exact.

What enters: a surface, parameters, and the requested parts. What leaves: by parameter and part, a
mean over random vectors, its standard error, and every single draw.

How it works: a random vector v with E[v vᵀ] = A on every block, and zero mean between blocks, gives
E[v_l · (Hv)_l] = tr(A H_ll). With ε random signs and W the block's weights, A is for

    trace, diagonal       the identity (times a squared length)
    weighted_diagonal     the squared weights, on the diagonal
    incoming, outgoing    the outer products of units' weights
    relative              (W Wᵀ) ⊗ 1
    normalized            (W σ² Wᵀ) ⊗ σ⁻², with σ the standard deviation of input units

Random vectors are as long as the weights of each block: what one block's noise adds to another's
does not grow when a network is rescaled layer by layer. `sizes` gives other lengths, by parameter:
one number, or one per weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Generator, Tensor

from flatgauge.curvature.sweep.accumulate import reciprocal_or_zero
from flatgauge.estimators.linalg import random_signs, to_float64
from flatgauge.graph.layers import Layer

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface

#: Products that are computed together, where there is room.
_TOGETHER = 4

#: Most random signs that mix the rows of a layer at a time.
_MIXED = 2**22

#: Which parts one random vector serves.
_KINDS = (
    ("trace", "diagonal"),
    ("weighted_diagonal",),
    ("incoming",),
    ("outgoing",),
    ("relative",),
    ("normalized",),
)


class BlockEstimate(NamedTuple):
    """Means over random vectors and their standard errors, by part, for one parameter's block.

    Attributes:
        draws: The estimate by every random vector, units added up (probes,); not of the diagonal.
            One vector serves all parameters, so that the draws of several can be added up.
    """

    means: dict[str, Tensor]
    stderr: dict[str, Tensor]
    draws: dict[str, Tensor]


def estimate_blocks(
    surface: LossSurface,
    names: Sequence[str],
    layers: Mapping[str, Layer],
    wanted: frozenset[str],
    input_std: Mapping[str, Tensor],
    probes: int,
    random: Callable[[str], Generator],
    sizes: Mapping[str, Tensor] | None = None,
) -> dict[str, BlockEstimate]:
    """Estimate the blocks of some parameters, all with the same products; needs two probes."""
    if probes < 2:
        raise ValueError(f"`probes={probes}` gives no standard error; use at least 2.")
    params = surface.params
    if sizes is None:
        sizes = {name: to_float64(params[name]).new_tensor(_size(params[name])) for name in names}
    found = {name: BlockEstimate({}, {}, {}) for name in names}
    for kind in _KINDS:
        parts = [part for part in kind if part in wanted]
        taking = [n for n in names if n in layers or kind[0] in ("trace", "weighted_diagonal")]
        if kind[0] == "normalized":
            taking = [name for name in taking if name in input_std]
        if not parts or not taking:
            continue
        sums: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        draws_of: dict[tuple[str, str], list[Tensor]] = {}
        draws = {
            name: _draw(params[name], kind[0], layers.get(name), input_std.get(name), sizes[name])
            for name in taking
        }
        products = _multiply_draws(surface, draws, probes, random(kind[0]))
        for vector, product in products:
            for name in taking:
                values = to_float64(vector[name])  # Not needed again: overwritten where it can be.
                values.mul_(product[name].to(values.device))
                if kind[0] == "trace":
                    values.div_(sizes[name].square())
                for part in parts:
                    drawn = _reduce(values, part, layers.get(name))
                    _accumulate(sums, (name, part), drawn)
                    draws_of.setdefault((name, part), []).append(drawn.sum())
        for (name, part), (total, squares) in sums.items():
            mean = total.div_(probes)
            squares.div_(probes).addcmul_(mean, mean, value=-1)
            spread = squares.clamp_min_(0).div_(probes - 1)
            found[name].means[part], found[name].stderr[part] = mean, spread.sqrt_()
            if part != "diagonal":
                found[name].draws[part] = torch.stack(draws_of[name, part])
    return found


def _multiply_draws(
    surface: LossSurface,
    draws: Mapping[str, Callable[[Generator], Tensor]],
    probes: int,
    generator: Generator,
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Random vectors and their products with the Hessian."""
    together = surface.budget.hvp_columns(_TOGETHER)
    for start in range(0, probes, together):
        count = min(together, probes - start)
        rows = torch.zeros(count, surface.size, dtype=surface.dtype, device=surface.device)
        for row in rows:
            parts = surface.split(row)
            for name, draw in draws.items():
                parts[name].copy_(draw(generator))
        products = surface.hvp(rows.T)
        for row, product in zip(rows, products.T, strict=True):
            yield surface.split(row), surface.split(product)


def _draw(
    weight: Tensor, kind: str, layer: Layer | None, std: Tensor | None, size: Tensor
) -> Callable[[Generator], Tensor]:
    """How to draw a random vector on one block."""
    if kind == "weighted_diagonal":
        return lambda generator: weight * random_signs(weight.shape, generator).to(weight)
    if kind == "trace" or layer is None:

        def draw_signs(generator: Generator) -> Tensor:
            return (size * random_signs(weight.shape, generator).to(weight)).to(weight)

        return draw_signs
    canonical = layer.canonical(weight)
    groups, out, inner, taps = canonical.shape
    if kind in ("incoming", "outgoing"):
        shape = (groups, out, 1, 1) if kind == "incoming" else (groups, 1, inner, 1)
        return lambda generator: layer.original(
            canonical * random_signs(shape, generator).to(weight)
        ).contiguous()
    back = torch.ones_like(canonical[:, :1])
    if kind == "normalized" and std is not None:
        spread = std.to(weight).reshape(groups, 1, inner, 1)
        canonical, back = canonical * spread, reciprocal_or_zero(spread)
    rows = canonical.flatten(2)  # (groups, out, in * taps)

    def draw_mixture(generator: Generator) -> Tensor:
        # The signs that mix inputs may be many times the weights: a few rows of them at a time.
        length = inner * taps
        vector = torch.zeros_like(rows)
        for group in range(groups):
            for piece in rows[group].split(max(_MIXED // length, 1), dim=1):
                signs = random_signs((piece.shape[1], length), generator).to(weight)
                vector[group].addmm_(piece, signs)
        return layer.original(vector.reshape(canonical.shape) * back).contiguous()

    return draw_mixture


def _reduce(values: Tensor, part: str, layer: Layer | None) -> Tensor:
    """The estimate of a part by one random vector times its product with the Hessian."""
    if part == "diagonal":
        return values
    if part in ("trace", "weighted_diagonal", "relative", "normalized") or layer is None:
        return values.sum()
    canonical = layer.canonical(values)
    return layer.incoming(canonical) if part == "incoming" else layer.outgoing(canonical)


def _size(weight: Tensor) -> float:
    """The length of a block's weights, one where there are none."""
    return float(to_float64(weight).norm()) or 1.0


def _accumulate(
    sums: dict[tuple[str, str], tuple[Tensor, Tensor]], key: tuple[str, str], value: Tensor
) -> None:
    """Add a value and its square."""
    if key not in sums:
        sums[key] = torch.zeros_like(value), torch.zeros_like(value)
    total, squares = sums[key]
    total.add_(value)
    squares.addcmul_(value, value)
