"""The largest eigenvalue of every layer's block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from flatgauge.curvature.columns import columns_of, groups_of
from flatgauge.curvature.factors import LayerBlock, SubBlock
from flatgauge.curvature.operator import Operator
from flatgauge.curvature.summary import spread
from flatgauge.curvature.sweep import sweeper_of
from flatgauge.estimators import top_eigenvalues
from flatgauge.estimators.eigen import Eigenpairs
from flatgauge.surface import LossSurface


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
            operator,
            tolerance=tolerance,
            max_matvecs=max_matvecs,
            basis=surface.budget.basis(operator.shape[0]),
            generator=generator,
        )
        found[name] = _finished(pairs, operator)

    for name in names:
        if name in sweeper.plan.exact and name not in sweeper.plan.sites:
            found[name] = _flat(surface)
    groups, rest = groups_of(sweeper, [name for name in names if name not in found])
    for group in groups:
        for name, block in columns_of(sweeper, group).blocks(sweeper):
            solve(name, block)
    for name in rest:
        solve(name, SubBlock(surface, (name,)))
    return {name: found[name] for name in names}


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
