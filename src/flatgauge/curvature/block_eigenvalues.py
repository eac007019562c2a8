"""The largest eigenvalue of every layer's block of the Hessian.

What enters: a surface and the names of layers. What leaves: for each, the largest eigenvalue with
every sample's share in it.

How it works: one sweep records the factors of a layer's block, its inputs a and the factor vectors
s at its output, or their gradients G where these take less memory. The block then multiplies a
vector V without the model, Hv = Σ λ (s·Va) s aᵀ, and Lanczos finds its largest eigenvalue. Layers
are taken in groups that fit the memory budget; a layer that cannot be swept, or does not fit, is
multiplied by the whole Hessian instead. A sweep made for other numbers (see `blocks`) can record
the factors along the way, and leaves them in the surface's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from flatgauge.curvature.blocks import join_samples, ratio_influence, standard_error
from flatgauge.curvature.operators import Operator, ParameterBlock
from flatgauge.curvature.sweep.backprop import FactorStore, Sweep, stored_factors, sweep_of
from flatgauge.curvature.sweep.conv import LayerFactors
from flatgauge.estimators.eigenvalues import Eigenpairs, top_eigenvalues
from flatgauge.graph.layers import Layer
from flatgauge.surface.derivatives import SubmatrixIndex

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface


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

    Lanczos, on what one sweep records of every layer; layers are taken in groups that fit the
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
    sweep = sweep_of(surface)
    found: dict[str, TopEigenvalue] = {}

    def solve(name: str, operator: Operator) -> None:
        pairs = top_eigenvalues(
            operator,
            tolerance=tolerance,
            max_matvecs=max_matvecs,
            basis=surface.budget.lanczos_vectors(operator.shape[0]),
            generator=generator,
        )
        found[name] = _with_samples(pairs, operator)

    for name in names:
        if name in sweep.plan.exact and name not in sweep.plan.sites:
            found[name] = _of_penalty(surface)
    groups, rest = sweep.group_layers([name for name in names if name not in found])
    for group in groups:
        store = read_factors(sweep, group)
        counts = join_samples(store.counts, surface.device)
        for name in group:  # The factors of each are released before the next.
            layer, factors = sweep.plan.layers[name], store.factors.pop(name)
            solve(name, LayerBlock(layer, factors, counts, surface))
    for name in rest:
        solve(name, ParameterBlock(surface, (name,)))
    return {name: found[name] for name in names}


def _of_penalty(surface: LossSurface) -> TopEigenvalue:
    """The eigenvalue of a layer that the output does not depend on: that of the penalty."""
    decay = surface.weight_decay
    samples = torch.full((surface.samples,), decay, dtype=torch.float64)
    return TopEigenvalue(decay, 0.0, 0.0, True, 0, 0.0, samples)


def _with_samples(pairs: Eigenpairs, operator: Operator) -> TopEigenvalue:
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
        standard_error(samples),
        samples,
    )


class LayerBlock(Operator):
    """The block of one layer, from the factors of every chunk and the counts of its samples."""

    def __init__(
        self, layer: Layer, factors: list[LayerFactors], counts: Tensor, surface: LossSurface
    ) -> None:
        size = torch.Size(layer.shape).numel()
        super().__init__(size, surface.dtype, surface.device)
        self._layer, self._factors, self._counts = layer, factors, counts
        self._decay, self._processes = surface.weight_decay, surface.processes
        self._count = self._processes.gather_sum("counts", lambda: float(counts.sum()))

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(self.shape[0], -1).T
        products = self._processes.run(
            "a product with a layer's block",
            lambda: torch.stack([self._multiply(column) for column in columns], dim=1),
            same=[vectors],
        )
        sums = self._processes.all_sum(products).to(vectors.dtype)
        return sums.reshape(vectors.shape) / self._count + self._decay * vectors

    def shares(self, vector: Tensor) -> Tensor:
        """Every sample's share in vᵀ H v of a unit vector (N,): their mean is the form."""
        parts = []
        for factors in self._factors:
            forms = self._forms(factors, vector)
            parts.append((forms.square() * factors.weights).sum(1, dtype=torch.float64))
        here = {"forms": join_samples(parts, self.device), "counts": self._counts}
        rows = self._processes.concat_named(here, self.device)
        return ratio_influence(rows["forms"], rows["counts"]) + self._decay

    def _multiply(self, vector: Tensor) -> Tensor:
        """Σ λ (G·v) G over all chunks."""
        total = torch.zeros_like(vector)
        for factors in self._factors:
            if factors.inputs is None:
                forms = self._forms(factors, vector) * factors.weights
                total += factors.vectors.flatten(0, 1).T @ forms.flatten()
            else:
                total += self._multiply_by_contraction(factors, factors.inputs, vector)
        return total

    def _forms(self, factors: LayerFactors, vector: Tensor) -> Tensor:
        """G·v = s·Va of every sample and factor vector (n, c)."""
        if factors.inputs is None:
            return (factors.vectors.flatten(0, 1) @ vector).view_as(factors.weights)
        weight = self._as_weight(factors, vector)
        images = self._layer.contract(factors.inputs.flatten(0, 1), weight)
        rows = images.reshape(len(factors.weights), -1, 1)
        return (factors.vectors.flatten(2) @ rows)[..., 0]

    def _multiply_by_contraction(
        self, factors: LayerFactors, inputs: Tensor, vector: Tensor
    ) -> Tensor:
        """Run the layer with the vector as its weight, and differentiate by it."""
        with torch.enable_grad():
            weight = self._as_weight(factors, vector).detach().requires_grad_()
            images = self._layer.contract(inputs.flatten(0, 1), weight)
        rows = images.detach().reshape(len(factors.weights), -1, 1)
        vectors = factors.vectors.flatten(2)
        forms = (vectors @ rows)[..., 0] * factors.weights
        combined = (forms[:, None] @ vectors).reshape(images.shape)
        (found,) = torch.autograd.grad(images, weight, combined)
        return self._turn(factors.units).spread(found, self._layer.shape).flatten()

    def _as_weight(self, factors: LayerFactors, vector: Tensor) -> Tensor:
        """A vector as a weight, of the units that were recorded."""
        return self._turn(factors.units).take(vector.view(self._layer.shape))

    def _turn(self, units: SubmatrixIndex) -> SubmatrixIndex:
        """Output and input units, as rows and columns of the parameter."""
        return units if self._layer.out_axis == 0 else SubmatrixIndex(units.columns, units.rows)


def read_factors(sweep: Sweep, names: Sequence[str]) -> FactorStore:
    """The factors of a group of layers: those that another sweep left, or by a sweep of its own."""
    left = stored_factors(sweep.surface).pop(tuple(names), None)
    if left is not None:
        return left
    store = FactorStore(names)

    def record() -> None:
        for chunk in sweep.chunks(
            frozenset(names), frozenset(), all_factors=True, generator=None, record=True
        ):
            chunk.backward(chunk.factors)
            store.add(chunk)

    sweep.surface.processes.run("factors", record)
    return store
