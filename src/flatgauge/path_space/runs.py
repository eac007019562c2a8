"""Runs: the hidden units that share a root, and for which of them one sweep is enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx

from flatgauge.curvature.degree import multiplied
from flatgauge.curvature.plan import Plan
from flatgauge.graph import ModelGraph
from flatgauge.nodes import shape_of
from flatgauge.path_space.basis import BasisPaths
from flatgauge.symmetry.pattern import NOTHING, Integers

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Runs:
    """The roots whose second derivative one sweep gives.

    A run is what shares a root: units b₁, b₂, … with the free edge of each leading to the next.

    Attributes:
        roots: Their coordinates.
        active: Which of them have a run with units that any but free edges leave.
        paired: Which of them have a run of two such units.
        links: The edges that lead from the first unit of a pair to the second, and the number of
            its root.
        target: For every unit, the number of its root in `roots`, or `NOTHING` (units + 1,).
    """

    roots: Integers
    active: Mask
    paired: Mask
    links: tuple[Integers, Integers]
    target: Integers


def runs_of(paths: BasisPaths, plan: Plan) -> Runs:
    """Find the roots for which one sweep is enough.

    The tangent along a root's coordinate must be known at the units of its run without following
    it through the network. It is where a run has one unit, or two, and where nothing that leaves
    them comes back to them by way of another unit.

    Args:
        paths: The basis paths.
        plan: How the model is swept.

    Returns:
        The runs.
    """
    edges, count = paths.edges, len(paths.root_of) - 1
    nothing, never = np.zeros(0, np.int64), np.zeros(0, bool)
    none = Runs(nothing, never, never, (nothing, nothing), np.full(count + 1, NOTHING))
    if not len(paths) or _some_alive(paths) or _products_of_activations(plan.graph):
        return none
    coordinates = np.zeros(edges.weights.size, bool)
    coordinates[paths.places] = True
    bad = _unread(paths, plan, coordinates)
    leaving = np.bincount(edges.tails[paths.places] + 1, minlength=count + 1)[1:]
    # Nothing leaves these but the free weight of a batch-norm: they only pass on.
    through = (leaving == 0) & _into_norms(paths, plan)
    around, levels = _levels(paths, through)
    bad |= around
    loops = _unseen_ways(paths, plan)
    follower = _followers(paths, through)
    follows = paths.map.follows
    readable = {name: _readable(plan, name) for name in edges.names}
    eligible: list[int] = []
    sizes: list[int] = []
    links, owners = [nothing], [nothing]
    order = np.argsort(paths.root_of[:-1], kind="stable")
    shared = paths.root_of[:-1][order]
    starts = np.searchsorted(shared, np.unique(shared[shared != NOTHING]), side="left")
    for units in np.split(order, starts)[1:]:
        root = int(paths.root_of[units[0]])
        active = units[~through[units]]
        active = active[np.argsort(levels[active], kind="stable")]
        near = len(active) == 2 and levels[active[1]] == levels[active[0]] + 1
        returns = any(before[units].any() and after[units].any() for before, after in loops)
        bound = bad[units].any() or returns
        if (len(active) <= 1 or near) and not bound and _read(paths, plan, readable, follows, root):
            if near:
                leads = follower[edges.heads] == active[1]
                links.append(np.flatnonzero((edges.tails == active[0]) & leads))
                owners.append(np.full(len(links[-1]), len(eligible)))
            eligible.append(root)
            sizes.append(len(active))
    target = np.full(count + 1, NOTHING)
    numbers = {root: number for number, root in enumerate(eligible)}
    for unit, root in enumerate(paths.root_of[:-1].tolist()):
        target[unit] = numbers.get(root, NOTHING)
    lengths = np.array(sizes, np.int64)
    between = np.concatenate(links), np.concatenate(owners)
    return Runs(np.array(eligible, np.int64), lengths > 0, lengths == 2, between, target)


def _unread(paths: BasisPaths, plan: Plan, coordinates: Mask) -> Mask:
    """The units that some edge leaves which the sweep does not read as a layer's."""
    edges = paths.edges
    bad = np.zeros(len(paths.root_of), bool)
    for number, name in enumerate(edges.names):
        start = edges.starts[name]
        span = slice(start, start + int(np.prod(edges.shapes[number])))
        site = plan.sites.get(name)
        if site is not None and site.role == "layer" and _in_front(plan, site.node):
            continue
        if name in plan.exact and site is None:
            continue  # The output does not depend on it.
        scale = site is not None and site.role == "norm"
        # A batch-norm passes on what reaches it, as long as its weights stay as they are.
        wrong = coordinates[span] if scale else np.ones(span.stop - span.start, bool)
        bad[edges.tails[span][wrong]] = True
    bad[NOTHING] = False
    return bad[:-1]


def _some_alive(paths: BasisPaths) -> bool:
    """Whether a unit that was left out still takes part, by paths off the skeleton."""
    if not paths.dropped:
        return False
    edges = paths.edges
    there = edges.weights != 0
    heads, tails = edges.heads[there], edges.tails[there]
    alive = paths.root_of == NOTHING
    alive[NOTHING] = False
    for ends, others in ((heads, tails), (tails, heads)):
        reached = np.zeros(len(paths.root_of), bool)
        reached[NOTHING] = True
        count = 0
        while count != (count := int(reached.sum())):
            reached[ends[reached[others]]] = True
        alive &= reached
    return bool(alive.any())


