"""The largest eigenvalue of every layer's block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from flatgauge.curvature.factors import Kept, KeptColumns, LayerBlock, SubBlock, keeps_gradients
from flatgauge.curvature.layer_taps import LayerTap
from flatgauge.curvature.operator import Operator
from flatgauge.curvature.summary import spread
from flatgauge.curvature.sweep import MOST_COLUMNS, Sweeper, sweeper_of
from flatgauge.estimators import top_eigenvalues
from flatgauge.estimators.eigen import Eigenpairs
from flatgauge.surface import LossSurface

#: What share of the memory budget columns may take.
_SHARE = 0.5


@dataclass(frozen=True)
class TopEigenvalue:
    """The largest eigenvalue of a block.

    Attributes:
        value: The eigenvalue.
        bound: How far the solver may be off.
        residual: The length of Hv − value · v.
        converged: Whether the solver met its tolerance.
        products: Products with the block that were spent.
        data_stderr: How far other samples of the same kind would move it; None if not known.
        samples: Every sample's share (N,): their mean is the value; None if not known.
    """

    value: float
    bound: float
    residual: float
    converged: bool
    products: int
    data_stderr: float | None
    samples: Tensor | None


def block_eigenvalues(
    surface: LossSurface,
    names: Sequence[str],
    *,
    tolerance: float,
    max_matvecs: int,
    generator: Generator,
) -> dict[str, TopEigenvalue]:
    """The largest eigenvalue of some layers' blocks.

    Lanczos, on what one sweep keeps of every layer; layers are taken in groups that fit the
    memory budget. Where a layer cannot be swept, or does not fit, on products with the Hessian.

    Args:
        surface: Where to measure.
        names: The layers.
        tolerance: Bound on the error, relative to the value, at which to stop.
        max_matvecs: Most products to spend on a layer.
        generator: Source of randomness for the start vectors.

    Returns:
        By layer.
    """
    sweeper = sweeper_of(surface)
    found: dict[str, TopEigenvalue] = {}

    def solve(name: str, operator: Operator) -> None:
        pairs = top_eigenvalues(
            operator, tolerance=tolerance, max_matvecs=max_matvecs, generator=generator
        )
        found[name] = _finished(pairs, operator)

    for name in names:
        if name in sweeper.plan.exact and name not in sweeper.plan.sites:
            found[name] = _flat(surface)
    groups, rest = _grouped(sweeper, [name for name in names if name not in found])
    for group in groups:
        for name, block in _blocks(sweeper, group):
            solve(name, block)
    for name in rest:
        solve(name, SubBlock(surface, (name,)))
    return {name: found[name] for name in names}


def _grouped(sweeper: Sweeper, names: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """Layers that are swept together, and those that cannot be swept."""
    surface, plan = sweeper.surface, sweeper.plan
    room = _SHARE * surface.memory
    columns = plan.outputs_per_sample()
    groups: list[list[str]] = [[]]
    rest, used = [], 0.0
    for name in reversed(list(names)):
        layer = plan.layers[name]
        outputs = plan.numbers(layer.node)
        weights = math.prod(layer.shape)
        each = columns * outputs + plan.numbers(layer.input)
        if keeps_gradients(layer, outputs):
            each = columns * weights
        needed = each * surface.dtype.itemsize * surface.samples
        if name not in plan.exact or columns > MOST_COLUMNS + 1 or needed > room:
            rest.append(name)
            continue
        if used + needed > room:
            groups.append([])
            used = 0.0
        groups[-1].append(name)
        used += needed
    return [group for group in groups if group], rest


def _blocks(sweeper: Sweeper, names: Sequence[str]) -> Iterator[tuple[str, LayerBlock]]:
    """Sweep once and keep what the blocks of some layers are made of."""
    kept: dict[str, list[Kept]] = {name: [] for name in names}
    counts = []
    wanted = frozenset({"columns"})
    passes = sweeper.passes(frozenset(names), wanted, all_columns=True, generator=None)
    for chunk in passes:
        for column in chunk.columns:
            chunk.pass_back(column)
        for tap in chunk.taps:
            if isinstance(tap, LayerTap) and isinstance(tap.gather, KeptColumns):
                kept[tap.layer.name].append(tap.gather.kept())
        counts.append(chunk.shares)
    for name in names:
        layer, parts = sweeper.plan.layers[name], kept.pop(name)
        yield name, LayerBlock(layer, parts, torch.cat(counts), sweeper.surface)


def _flat(surface: LossSurface) -> TopEigenvalue:
    """The eigenvalue of a layer that the output does not depend on: that of the penalty."""
    decay = surface.weight_decay
    samples = torch.full((surface.samples,), decay, dtype=torch.float64)
    return TopEigenvalue(decay, 0.0, 0.0, True, 0, 0.0, samples)


def _finished(pairs: Eigenpairs, operator: Operator) -> TopEigenvalue:
    """The eigenvalue with every sample's share in it."""
    samples = None
    if isinstance(operator, LayerBlock):
        samples = operator.shares(pairs.vectors[:, 0].to(operator.dtype))
    return TopEigenvalue(
        float(pairs.values[0]),
        float(pairs.bounds[0]),
        float(pairs.residuals[0]),
        pairs.converged,
        pairs.matvecs,
        spread(samples),
        samples,
    )
