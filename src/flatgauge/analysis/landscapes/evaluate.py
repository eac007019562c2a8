"""Loss and accuracy at many points: each batch of the data is read once for a group of them.

Flat vectors of parameters enter an `Evaluator`; for small models one call of the model evaluates
a stack of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatgauge.runtime.distributed import SHARDED
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.data import IGNORED, Batch, tensors
from flatgauge.surface.losses import prediction
from flatgauge.surface.surface import LossSurface

#: Points are stacked where one of them is less work on a chunk than this (weights and activations,
#: times samples): there, calling the model costs more than what it computes. Measured.
_SMALL_WORK = 2**21

#: The most work in a stack, and in a pass over data in memory: that takes seconds.
_STACKED_WORK, _PASS_WORK = 2**25, 2**32

#: Most points in a stack, and most that share a pass.
_MOST_STACKED, _MOST = 64, 64

#: Points that share a pass over data that must be read again each time.
_STREAMED = 16


@dataclass
class _Sums:
    """What has been added up for one point."""

    loss: float = 0.0
    right: float = 0.0


@dataclass(frozen=True)
class Evaluated:
    """Loss and accuracy at some points.

    Attributes:
        loss: The mean loss at every point; infinite where it is not a number.
        accuracy: The share of labels that have the largest output; None without classes.
    """

    loss: list[float]
    accuracy: list[float] | None = field(default=None)


class Evaluator:
    """Evaluates a surface at many points.

    Points of one group share a pass: each chunk of the data is loaded and placed once. For small
    models the points are evaluated in stacks, with one call of the model (`torch.func.vmap`).
    How many go together follows from the sizes of model, data and memory budget, never from
    timing; it changes results by rounding only. A model that cannot be stacked is called point by
    point, which gives what `LossSurface.value` does, to the last bit.

    Attributes:
        stack: How many points one call of the model evaluates.
        group: How many points share a pass over the data.
        classes: Whether outputs and targets are classes and labels, so that there is an accuracy.
    """

    def __init__(self, surface: LossSurface, stack: int | None = None) -> None:
        if surface.functional_model.sharded:
            raise ValueError(SHARDED)
        self._surface, self._risk = surface, surface.risk
        ignored = self._risk.loss.ignored
        self._ignored = IGNORED if ignored is None else ignored
        self._few = self._risk.few()
        with isolate(surface.model, surface.device), torch.no_grad():
            trial = self._few.copy()
            before = _versions(trial)
            _, output = self._risk.total_and_output(surface.functional_model.leaves, trial)
        self._writes = _versions(trial) != before  # Some models write to their inputs.
        self.classes = _has_classes(output, trial.target)
        chosen = min(self._stackable(), stack or _MOST_STACKED)
        stacks = surface.processes.gather("a stack", lambda: chosen > 1 and self._stacks())
        self.stack = chosen if all(stacks) else 1
        self.group = self._points_per_pass()

    def __call__(self, points: Sequence[Tensor], *, alone: bool = False) -> Evaluated:
        """Evaluate flat vectors (p,) in one pass; with `alone`, each by a call of its own."""
        surface = self._surface
        with isolate(surface.model, surface.device), torch.no_grad():
            leaves = [self._leaves(point) for point in points]
            stacks = list(self._stack_points(leaves, 1 if alone else self.stack))
            size = surface.chunk

            def add() -> tuple[list[_Sums], int]:
                sums, labels = [_Sums() for _ in points], 0
                for chunk in self._risk.chunks(size):
                    labels += self._labels(chunk.target)
                    for start, stack in stacks:
                        totals, right = self._evaluate_chunk(stack, chunk, first=start == 0)
                        judged = zip(totals, right, strict=True)
                        for place, (total, hits) in enumerate(judged, start):
                            if place < len(sums):
                                sums[place].loss += total
                                sums[place].right += hits
                return sums, labels

            same = surface.functional_model.with_state(points)
            every = surface.processes.gather("losses at points", add, same=same)
        labels = sum(known for _, known in every)
        sums = [
            _total_over_processes(parts)
            for parts in zip(*(known for known, _ in every), strict=True)
        ]
        count = self._risk.count
        losses = [
            one.loss / count + surface.penalty(leaf) for one, leaf in zip(sums, leaves, strict=True)
        ]
        accuracy = [one.right / labels for one in sums] if self.classes and labels else None
        return Evaluated([math.inf if math.isnan(loss) else loss for loss in losses], accuracy)

    def _leaves(self, point: Tensor) -> list[Tensor]:
        """The parameters' values at a point, in their order."""
        moved = point.detach().to(self._surface.device, self._surface.dtype)
        return list(self._surface.split(moved).values())

    @staticmethod
    def _stack_points(leaves: list[list[Tensor]], size: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Points joined into stacks of a size, with the place of the first."""
        for start in range(0, len(leaves), size):
            some = leaves[start : start + size]
            # A stack is filled up, so that a point's result does not depend on who comes with it.
            full = some + [some[-1]] * (size - len(some))
            yield start, [torch.stack(parts) for parts in zip(*full, strict=True)]

    def _evaluate_chunk(
        self, stack: list[Tensor], chunk: Batch, *, first: bool
    ) -> tuple[list[float], list[float]]:
        """Loss and right labels of a chunk, summed, for every point of a stack."""
        # Whether targets fit the outputs is looked at once per chunk.
        if len(stack[0]) > 1:
            totals, right = self._together(stack, chunk, check=first)
        else:
            totals, right = (
                one[None] for one in self._alone([part[0] for part in stack], chunk, check=first)
            )
        return totals.double().tolist(), right.double().tolist()

    def _alone(
        self, leaves: Sequence[Tensor], chunk: Batch, *, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Loss and right labels of a chunk, summed, at one point."""
        own = chunk.copy() if self._writes else chunk  # The next point must find it as it was.
        total, output = self._risk.total_and_output(leaves, own, check=check)
        return total, self._right(output, chunk.target) if self.classes else torch.zeros_like(total)

    def _together(
        self, stack: list[Tensor], chunk: Batch, *, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Loss and right labels of a chunk, summed, at all points of a stack."""

        def one(*leaves: Tensor) -> tuple[Tensor, Tensor]:
            return self._alone(leaves, chunk, check=check)

        totals, right = torch.func.vmap(one)(*stack)
        return totals, right

    def _right(self, output: Any, target: Tensor) -> Tensor:
        """How many labels have the largest output; an output that is not a number is wrong."""
        labels = target.long()
        best = prediction(output).max(1)
        hits = (best.indices == labels) & (labels != self._ignored) & ~best.values.isnan()
        return hits.sum()

    def _labels(self, target: Any) -> int:
        """How many labels there are that count."""
        return int((target.long() != self._ignored).sum()) if self.classes else 0

    def _work(self, samples: int) -> float:
        """Roughly, what one point costs on some samples."""
        surface = self._surface
        each = self._risk.graph_bytes(1) - self._risk.graph_bytes(0)
        return samples * (surface.size + each / self._itemsize)

    @property
    def _itemsize(self) -> int:
        return torch.empty(0, dtype=self._surface.dtype).element_size()

    def _stackable(self) -> int:
        """How many points to stack, by what they cost: a power of two."""
        surface = self._surface
        with isolate(surface.model, surface.device):
            samples = min(surface.chunk, surface.samples)
            each = surface.size * self._itemsize + self._risk.graph_bytes(samples)
            work = self._work(samples)
        if work > _SMALL_WORK:
            return 1
        fitting = max(min(_STACKED_WORK / work, surface.memory / 4 / each), 1.0)
        return min(_MOST_STACKED, 1 << int(math.log2(fitting)))

    def _points_per_pass(self) -> int:
        """How many points share a pass: whole stacks."""
        surface = self._surface
        with isolate(surface.model, surface.device):
            work = _PASS_WORK / self._work(surface.samples)
        wanted = min(work, _MOST) if surface.data.stored_everywhere else _STREAMED
        fitting = surface.memory / 4 / (surface.size * self._itemsize)
        return self.stack * max(1, int(min(wanted, fitting) / self.stack))

    def _stacks(self) -> bool:
        """Try out whether the model can be called on a stack of points."""
        surface, few = self._surface, self._few
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in surface.model.modules())
        if self._writes or hooked:  # Hooks would be handed stacks, and may keep them.
            return False
        leaves = surface.functional_model.leaves
        with isolate(surface.model, surface.device), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")  # What is not supported may be slow, with a warning.
            one, right = self._alone(leaves, few)
            try:
                both = self._together([torch.stack([leaf, 0.5 * leaf]) for leaf in leaves], few)
            except Exception:
                return False
        close = torch.isclose(both[0][0], one, rtol=1e-4, atol=1e-6)
        return bool(close) and float(both[1][0]) == float(right)


def _total_over_processes(parts: Sequence[_Sums]) -> _Sums:
    """What all processes have added up for one point."""
    total = _Sums()
    for part in parts:
        total.loss += part.loss
        total.right += part.right
    return total


def _versions(batch: Batch) -> list[int]:
    """How often the tensors of a batch have been written to."""
    return [tensor._version for tensor in tensors((batch.inputs, batch.target))]


def _has_classes(output: Any, target: Any) -> bool:
    """Whether targets are labels (N,) and outputs (N, classes)."""
    if not isinstance(target, Tensor) or target.dim() != 1 or target.dtype is torch.bool:
        return False
    if target.is_floating_point() or target.is_complex():
        return False
    try:
        guess = prediction(output)
    except TypeError:  # A loss of the user's own takes it apart.
        return False
    return guess.dim() == 2 and len(guess) == len(target) and guess.shape[1] > 1
