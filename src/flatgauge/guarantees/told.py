"""What a model holds beside noisy weights, and what telling it outright costs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from flatgauge.curvature.sweep import sweeper_of
from flatgauge.surface import LossSurface

#: What may be made of frozen parameters: told, or given before the data were seen.
FROZEN = ("told", "given")


@dataclass(frozen=True)
class Told:
    """Numbers that a bound names one by one.

    Attributes:
        numbers: How many.
        bits: What they take: every number the bits of its dtype.
        note: Which they are.
    """

    numbers: int
    bits: int
    note: str


def told_outright(surface: LossSurface, noisy: Collection[str], frozen: str) -> Told:
    """Count what the model reads beside parameters under noise.

    The prior is uniform over all numbers of the dtype, so that each costs its bits.

    Args:
        surface: The surface.
        noisy: The parameters that have noise, and are not told.
        frozen: ``"told"``, or ``"given"`` where frozen parameters and what they are stored with
            were fixed before the data were seen.

    Returns:
        What has to be told.
    """
    graph = sweeper_of(surface).plan.graph
    read = {name for node, name in graph.held.items() if node.users}
    trained = set(surface.names)
    counts = {"trained parameters": (0, 0), "frozen parameters": (0, 0), "stored numbers": (0, 0)}

    def add(kind: str, tensor: torch.Tensor) -> None:
        numbers, bits = counts[kind]
        counts[kind] = (
            numbers + tensor.numel(),
            bits + tensor.numel() * 8 * tensor.element_size(),
        )

    for name, parameter in surface.model.named_parameters():
        if name in read and name not in noisy and (name in trained or frozen == "told"):
            add("trained parameters" if name in trained else "frozen parameters", parameter)
    stored = {name for node, name in graph.buffers.items() if node.users}
    for name, buffer in surface.model.named_buffers():
        if name in stored and buffer.is_floating_point():
            add("stored numbers", buffer)
    words = [f"{numbers} {kind}" for kind, (numbers, _) in counts.items() if numbers]
    note = " and ".join(words) or "nothing"
    if frozen == "given":
        note += "; frozen parameters count as given before the data were seen (`frozen='given'`)"
    numbers, bits = (sum(pair[k] for pair in counts.values()) for k in (0, 1))
    return Told(numbers, bits, note)
