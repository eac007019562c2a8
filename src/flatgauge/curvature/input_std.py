"""Standard deviations of the input units of layers, over the data.

What enters: the sweep of a surface. What leaves: by layer, one number per input unit. How it works:
one pass over the data through the exported graph, with a handler at every layer that adds what goes
in to running moments (`Moments`), which are then joined across processes. Samples and positions
(pixels, tokens) count equally; samples that the loss leaves out do not count. Layers whose weight
is read more than once have no one input, and are left out; so are all layers where the model treats
the number of samples as a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatgauge.estimators.linalg import to_float64
from flatgauge.graph.layers import Layer
from flatgauge.graph.ops import call_op
from flatgauge.runtime.isolation import isolate

if TYPE_CHECKING:
    from flatgauge.curvature.sweep.backprop import Sweep

#: A unit that varies by less than this many units of rounding does not vary.
_ROUNDING = 32.0


class Moments:
    """Mean and standard deviation of numbers that come in pieces, by column, in double precision.

    Every piece is centred by itself, and pieces are joined by the difference of their means: no
    difference of large sums, and factors of two pass through exactly.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = self._low = self._high = torch.zeros(())

    def add(self, rows: Tensor) -> None:
        """Add a piece (rows, columns)."""
        rows = to_float64(rows)
        mean = rows.mean(0)
        self._add(len(rows), mean, (rows - mean).square().sum(0), *rows.aminmax(dim=0))

    def _add(self, count: int, mean: Tensor, squares: Tensor, low: Tensor, high: Tensor) -> None:
        if self._count:
            shift, together = mean - self._mean, self._count + count
            squares = self._squares + squares + shift.square() * (self._count * count / together)
            mean = self._mean + shift * (count / together)
            low, high = torch.minimum(low, self._low), torch.maximum(high, self._high)
        self._mean, self._squares, self._low, self._high = mean, squares, low, high
        self._count += count

    def join(self, other: Moments) -> None:
        """Add the pieces of another."""
        if other._count:
            self._add(other._count, other._mean, other._squares, other._low, other._high)

    def std(self, rounding: float) -> Tensor:
        """The standard deviation of every column; its size where it varies by rounding only."""
        deviation = (self._squares / self._count).sqrt()
        size = torch.maximum(self._low.abs(), self._high.abs())
        return deviation.where(deviation > rounding * size, size)


def input_std(sweep: Sweep) -> dict[str, Tensor]:
    """Standard deviations (in,) of every layer's input units; for a constant, its size."""
    plan = sweep.plan
    if not plan.graph.symbol:
        return {}
    names = [name for name in plan.layers if plan.times_read(name) == 1]

    def compute() -> dict[str, Tensor]:
        gather = sweep.surface.processes.gather
        moments, *others = gather("inputs of layers", lambda: _read_moments(sweep, names))
        for name in names:
            for other in others:
                moments[name].join(other[name])
        rounding = _ROUNDING * torch.finfo(sweep.surface.dtype).eps
        # What was exchanged between processes is on the CPU.
        device = sweep.surface.device
        return {name: found.std(rounding).to(device) for name, found in moments.items()}

    return sweep.surface.cache.get(("input_std", sweep.loss.name), compute)


def _read_moments(sweep: Sweep, names: list[str]) -> dict[str, Moments]:
    """Run all data through the graph, with the moments of the layers' inputs."""
    surface, moments = sweep.surface, {name: Moments() for name in names}
    with isolate(surface.model, surface.device):
        for batch in surface.risk.chunks(sweep.chunk_size):
            counted = sweep.counts_of(batch).nonzero()[:, 0].tolist()
            batch = batch if len(counted) == batch.samples else batch.rows(counted)
            plan = sweep.plan_for(batch)
            handlers = {
                layer.node: _layer_handler(layer, moments[name])
                for name, layer in plan.layers.items()
                if name in moments
            }
            inputs = sweep.inputs_of(batch)
            with torch.no_grad():
                plan.graph.run(surface.functional_model.state, inputs, handlers, plan.logits)
    return moments


def _layer_handler(layer: Layer, moments: Moments) -> Callable[..., Any]:
    """Computes a layer's op, and adds what goes in to the moments."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        activation = arguments[layer.position]
        units = -1 if layer.kind == "linear" else 1
        moments.add(activation.movedim(units, -1).reshape(-1, activation.shape[units]))
        return call_op(layer.node, *arguments, **keywords)

    return run
