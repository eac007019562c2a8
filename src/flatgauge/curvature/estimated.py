"""Blocks by Hessian products with random vectors, where the sweep is not exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from flatgauge.curvature.relative import inverse
from flatgauge.layers import Layer
from flatgauge.precision import wide
from flatgauge.surface import LossSurface

#: Products that are computed together, where there is room.
_TOGETHER = 4

#: Most random signs that mix the rows of a layer at a time.
_MIXED = 2**22

#: Which parts one random vector serves.
_KINDS = (
    ("trace", "diagonal"),
    ("own",),
    ("incoming",),
    ("outgoing",),
    ("relative",),
    ("normalized",),
)


class Found(NamedTuple):
    """What random vectors say of one parameter's block, by part.

    Attributes:
        means: The means over the random vectors.
        stderr: The standard errors of the means.
        draws: What every random vector says, units added up (probes,); not of the diagonal. One
            vector serves all parameters, so that the draws of several can be added up.
    """

    means: dict[str, Tensor]
    stderr: dict[str, Tensor]
    draws: dict[str, Tensor]


def estimated_blocks(
    surface: LossSurface,
    names: Sequence[str],
    layers: Mapping[str, Layer],
    wanted: frozenset[str],
    scales: Mapping[str, Tensor],
    probes: int,
    sources: Callable[[str], Generator],
    sizes: Mapping[str, Tensor] | None = None,
) -> dict[str, Found]:
    """Estimate the blocks of some parameters, all with the same products.

    A random vector v with E[v vᵀ] = A on every block, and zero mean between blocks, gives
    E[v_l · (Hv)_l] = tr(A H_ll): the identity for the trace, the squared weights on its diagonal
    for the weights' own curvature, the outer products of units' weights for their forms,
    (W Wᵀ) ⊗ 1 for the relative flatness, (W σ² Wᵀ) ⊗ σ⁻² where input units of spread σ are
    normalized. Random vectors are as long as the weights of each block: what one block's noise
    adds to another's does not grow when a network is rescaled layer by layer.

    Args:
        surface: Where to estimate.
        names: The parameters.
        layers: Those among them that are layers.
        wanted: The parts.
        scales: By layer, how much its input units vary, where that is needed.
        probes: Products per kind of random vector, at least two.
        sources: Gives a source of randomness for every kind of random vector.
        sizes: How large the random vectors for traces and diagonals are, by parameter: one number,
            or one per weight; None for the length of the block's weights.

    Returns:
        By parameter.

    Raises:
        ValueError: If there are too few probes for an error.
    """
    if probes < 2:
        raise ValueError(f"`probes={probes}` gives no standard error; use at least 2.")
    params = surface.params
    if sizes is None:
        sizes = {name: wide(params[name]).new_tensor(_size(params[name])) for name in names}
    found = {name: Found({}, {}, {}) for name in names}
    for kind in _KINDS:
        parts = [part for part in kind if part in wanted]
        taking = [n for n in names if n in layers or kind[0] in ("trace", "own")]
        if kind[0] == "normalized":
            taking = [name for name in taking if name in scales]
        if not parts or not taking:
            continue
        sums: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        draws_of: dict[tuple[str, str], list[Tensor]] = {}
        draws = {
            name: _draw(params[name], kind[0], layers.get(name), scales.get(name), sizes[name])
            for name in taking
        }
        drawn = _drawn(surface, draws, probes, sources(kind[0]))
        for vector, product in drawn:
            for name in taking:
                values = wide(vector[name])  # Not needed again: written over where it can be.
                values.mul_(product[name].to(values.device))
                if kind[0] == "trace":
                    values.div_(sizes[name].square())
                for part in parts:
                    drawn_value = _reduced(values, part, layers.get(name))
                    _accumulate(sums, (name, part), drawn_value)
                    draws_of.setdefault((name, part), []).append(drawn_value.sum())
        for (name, part), (total, squares) in sums.items():
            mean = total.div_(probes)
            squares.div_(probes).addcmul_(mean, mean, value=-1)
            spread = squares.clamp_min_(0).div_(probes - 1)
            found[name].means[part], found[name].stderr[part] = mean, spread.sqrt_()
            if part != "diagonal":
                found[name].draws[part] = torch.stack(draws_of[name, part])
    return found


def _drawn(
    surface: LossSurface,
    draws: Mapping[str, Callable[[Generator], Tensor]],
    probes: int,
    generator: Generator,
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Random vectors and their products with the Hessian."""
    together = surface.budget.columns(_TOGETHER)
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
    weight: Tensor, kind: str, layer: Layer | None, scales: Tensor | None, size: Tensor
) -> Callable[[Generator], Tensor]:
    """How to draw a random vector on one block."""
    if kind == "own":
        return lambda generator: weight * _signs(weight.shape, weight, generator)
    if kind == "trace" or layer is None:
        return lambda generator: (size * _signs(weight.shape, weight, generator)).to(weight)
    canonical = layer.canonical(weight)
    groups, out, inner, taps = canonical.shape
    if kind in ("incoming", "outgoing"):
        shape = (groups, out, 1, 1) if kind == "incoming" else (groups, 1, inner, 1)
        return lambda generator: layer.original(
            canonical * _signs(shape, weight, generator)
        ).contiguous()
    back = torch.ones_like(canonical[:, :1])
    if kind == "normalized" and scales is not None:
        spread = scales.to(weight).reshape(groups, 1, inner, 1)
        canonical, back = canonical * spread, inverse(spread)
    rows = canonical.flatten(2)  # (groups, out, in * taps)

    def mixed(generator: Generator) -> Tensor:
        # The signs that mix inputs may be many times the weights: a few rows of them at a time.
        length = inner * taps
        vector = torch.zeros_like(rows)
        for group in range(groups):
            for piece in rows[group].split(max(_MIXED // length, 1), dim=1):
                signs = _signs((piece.shape[1], length), weight, generator)
                vector[group].addmm_(piece, signs)
        return layer.original(vector.reshape(canonical.shape) * back).contiguous()

    return mixed


def _reduced(values: Tensor, part: str, layer: Layer | None) -> Tensor:
    """What one random vector says about a part."""
    if part == "diagonal":
        return values
    if part in ("trace", "own", "relative", "normalized") or layer is None:
        return values.sum()
    canonical = layer.canonical(values)
    return layer.incoming(canonical) if part == "incoming" else layer.outgoing(canonical)


def _size(weight: Tensor) -> float:
    """The length of a block's weights, one where there are none."""
    return float(wide(weight).norm()) or 1.0


def _signs(shape: tuple[int, ...], like: Tensor, generator: Generator) -> Tensor:
    """Random signs."""
    drawn = torch.randint(
        0, 2, shape, generator=generator, device=generator.device, dtype=torch.int8
    )
    return drawn.mul_(2).sub_(1).to(like)


def _accumulate(
    sums: dict[tuple[str, str], tuple[Tensor, Tensor]], key: tuple[str, str], value: Tensor
) -> None:
    """Add a value and its square."""
    if key not in sums:
        sums[key] = torch.zeros_like(value), torch.zeros_like(value)
    total, squares = sums[key]
    total.add_(value)
    squares.addcmul_(value, value)
