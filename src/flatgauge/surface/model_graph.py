"""The exported graph of a surface's model.

A surface enters, a graph leaves: of the model in the surface's precision, with the number of
samples left open where the model allows that. Exporting takes seconds, so the surface keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils import _pytree as pytree

from flatgauge.graph.export import ExportedGraphs, ModelGraph, UnsupportedGraphError, in_precision
from flatgauge.runtime.isolation import isolate
from flatgauge.surface.arguments import SHARDED
from flatgauge.surface.batch import Batch, map_tensors
from flatgauge.surface.losses import prediction

if TYPE_CHECKING:
    from flatgauge.surface.surface import LossSurface

#: Samples of the example: neither one nor two, which the exporter would take for constants.
_SAMPLES = 3


def model_graph(surface: LossSurface) -> ModelGraph:
    """The graph of a surface's model, exported at the first call."""

    def attempt() -> ModelGraph | UnsupportedGraphError:
        try:
            return surface.processes.run(
                "the graph", lambda: graph_for(surface, surface.risk.few())
            )
        except UnsupportedGraphError as error:
            return error

    found = surface.cache.get(("model_graph",), attempt, static=True)
    if isinstance(found, UnsupportedGraphError):
        raise found
    return found


def graph_for(surface: LossSurface, batch: Batch) -> ModelGraph:
    """The graph for batches of one shape, exported once per shape, for this process alone."""
    if surface.functional_model.sharded:
        raise UnsupportedGraphError(SHARDED)
    own_loss = surface.risk.loss.own
    called = surface.functional_model.arguments(batch, with_labels=own_loss)
    leaves = pytree.tree_leaves(map_tensors(Tensor.detach, called))
    shapes = tuple(tuple(x.shape[1:]) if isinstance(x, Tensor) else x for x in leaves)
    key = ("graph_for", shapes, batch.splittable, own_loss)
    # It is the same under every loss.
    return surface.origin.cache.get(key, lambda: _export(surface, batch), static=True)


def _export(surface: LossSurface, batch: Batch) -> ModelGraph:
    """Export the model, called with an example cut from a batch."""
    subject = surface.functional_model
    example = batch.rows([0] * _SAMPLES) if batch.splittable else batch
    called = subject.arguments(example, with_labels=surface.risk.loss.own)
    arguments, keywords = map_tensors(Tensor.contiguous, called)
    model = in_precision(subject.model, subject.dtype)
    with isolate(model, subject.device):  # The exporter's own tensors must not stay in it.
        samples = _SAMPLES if batch.splittable else 0
        return surface.origin.graphs.export(model, arguments, keywords, samples, prediction)


def share_graphs(surfaces: Iterable[LossSurface]) -> None:
    """Let surfaces use each other's exported graphs, where their models have one structure."""
    graphs: ExportedGraphs | None = None
    for surface in surfaces:
        graphs = graphs or surface.graphs
        surface.graphs = graphs
