"""Samples that tell what a mean is taken over: every label, and the longest and the shortest."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from flatgauge.batch import Batch, join
from flatgauge.batches import Batches
from flatgauge.label_losses import IGNORED
from flatgauge.nested import signature

#: Samples that are looked at where labels tell nothing.
_FEW = 8

#: Samples chosen for a label that no other has shown.
_MOST = 16


def labels_of(batch: Batch) -> Tensor | None:
    """The integer labels of every sample (N, labels per sample), if the target is that."""
    target = batch.target
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        return None
    if target.dim() == 0 or len(target) != batch.samples:
        return None
    return target.detach().cpu().reshape(batch.samples, -1)


def distinct(labels: Tensor) -> set[int]:
    """The values that occur, in little memory: masks of images have many labels."""
    found: set[int] = set()
    for block in torch.split(labels.reshape(-1), 2**20):
        values = block.long()
        low = int(values.min())
        if int(values.max()) - low < 2**16:  # Faster than sorting, which `unique` does.
            found |= {low + i for i in torch.bincount(values - low).nonzero().flatten().tolist()}
        else:
            found |= set(values.tolist())
    return found


def kept(labels: Tensor) -> Tensor:
    """How many labels of each sample are not ignored."""
    if labels.dtype is torch.uint8:  # Compared with -100, torch takes 156 for it.
        labels = labels.short()
    return (labels != IGNORED).reshape(len(labels), -1).sum(1).double()


def kind_of(batch: Batch) -> Hashable:
    """What batches have in common that can be joined."""
    kind: Hashable = signature((batch.inputs, batch.target))
    return kind


class Choice:
    """Samples of one kind, chosen while the data pass by.

    Attributes:
        seen: The labels that the chosen samples show.
    """

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self._rows: list[Batch] = []
        self._extremes: dict[str, tuple[float, Batch]] = {}

    def look(self, batch: Batch) -> None:
        """Take from a batch what has not been seen before."""
        labels, taken = labels_of(batch), set[int]()
        if labels is not None and labels.numel():
            taken = self._take_labels(batch, labels)
            counts = kept(labels)
            self._take_extreme("fewest", batch, -counts)
            self._take_extreme("most", batch, counts)
        missing = min(_FEW - len(self._rows), batch.samples)
        if missing > 0:
            step = (batch.samples - 1) / max(missing - 1, 1)
            spread = {round(i * step) for i in range(missing)} - taken
            self._rows += [batch.rows([i]).copy() for i in sorted(spread)]

    def variety(self) -> tuple[float, int, int]:
        """How much the samples differ in what a mean could be taken over."""
        sizes = {name: size for name, (size, _) in self._extremes.items()}
        most = sizes.get("most", 1.0)
        spread = (most + sizes.get("fewest", -most)) / most if most else -1.0
        return spread, len(self.seen), len(self._rows)

    def samples(self) -> Batch:
        """The chosen samples."""
        differ = sum(size for size, _ in self._extremes.values()) != 0
        return join(self._rows + [row for _, row in self._extremes.values() if differ])

    def _take_labels(self, batch: Batch, labels: Tensor) -> set[int]:
        taken = set()
        for label in sorted(distinct(labels)):
            if label in self.seen or len(self._rows) >= _MOST:
                continue
            index = int((labels == label).any(1).nonzero()[0])
            self._rows.append(batch.rows([index]).copy())
            self.seen |= distinct(labels[index])
            taken.add(index)
        return taken

    def _take_extreme(self, name: str, batch: Batch, sizes: Tensor) -> None:
        index = int(sizes.argmax())
        before = self._extremes.get(name)
        if before is None or float(sizes[index]) > before[0]:
            self._extremes[name] = float(sizes[index]), batch.rows([index]).copy()


def telling_samples(batches: Batches) -> Choice | None:
    """Choose the samples of one kind that differ most; None if no batch can be split."""
    processes = batches.processes
    own = processes.attempt("telling samples", lambda: _chosen(batches.chunks(256)))
    if processes.size == 1:
        return own
    found = processes.gathered(None if own is None else own.samples())
    return _chosen(batch for batch in found if batch is not None)


def _chosen(batches: Iterable[Batch]) -> Choice | None:
    """Look at batches, kind by kind."""
    choices: dict[Hashable, Choice] = {}
    for batch in batches:
        if batch.splittable:
            choices.setdefault(kind_of(batch), Choice()).look(batch)
    return max(choices.values(), key=Choice.variety, default=None)


def all_shown(batch: Batch, choice: Choice) -> bool:
    """Whether a batch has only labels that the chosen samples show."""
    labels = labels_of(batch)
    return labels is not None and distinct(labels) <= choice.seen


def twice(batch: Batch) -> Batch:
    """A lone sample beside itself, so that a sum is told from a mean."""
    return batch if batch.samples > 1 else batch.rows([0, 0])
