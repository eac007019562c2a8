"""The 0-1 loss of a surface's model, sample by sample, at any weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatgauge.curvature.block_diagonal import with_surrogate
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.data import IGNORED
from flatgauge.surface.losses import prediction
from flatgauge.surface.surface import LossSurface

#: The surrogate loss of normalized sharpness.
NORMALIZED = "normalized_cross_entropy"


class ZeroOne:
    """The 0-1 loss on the samples of a surface, of its model at any weights.

    A sample is wrong unless the output of its label is larger than every other: ties are wrong,
    and so are outputs that are not numbers. `samples` counts those with a label.
    """

    def __init__(self, surface: LossSurface, data: LossSurface | None = None) -> None:
        """Read classes and labels from the model and the samples of `data`; None: its own."""
        self._surface = surface
        self._data = data or surface
        loss = self._data.risk.loss
        self._ignored = IGNORED if loss.ignored is None else loss.ignored
        few, subject = self._data.risk.few(), surface.functional_model
        with isolate(surface.model, surface.device), torch.no_grad():
            outputs = prediction(subject(subject.leaves, subject.place(few), with_labels=False))
        self.classes = _classes(outputs, few.target)
        # Under a loss that counts every label once, whatever weights the surface's own has.
        self._risk = with_surrogate(self._data, NORMALIZED).risk
        self.samples = len(self.wrong(subject.leaves))

    def wrong(self, leaves: Sequence[Tensor]) -> Tensor:
        """Which samples with a label the network with these parameters classifies wrongly."""
        surface, subject, chunk = self._surface, self._surface.functional_model, self._data.chunk

        def judge() -> Tensor:
            found = [torch.zeros(0, dtype=torch.bool)]
            for batch in self._risk.chunks(chunk):
                placed = subject.place(batch)
                outputs = prediction(subject(leaves, placed, with_labels=False))
                found.append(self._wrong_samples(outputs, placed.target).cpu())
            return torch.cat(found)

        with isolate(surface.model, surface.device), torch.no_grad():
            same = subject.with_state(leaves)
            return torch.cat(self._data.processes.gather("the 0-1 loss", judge, same=same))

    def _wrong_samples(self, outputs: Tensor, target: Any) -> Tensor:
        """Which samples of a chunk are wrong."""
        _classes(outputs, target)
        labels = target.long()
        kept = labels != self._ignored
        outputs, labels = outputs[kept], labels[kept, None]
        own = outputs.gather(1, labels)
        others = outputs.scatter(1, labels, -torch.inf).max(1, keepdim=True).values
        return ~(own > others)[:, 0]


def _classes(outputs: Tensor, target: Any) -> int:
    """The number of classes, where outputs and targets are such."""
    shape = tuple(outputs.shape)
    labels = isinstance(target, Tensor) and not target.is_floating_point()
    if not labels or target.dtype is torch.bool:
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(
            f"a bound on the 0-1 loss needs class labels, but the targets are {kind} and the "
            f"outputs have shape {shape}; give integer labels (N,) and a model with one output "
            "per class. For regression there is no 0-1 loss to bound."
        )
    if outputs.dim() != 2 or outputs.shape[1] < 2 or target.shape != outputs.shape[:1]:
        raise ValueError(
            f"a bound on the 0-1 loss needs outputs (N, classes) for at least two classes and "
            f"labels (N,), one per independent sample, but the outputs have shape {shape} and the "
            f"labels {tuple(target.shape)}; give the model one output per class, and one label "
            "to a sample."
        )
    return outputs.shape[1]
