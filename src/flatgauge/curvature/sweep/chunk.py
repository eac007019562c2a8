"""One chunk of samples on its way through the sweep: watched forwards, differentiated backwards.

What enters: while the graph runs forward, op handlers call `watch` with a tensor and with what is
to receive its gradients. Then come factor vectors u at the logits f, each with a weight per sample.
What leaves: every receiver is called with the gradient of ⟨u, f⟩ by its tensor, and the weights;
most receivers are accumulators, whose sums `take` collects by parameter.

How it works: `watch` puts a hook on the tensor, and `backward` differentiates once per factor
vector; a gradient is used while it is in the cache, and freed before the next. Hooks refer to
receivers, and receivers never to the chunk, so that a graph goes with its chunk. If the model ends
in a perceptron, `MLPHead` passes vectors back through that part without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flatgauge.curvature.sweep.accumulate import Accumulator, ChunkContext, SampleParts
    from flatgauge.curvature.sweep.sample_gradients import FactorRecorder
    from flatgauge.surface.loss_hessian import Factor


#: Called with a gradient (shaped like the tensor) and the factor vector's weights (n,) or None.
Receiver = Callable[[Tensor, Tensor | None], None]

#: A tensor of the graph, a factor vector there, and its weights (n,) or None.
Start = tuple[Tensor, Tensor, Tensor | None]


class Head(Protocol):
    """The end of the model, if it passes factor vectors back by itself."""

    def backward(self, factors: Iterable[Factor]) -> Iterator[Start]:
        """Pass factor vectors from the logits back to where the graph begins."""


@dataclass
class _FactorWeights:
    """The weights of the factor vector on its way; hooks refer to them, not to the chunk."""

    current: Tensor | None = None


class SweepChunk:
    """One chunk of samples, run forward once and differentiated for every factor vector.

    Attributes:
        recorders: By layer, what records factors for products with its block.
        head: What passes vectors back through the last layers, if they need no graph.
        counts: What every sample adds to the denominator of the loss (n,).
        left_out: Samples that would count, but whose outputs have no loss.
        factors: The factors of the loss's Hessian that are passed back as they are.
        random_factors: Random combinations of the others.
    """

    logits: Tensor
    counts: Tensor
    left_out: int
    factors: Iterator[Factor]
    random_factors: Iterator[Factor]

    def __init__(self, context: ChunkContext) -> None:
        self.context = context
        self.accumulators: dict[str, Accumulator] = {}
        self.recorders: dict[str, FactorRecorder] = {}
        self.head: Head | None = None
        self._leaves: list[Tensor] = []  # Where differentiation stops.
        self._weights = _FactorWeights()

    def watch(self, tensor: Tensor, receive: Receiver) -> Tensor:
        """Hand every gradient by a tensor to a receiver; go on with what is returned."""
        if not tensor.requires_grad:  # Nothing in front of it is watched.
            tensor = tensor.detach().requires_grad_()
            self._leaves.append(tensor)
        weights = self._weights
        tensor.register_hook(lambda gradient: receive(gradient, weights.current))
        return tensor

    def backward(self, factors: Iterable[Factor]) -> None:
        """Pass factor vectors back through the model."""
        for start, vector, weights in self._starts(factors):
            self._weights.current = None if weights is None else weights.to(start)
            torch.autograd.grad(start, self._leaves, vector, retain_graph=True, allow_unused=True)

    def take(self) -> dict[str, SampleParts]:
        """What the factor vectors since the last call have added, by parameter."""
        return {name: each.take() for name, each in self.accumulators.items()}

    def release(self) -> None:
        """Free the graph and all sums, though the caller may still hold the chunk."""
        self._leaves.clear()
        self.accumulators, self.recorders, self.head = {}, {}, None
        del self.logits, self.factors, self.random_factors

    def _starts(self, factors: Iterable[Factor]) -> Iterator[Start]:
        """Where differentiation begins for every factor vector."""
        if self.head is not None:
            yield from self.head.backward(factors)
        elif self.logits.requires_grad:
            for values, weights in factors:
                yield self.logits, values.to(self.logits), weights
