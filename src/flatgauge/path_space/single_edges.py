"""What single weights of a layer contribute to its output, each by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatgauge.layers import Layer
from flatgauge.nodes import arguments_of


@dataclass(frozen=True)
class SingleEdges:
    """Some weights (or biases) that one op reads.

    Attributes:
        layer: The layer whose weights they are; None for biases.
        weights: Their values (edges,).
        rows: The output units that they enter.
        columns: The input units that they leave; empty for biases.
        taps: Where in the kernel they stand; empty for biases.
        targets: What each belongs to.
        axis: The axis of the op's output along which units lie.
    """

    layer: Layer | None
    weights: Tensor
    rows: Tensor
    columns: Tensor
    taps: Tensor
    targets: Tensor
    axis: int

    def contributions(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """What every edge adds to its output unit, laid out like the output, one slice per edge.

        Args:
            inputs: What the op reads.
            outputs: What it gives.

        Returns:
            The contributions: the output's shape, with edges in the place of units.
        """
        weights = self.weights.to(outputs)
        if self.layer is None:
            shape = list(outputs.shape)
            shape[self.axis] = len(weights)
            turned = [1] * outputs.dim()
            turned[self.axis] = -1
            return weights.reshape(turned).expand(shape)
        if self.layer.kind == "linear":
            return inputs[..., self.columns] * weights
        kernel = tuple(self.layer.shape[2:])
        kernels = weights.new_zeros(len(weights), 1, *kernel)
        kernels.flatten(1)[torch.arange(len(weights)), self.taps] = weights
        node = self.layer.node
        given = arguments_of(node) | {
            "input": inputs[:, self.columns],
            "weight": kernels,
            "bias": None,
            "groups": len(weights),
        }
        found: Tensor = node.target(*given.values())  # type: ignore[operator]
        return found

    def added(self, outputs: Tensor, contributions: Tensor, factors: Tensor) -> Tensor:
        """Add every edge's contribution once more, times a factor for each sample.

        Args:
            outputs: What the op gives.
            contributions: Of the edges.
            factors: For every sample and edge (n, edges).

        Returns:
            The outputs.
        """
        scaled = contributions * self._spread(factors, outputs)
        return outputs.index_add(self.axis, self.rows, scaled)

    def products(self, contributions: Tensor, cotangents: Tensor) -> Tensor:
        """Every edge's contribution times what is passed back to its output unit, summed.

        Args:
            contributions: Of the edges.
            cotangents: Laid out like the output.

        Returns:
            One number per edge, summed over samples and positions, in double precision.
        """
        each = contributions * cotangents.index_select(self.axis, self.rows)
        return each.movedim(self.axis, 0).flatten(1).sum(1, dtype=torch.float64)

    def _spread(self, factors: Tensor, like: Tensor) -> Tensor:
        """Factors (n, edges), laid out to be multiplied with contributions."""
        shape = [1] * like.dim()
        shape[0], shape[self.axis] = len(factors), factors.shape[1]
        return factors.reshape(shape)
