"""Blocks of the Hessian whose noise is the same however the network is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Generator, Tensor

from flatgauge.curvature.blocks import Blocks, block_curvature, estimated_block
from flatgauge.curvature.estimated import estimated_blocks
from flatgauge.curvature.surrogate import samples_without_loss
from flatgauge.curvature.sweep import sweeper_of
from flatgauge.estimators.probes import branches, digest
from flatgauge.graph import UnsupportedGraphError
from flatgauge.precision import wide
from flatgauge.surface import LossSurface
from flatgauge.symmetry.balancing import balance_of
from flatgauge.symmetry.of_surface import gauge_of


def orbit_blocks(
    surface: LossSurface,
    parts: Iterable[str],
    *,
    all_columns: bool,
    probes: int,
    generator: Generator | None,
) -> Blocks:
    """The blocks of all parameters, those that cannot be swept estimated.

    Random vectors are drawn for the balanced form of the network: another way to write it gets the
    same ones, rescaled, so that an estimate is as invariant as what it estimates.

    Args:
        surface: Where to measure.
        parts: ``"trace"``, ``"diagonal"`` or both.
        all_columns: Whether to be exact also with many outputs.
        probes: Hessian products for what is estimated.
        generator: Source of randomness, required where something is estimated.

    Returns:
        The blocks.

    Raises:
        ValueError: If a generator is needed.
    """
    wanted = frozenset(parts)
    swept = block_curvature(
        surface,
        wanted,
        all_columns=all_columns,
        estimate=False,
        probes=probes,
        generator=None if generator is None else generator.clone_state(),
    )
    if not swept.missing:
        return swept
    names = [name for name in surface.names if name in swept.missing]
    if generator is None:
        raise ValueError(
            f"`{names[0]}` cannot be swept ({swept.missing[names[0]]}); estimating it draws random "
            "vectors and needs a generator; pass `generator=torch.Generator().manual_seed(0)`."
        )
    source = generator.clone_state()
    found = surface.recall(
        ("orbit estimates", wanted, probes, digest(source)),
        lambda: estimated_blocks(
            surface, names, {}, wanted, {}, probes, branches(source), orbit_sizes(surface, names)
        ),
    )
    layers, params = sweeper_of(surface).plan.layers, surface.params
    left_out = samples_without_loss(surface)
    # Products are of the mean over all samples that count; those left out are none of them.
    scale = surface.objective.count / (surface.objective.count - left_out)
    estimated = {
        name: estimated_block(
            name, swept.missing[name], params[name], found[name], scale, layers.get(name)
        )
        for name in names
    }
    blocks = {name: estimated.get(name) or swept[name] for name in surface.names}
    return Blocks(blocks, swept.parts, left_out=left_out)


def orbit_sizes(surface: LossSurface, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Sizes of random vectors that follow the weights, however the network is written.

    Args:
        surface: Where they are drawn.
        names: For which parameters.

    Returns:
        By parameter, one number per weight: the length of the parameter in the balanced form over
        what takes each weight there. None where the model cannot be read.
    """
    state = dict(surface.model.named_parameters())
    try:
        factors = balance_of(gauge_of(surface.origin), state).factors
    except UnsupportedGraphError:
        return None  # Nobody knows how else it could be written.
    sizes, params = {}, surface.params
    for name in names:
        weight = wide(params[name])
        factor = torch.ones_like(weight)
        for part in factors.get(name, []):
            factor = factor * part.to(factor)
        sizes[name] = (float((weight * factor).norm()) or 1.0) / factor
    return sizes
