"""Whether all samples fit into one graph, as some tools want them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from flatgauge.cli.benchmarks.tool import Tool
from flatgauge.runtime.resources import available_bytes, format_bytes

if TYPE_CHECKING:
    from flatgauge.cli.benchmarks.comparison import TimedComparison


def fits(comparison: TimedComparison, tool: Tool) -> bool:
    """Whether all samples fit into one graph: told, if not.

    Args:
        comparison: The tools on a workload.
        tool: One that takes all samples as one batch.

    Returns:
        Whether they do.
    """
    surface = comparison.surface()
    few = comparison.workload.batches(20)[0]
    needed = surface.samples / len(few[0]) * _graph_bytes(comparison, few)
    free = available_bytes(surface.device)
    if needed > free / 2:
        comparison.tell(
            f"skipping {tool.name} on {comparison.workload.name}: one graph of all samples takes "
            f"about {format_bytes(needed)}, and {format_bytes(free)} are free"
        )
    return needed <= free / 2


def _graph_bytes(comparison: TimedComparison, batch: tuple[Tensor, Tensor]) -> float:
    """What a graph that can be differentiated twice keeps of a batch, roughly."""
    params = {param.data_ptr() for param in comparison.workload.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in params:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(comparison.workload.model(batch[0]), batch[1])
    del loss
    return 4.0 * sum(kept.values())  # Activations and gradients, kept and in use.
