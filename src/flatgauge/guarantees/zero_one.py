"""The 0-1 loss of a surface's model, sample by sample, at any weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatgauge.curvature.surrogate import under_surrogate
from flatgauge.isolation import isolated
from flatgauge.label_losses import IGNORED
from flatgauge.loss import prediction
from flatgauge.surface import LossSurface

#: The surrogate loss of normalized sharpness.
NORMALIZED = "normalized_cross_entropy"


class ZeroOne:
    """The 0-1 loss on the samples of a surface.

    A sample is wrong unless the output of its label is larger than every other: ties are wrong,
    and so are outputs that are no numbers.

    Attributes:
        samples: The number of samples with a label.
        classes: The number of classes.
    """

    def __init__(self, surface: LossSurface, data: LossSurface | None = None) -> None:
        """See whether model and data have a 0-1 loss.

        Args:
            surface: Whose model is asked.
            data: Whose samples; None for its own.

        Raises:
            ValueError: If outputs and targets are no classes and labels.
        """
        self._surface = surface
        self._data = data or surface
        loss = self._data.objective.loss
        self._ignored = IGNORED if loss.ignored is None else loss.ignored
        few, subject = self._data.objective.few(), surface.subject
        with isolated(surface.model, surface.device), torch.no_grad():
            outputs = prediction(subject(subject.leaves, subject.place(few), with_labels=False))
        self.classes = _classes(outputs, few.target)
        # Under a loss that counts every label once, whatever weights the surface's own has.
        self._objective = under_surrogate(self._data, NORMALIZED).objective
        self.samples = len(self.wrong(subject.leaves))

    def wrong(self, leaves: Sequence[Tensor]) -> Tensor:
        """Which samples are classified wrongly.

        Args:
            leaves: Values of the trainable parameters, in the order of `surface.names`.

        Returns:
            One truth value per sample with a label, on the CPU.
        """
        surface, subject, chunk = self._surface, self._surface.subject, self._data.chunk

        def judge() -> Tensor:
            found = [torch.zeros(0, dtype=torch.bool)]
            for batch in self._objective.chunks(chunk):
                placed = subject.place(batch)
                outputs = prediction(subject(leaves, placed, with_labels=False))
                found.append(self._judged(outputs, placed.target).cpu())
            return torch.cat(found)

        with isolated(surface.model, surface.device), torch.no_grad():
            same = subject.and_state(leaves)
            return torch.cat(self._data.processes.collected("the 0-1 loss", judge, same=same))

    def _judged(self, outputs: Tensor, target: Any) -> Tensor:
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
