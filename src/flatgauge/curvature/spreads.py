"""How much the input units of layers vary over the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatgauge.curvature.sweep import Sweeper
from flatgauge.isolation import isolated
from flatgauge.layers import Layer
from flatgauge.nodes import call_op
from flatgauge.precision import wide

#: A unit that varies by less than this many units of rounding does not vary.
_ROUNDING = 32.0


class Moments:
    """Mean and spread of columns of numbers that come in pieces, in double precision.

    Every piece is centred by itself, and pieces are joined by the difference of their means: no
    difference of large sums, and factors of two pass through exactly.
    """

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = self._low = self._high = torch.zeros(())

    def add(self, rows: Tensor) -> None:
        """Add a piece (rows, columns)."""
        rows = wide(rows)
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

    def spread(self, rounding: float) -> Tensor:
        """The standard deviation of every column; its size where it varies by rounding only."""
        deviation = (self._squares / self._count).sqrt()
        size = torch.maximum(self._low.abs(), self._high.abs())
        return deviation.where(deviation > rounding * size, size)


def input_spreads(sweeper: Sweeper) -> dict[str, Tensor]:
    """Measure how much every input unit of every layer varies, in one pass over the data.

    Over samples and positions (pixels, tokens); samples that the loss leaves out do not count.

    Args:
        sweeper: The sweeper of a surface.

    Returns:
        By layer: the standard deviations of its input units (in,), in double precision; for a
        unit that never varies the size of its constant value, zero for one that is always zero.
        Layers whose weight is read more than once have no one input, and are left out; so are
        all, where the model treats the number of samples as a constant.
    """
    plan = sweeper.plan
    if not plan.graph.symbol:
        return {}
    names = [name for name in plan.layers if plan.times_read(name) == 1]

    def measured() -> dict[str, Tensor]:
        collected = sweeper.surface.processes.collected
        moments, *others = collected("inputs of layers", lambda: _read(sweeper, names))
        for name in names:
            for other in others:
                moments[name].join(other[name])
        rounding = _ROUNDING * torch.finfo(sweeper.surface.dtype).eps
        spreads = {name: found.spread(rounding) for name, found in moments.items()}
        if others:  # What was exchanged is on the CPU.
            spreads = {name: found.to(sweeper.surface.device) for name, found in spreads.items()}
        return spreads

    return sweeper.surface.recall(("input spreads", sweeper.loss.name), measured)


def _read(sweeper: Sweeper, names: list[str]) -> dict[str, Moments]:
    """Run all data through the graph, listening at the layers' inputs."""
    surface, moments = sweeper.surface, {name: Moments() for name in names}
    with isolated(surface.model, surface.device):
        for batch in surface.objective.chunks(sweeper.chunk):
            kept = sweeper.counts_of(batch).nonzero()[:, 0].tolist()
            batch = batch if len(kept) == batch.samples else batch.rows(kept)
            plan = sweeper.plan_for(batch)
            listeners = {
                layer.node: _listener(layer, moments[name])
                for name, layer in plan.layers.items()
                if name in moments
            }
            inputs = sweeper.inputs_of(batch)
            with torch.no_grad():
                plan.graph.run(surface.subject.state, inputs, listeners, plan.logits)
    return moments


def _listener(layer: Layer, moments: Moments) -> Callable[..., Any]:
    """Stands in for a layer's op, and adds what goes in to the moments."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        activation = arguments[layer.position]
        units = -1 if layer.kind == "linear" else 1
        moments.add(activation.movedim(units, -1).reshape(-1, activation.shape[units]))
        return call_op(layer.node, *arguments, **keywords)

    return run
