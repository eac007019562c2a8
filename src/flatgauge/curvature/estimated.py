"""Blocks by Hessian products with random vectors, where the sweep is not exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Generator, Tensor

from flatgauge.curvature.relative import inverse
from flatgauge.layers import Layer
from flatgauge.precision import wide
from flatgauge.surface import LossSurface

#: Products that are computed together.
_TOGETHER = 4

#: Which parts one random vector serves.
_KINDS = (
    ("trace", "diagonal"),
    ("own",),
    ("incoming",),
    ("outgoing",),
    ("relative",),
    ("normalized",),
)

#: By part: its mean over the random vectors, and the standard errors.
Found = tuple[dict[str, Tensor], dict[str, Tensor]]


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
        By parameter: means and standard errors by part.

    Raises:
        ValueError: If there are too few probes for an error.
    """
    if probes < 2:
        raise ValueError(f"`probes={probes}` gives no standard error; use at least 2.")
    params = surface.params
    if sizes is None:
        sizes = {name: wide(params[name]).new_tensor(_size(params[name])) for name in names}
    found: dict[str, Found] = {name: ({}, {}) for name in names}
    for kind in _KINDS:
        parts = [part for part in kind if part in wanted]
        taking = [n for n in names if n in layers or kind[0] in ("trace", "own")]
        if kind[0] == "normalized":
            taking = [name for name in taking if name in scales]
        if not parts or not taking:
            continue
        sums: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        draws = {
            name: _draw(params[name], kind[0], layers.get(name), scales.get(name), sizes[name])
            for name in taking
        }
        drawn = _drawn(surface, params, draws, probes, sources(kind[0]))
        for vector, product in drawn:
            for name in taking:
                values = wide(vector[name]) * wide(product[name])
                if kind[0] == "trace":
                    values = values / sizes[name].square()
                for part in parts:
                    _accumulate(sums, (name, part), _reduced(values, part, layers.get(name)))
        for (name, part), (total, squares) in sums.items():
            mean = total / probes
            spread = (squares / probes - mean.square()).clamp_min(0) / (probes - 1)
            found[name][0][part], found[name][1][part] = mean, spread.sqrt()
    return found


def _drawn(
    surface: LossSurface,
    params: Mapping[str, Tensor],
    draws: Mapping[str, Callable[[Generator], Tensor]],
    probes: int,
    generator: Generator,
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Random vectors and their products with the Hessian."""
    for start in range(0, probes, _TOGETHER):
        vectors = []
        for _ in range(min(_TOGETHER, probes - start)):
            parts = {name: torch.zeros_like(value) for name, value in params.items()}
            parts |= {name: draw(generator) for name, draw in draws.items()}
            vectors.append(parts)
        columns = torch.stack([surface.flatten(parts) for parts in vectors], dim=1)
        products = surface.hvp(columns)
        for parts, product in zip(vectors, products.T, strict=True):
            yield parts, surface.split(product)


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
        mixing = _signs((groups, inner * taps, inner * taps), weight, generator)
        vector = (rows @ mixing).reshape(canonical.shape) * back
        return layer.original(vector).contiguous()

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
    drawn = torch.randint(0, 2, shape, generator=generator, device=generator.device)
    return (2 * drawn - 1).to(like)


def _accumulate(
    sums: dict[tuple[str, str], tuple[Tensor, Tensor]], key: tuple[str, str], value: Tensor
) -> None:
    """Add a value and its square."""
    total, squares = sums.get(key, (torch.zeros_like(value), torch.zeros_like(value)))
    sums[key] = total + value, squares + value.square()
