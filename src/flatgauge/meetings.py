"""Where in a graph parameters meet what depends on the inputs."""

from __future__ import annotations

from torch import fx

from flatgauge.graph import ModelGraph


def meetings(graph: ModelGraph) -> dict[str, list[fx.Node]]:
    """Find the ops at which every parameter meets what depends on the inputs.

    Args:
        graph: The graph.

    Returns:
        By parameter, the ops in the order in which they run; none for a parameter that never does.
    """
    fed = set(graph.inputs)
    holding = {node: {name} for node, name in graph.held.items()}
    found: dict[str, list[fx.Node]] = {name: [] for name in graph.held.values()}
    for node in graph.nodes:
        sources = node.all_input_nodes
        names = {name for source in sources for name in holding.get(source, ())}
        if any(source in fed for source in sources):
            fed.add(node)
            for name in names:
                found[name].append(node)
        else:
            holding.setdefault(node, set()).update(names)
    return found