def _unseen_ways(paths: BasisPaths, plan: Plan) -> list[tuple[Mask, Mask]]:
    """Layers that no unit is seen to leave by: pinned ones, and those from a unit to itself.

    They may still lead from one unit of a run to another, or back to the same.

    Returns:
        For every such layer, the units that are entered before it, and those read after it.
    """
    edges, count = paths.edges, len(paths.root_of)
    spans = {
        name: slice(edges.starts[name], edges.starts[name] + int(np.prod(shape)))
        for name, shape in zip(edges.names, edges.shapes, strict=True)
    }
    unseen = {
        layer.node
        for name, layer in plan.layers.items()
        if name in spans and (edges.heads[spans[name]] == NOTHING).any()
    }
    fed, holding = set(plan.graph.inputs), {n: {name} for n, name in plan.graph.held.items()}
    behind: dict[fx.Node, set[fx.Node]] = {}
    found = {node: (np.zeros(count, bool), np.zeros(count, bool)) for node in unseen}
    entered: dict[fx.Node, Mask] = {}
    for node in plan.graph.nodes:
        sources = node.all_input_nodes
        names = {name for source in sources for name in holding.get(source, ())} & set(spans)
        behind[node] = set().union(*(behind.get(s, set()) | ({s} & unseen) for s in sources))
        before = entered[node] = np.zeros(count, bool)
        for source in sources:
            before |= entered.get(source, False)
        if node in unseen:
            found[node][0][before] = True
        if any(source in fed for source in sources):
            fed.add(node)
            for name in names:
                before[edges.heads[spans[name]]] = True
                for layer in behind[node]:
                    found[layer][1][edges.tails[spans[name]]] = True
        else:
            holding.setdefault(node, set()).update(names)
    return [(before[:-1], after[:-1]) for before, after in found.values()]


def _into_norms(paths: BasisPaths, plan: Plan) -> Mask:
    """The units whose free edge is the weight of a batch-norm."""
    edges, found = paths.edges, np.zeros(paths.edges.weights.size, bool)
    for number, name in enumerate(edges.names):
        site = plan.sites.get(name)
        if site is not None and site.role == "norm":
            start = edges.starts[name]
            found[start : start + int(np.prod(edges.shapes[number]))] = True
    leaving = paths.chosen.leaving
    into: Mask = found[leaving] & (leaving != NOTHING)
    return into


def _readable(plan: Plan, name: str) -> bool:
    """Whether the sweep reads a parameter, with the samples in front."""
    site = plan.sites.get(name)
    return site is not None and _in_front(plan, site.node)


def _read(
    paths: BasisPaths, plan: Plan, readable: Mapping[str, bool], follows: Tensor, root: int
) -> bool:
    """Whether the sweep reads the weight of a root where it enters its unit."""
    name, _ = paths.edges.owner(int(paths.places[root]))
    if not readable[name]:
        return False
    role = plan.sites[name].role
    return role in ("layer", "bias") or (role == "norm" and not bool(follows[root]))


def _in_front(plan: Plan, node: fx.Node) -> bool:
    """Whether the samples lie in front of what an op reads and gives, one by one."""
    activations = [n for n in node.all_input_nodes if plan.graph.sample_axis(n) is not None]
    return all(
        (axis := plan.graph.sample_axis(n)) is not None
        and axis.axis == 0
        and str(shape_of(n)[0]) == plan.graph.symbol
        for n in (node, *activations)
    )


def _followers(paths: BasisPaths, through: Mask) -> Integers:
    """For every unit (and for nothing), the first one from it on that does not only pass on."""
    found = np.append(np.arange(len(through)), NOTHING)
    for unit in paths.chosen.outward.tolist():  # What comes after it comes first.
        if through[unit]:
            found[unit] = found[paths.edges.heads[paths.chosen.leaving[unit]]]
    return found


def _levels(paths: BasisPaths, through: Mask) -> tuple[Mask, Integers]:
    """Which units feed back into themselves, and how many units lie before every other at most.

    Returns:
        A mask of units, and levels; units that only pass on add nothing to a level.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges, count = paths.edges, len(through)
    inner = (edges.tails != NOTHING) & (edges.heads != NOTHING)
    pairs = np.unique(edges.tails[inner] * count + edges.heads[inner])
    tails, heads = pairs // count, pairs % count
    graph = coo_array((np.ones(len(pairs)), (tails, heads)), shape=(count, count))
    _, parts = connected_components(graph, connection="strong")
    around = np.bincount(parts, minlength=count)[parts] > 1
    around[tails[tails == heads]] = True
    levels = np.zeros(count, np.int64)
    forward = parts[tails] != parts[heads]
    tails, heads = tails[forward], heads[forward]
    steps = (~through[heads]).astype(np.int64)
    while True:
        raised = levels.copy()
        np.maximum.at(raised, heads, levels[tails] + steps)
        # All units of a part have the highest level of any of them.
        top = np.zeros(parts.max(initial=0) + 1, np.int64)
        np.maximum.at(top, parts, raised)
        raised = top[parts]
        if (raised == levels).all():
            return around, levels
        levels = raised


def _products_of_activations(graph: ModelGraph) -> bool:
    """Whether anywhere two things are multiplied that both depend on the inputs."""
    fed = set(graph.inputs)
    for node in graph.nodes:
        if any(source in fed for source in node.all_input_nodes):
            fed.add(node)
        if sum(source in fed for source in multiplied(node)) > 1:
            return True
    return False
