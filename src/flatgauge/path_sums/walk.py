"""Carry sums over paths from the inputs of a graph to its output."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from flatgauge.graph import ModelGraph
from flatgauge.nodes import is_floating, shape_of
from flatgauge.path_sums import maps, moves, pools
from flatgauge.path_sums.table import Step, Sums, apply_rule, home

__all__ = ["maps", "moves", "path_sum", "pools"]  # The files of rules, which fill the table.


@torch.no_grad()
def path_sum(graph: ModelGraph, state: Mapping[str, Tensor], order: float) -> float:
    """Sum over all paths to a graph's output the product of weights along the path.

    A path starts at an entry of the input, or at a weight that is added. All that is computed
    from weights alone counts as one weight, with the value it has.

    Args:
        graph: A graph with one output, exported for one shape.
        state: The values of parameters and buffers, by name.
        order: The power that the size of every weight is raised to.

    Returns:
        The sum, in double precision; infinite if it is too large for that.

    Raises:
        UnsupportedGraphError: If an op on the way is not known to be piecewise linear.
    """
    (output,) = graph.outputs
    weights = graph.constants(state)
    sums: dict[fx.Node, Sums] = {node: _start(node) for node in graph.inputs}
    needed = _ancestors(output)
    steps = [node for node in graph.nodes if node in needed and node not in {*weights, *sums}]
    last = {source: node for node in steps for source in node.all_input_nodes}
    for node in steps:
        sums[node] = apply_rule(Step(node, sums, weights, order))
        for source in node.all_input_nodes:
            if last[source] is node and source is not output:
                sums.pop(source, None)  # Its memory is wanted for what comes.
    return float(Step(output, sums, weights, order).tensor(output).sum())


def _start(node: fx.Node) -> Tensor | None:
    """The one path of no weights that every entry of an input has; whole numbers have none."""
    if not is_floating(node):
        return None
    return torch.ones(shape_of(node), dtype=torch.float64, device=home(node.meta["val"].device))


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and all that it is computed from."""
    found, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found
