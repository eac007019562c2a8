"""Blocks as operators: a layer's curvature, multiplied by vectors from what a sweep has kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatgauge.curvature.operator import Operator
from flatgauge.curvature.sample_gradients import SampleGradients
from flatgauge.curvature.summary import as_shares, rows_of
from flatgauge.curvature.taps import Chunk
from flatgauge.layers import Layer
from flatgauge.silent_units import Choice
from flatgauge.surface import LossSurface


class KeptColumns:
    """Keeps a layer's inputs and the columns at its output, or the gradients they make.

    Gradients are kept where that takes no more memory: products with them are far cheaper.

    Args:
        chunk: The chunk that is swept.
        layer: The layer.
        weight: Its weight.
    """

    def __init__(self, chunk: Chunk, layer: Layer, weight: Tensor) -> None:
        self._chunk, self._layer, self._weight = chunk, layer, weight
        self._columns: list[Tensor] = []  # (n, c, folds, ...)
        self._factors: list[Tensor] = []  # (n, c)

    def open(self, inputs: Tensor, outputs: Tensor, choice: Choice | None = None) -> None:
        """Take what goes in and what comes out, without bias.

        Args:
            inputs: What goes in (n, folds, ...).
            outputs: What comes out (n, folds, ...).
            choice: Which units of a linear layer these are, where some are left out.
        """
        self._inputs, self._outputs, self._choice = inputs, outputs, choice or Choice()

    def hear(self, column: Tensor) -> None:
        """Keep a column at the output (n, folds, ...)."""
        factor = self._chunk.factor
        factor = column.new_ones(len(column)) if factor is None else factor
        self._columns.append(column[:, None])
        self._factors.append(factor[:, None])

    def put(self, columns: Tensor, samples: slice, factors: Tensor | None) -> None:
        """Keep several columns of some samples; blocks of samples come one after the other.

        Args:
            columns: The columns (samples, c, folds, ...).
            samples: Which samples.
            factors: The weights of the columns for all samples (c, n); None if all are one.
        """
        if samples.start == 0:
            count, (_, many, *shape) = len(self._outputs), columns.shape
            self._columns.append(columns.new_empty(count, many, *shape))
            ones = columns.new_ones(count, many)
            self._factors.append(ones if factors is None else factors.T)
        self._columns[-1][samples] = columns

    def kept(self) -> Kept:
        """What was kept of this chunk."""
        if not self._columns:  # The output does not depend on the layer here.
            self._columns.append(torch.zeros_like(self._outputs)[:, None])
            self._factors.append(self._outputs.new_zeros(len(self._outputs), 1))
        columns = torch.cat(self._columns, dim=1)  # (n, c, folds, ...)
        factors = torch.cat(self._factors, dim=1)
        if keeps_gradients(self._layer, self._outputs[0].numel()):
            gradients = SampleGradients(self._chunk, self._layer, self._weight, "kept")
            gradients.see(self._inputs)
            found = gradients.by(columns).transpose(1, 2)  # (n, c, groups, ...)
            return Kept(None, self._layer.original(found).flatten(2), factors)
        return Kept(self._inputs, columns, factors, self._choice)


@dataclass(frozen=True)
class Kept:
    """One chunk of what a block's products are made of.

    Attributes:
        inputs: The layer's inputs (n, folds, ...); None if gradients are kept.
        columns: Columns at its output (n, c, folds, ...), or gradients (n, c, weights).
        factors: The columns' weights (n, c).
        choice: Which units of a linear layer these are, where some are left out.
    """

    inputs: Tensor | None
    columns: Tensor
    factors: Tensor
    choice: Choice = field(default_factory=Choice)


def keeps_gradients(layer: Layer, outputs: int) -> bool:
    """Whether gradients take no more memory than columns at the output.

    Args:
        layer: The layer.
        outputs: How many numbers it gives for one sample.

    Returns:
        Whether they do.
    """
    units = layer.shape[layer.out_axis] * (layer.groups if layer.kind == "transposed" else 1)
    weights = torch.Size(layer.shape).numel()
    return outputs > units and weights <= 2 * outputs


class LayerBlock(Operator):
    """The block of one layer, from what was kept of every chunk.

    Args:
        layer: The layer.
        kept: What was kept.
        counts: The share of every sample here in the denominator of the loss (n,).
        surface: The surface it belongs to.
    """

    def __init__(
        self, layer: Layer, kept: list[Kept], counts: Tensor, surface: LossSurface
    ) -> None:
        size = torch.Size(layer.shape).numel()
        super().__init__(size, surface.dtype, surface.device)
        self._layer, self._kept, self._counts = layer, kept, counts
        self._decay, self._processes = surface.weight_decay, surface.processes
        self._count = self._processes.sum("counts", lambda: float(counts.sum()))

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(self.shape[0], -1).T
        products = self._processes.attempt(
            "a product with a layer's block",
            lambda: torch.stack([self._product(column) for column in columns], dim=1),
            same=[vectors],
        )
        sums = self._processes.total(products).to(vectors.dtype)
        return sums.reshape(vectors.shape) / self._count + self._decay * vectors

    def shares(self, vector: Tensor) -> Tensor:
        """Every sample's share in vᵀ H v of a unit vector (N,): their mean is the form."""
        parts = []
        for kept in self._kept:
            forms = self._forms(kept, vector)
            parts.append((forms.square() * kept.factors).sum(1, dtype=torch.float64))
        own = {"forms": rows_of(parts, self.device), "counts": self._counts}
        rows = self._processes.joined(own, self.device)
        return as_shares(rows["forms"], rows["counts"]) + self._decay

    def _product(self, vector: Tensor) -> Tensor:
        total = torch.zeros_like(vector)
        for kept in self._kept:
            if kept.inputs is None:
                forms = self._forms(kept, vector) * kept.factors
                total += kept.columns.flatten(0, 1).T @ forms.flatten()
            else:
                total += self._by_contraction(kept, vector)
        return total

    def _forms(self, kept: Kept, vector: Tensor) -> Tensor:
        """Every column's derivative along a vector (n, c)."""
        if kept.inputs is None:
            return (kept.columns.flatten(0, 1) @ vector).view_as(kept.factors)
        weight = self._taken(kept, vector)
        images = self._layer.contract(kept.inputs.flatten(0, 1), weight)
        rows = images.reshape(len(kept.factors), -1, 1)
        return (kept.columns.flatten(2) @ rows)[..., 0]

    def _by_contraction(self, kept: Kept, vector: Tensor) -> Tensor:
        """Run the layer with the vector as its weight, and differentiate by it."""
        assert kept.inputs is not None
        with torch.enable_grad():
            weight = self._taken(kept, vector).detach().requires_grad_()
            images = self._layer.contract(kept.inputs.flatten(0, 1), weight)
        rows = images.detach().reshape(len(kept.factors), -1, 1)
        columns = kept.columns.flatten(2)
        forms = (columns @ rows)[..., 0] * kept.factors
        mixed = (forms[:, None] @ columns).reshape(images.shape)
        (found,) = torch.autograd.grad(images, weight, mixed)
        return self._turned(kept.choice).spread(found, self._layer.shape).flatten()

    def _taken(self, kept: Kept, vector: Tensor) -> Tensor:
        """A vector as a weight, of the units that were kept."""
        return self._turned(kept.choice).taken(vector.view(self._layer.shape))

    def _turned(self, choice: Choice) -> Choice:
        """Output and input units, as rows and columns of the parameter."""
        return choice if self._layer.out_axis == 0 else Choice(choice.columns, choice.rows)


class SubBlock(Operator):
    """The Hessian's block of some parameters, by products with the whole Hessian.

    Args:
        surface: The surface.
        names: The parameters.
    """

    def __init__(self, surface: LossSurface, names: tuple[str, ...]) -> None:
        shapes = {name: value.shape for name, value in surface.params.items()}
        size = sum(shapes[name].numel() for name in names)
        super().__init__(size, surface.dtype, surface.device)
        self._surface, self._names, self._shapes = surface, names, shapes

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(self.shape[0], -1)
        sizes = [self._shapes[name].numel() for name in self._names]
        parts = dict(zip(self._names, columns.split(sizes), strict=True))
        whole = torch.cat(
            [
                parts.get(name, columns.new_zeros(shape.numel(), columns.shape[1]))
                for name, shape in self._shapes.items()
            ]
        )
        product = self._surface.split(self._surface.hvp(whole))
        found = [product[name].reshape(-1, columns.shape[1]) for name in self._names]
        return torch.cat(found).reshape(vectors.shape)
