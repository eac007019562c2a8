"""Runs: the hidden units that share a root, and for which of them one sweep is enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import fx

from flatgauge.curvature.degree import multiplied
from flatgauge.curvature.plan import Plan
from flatgauge.graph import ModelGraph
from flatgauge.nodes import shape_of
from flatgauge.path_space.basis import BasisPaths
from flatgauge.path_space.ways import Ways
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
    them comes back to them by way of another layer.

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
    into = _into_norms(paths, plan)
    through = (leaving == 0) & into
    # What follows a batch-norm hears of the unit before it, and must be in the same run.
    next_root = paths.root_of[edges.heads[paths.chosen.leaving]]
    bad |= into & ~through & (next_root != paths.root_of[:-1])
    ways = Ways(paths, plan, through)
    follower, read = _followers(paths, through), _read(paths, plan)
    eligible: list[int] = []
    sizes: list[int] = []
    target, second = (np.full(count + 1, NOTHING) for _ in range(2))
    for root, units in _sharing(paths):
        active = _in_order(paths, follower, units[~through[units]])
        near = len(active) == 2 and not ways.around(*active)
        alone = not any(ways.back(unit) for unit in units.tolist())
        if (len(active) <= 1 or near) and alone and read[root] and not bad[units].any():
            target[units] = len(eligible)
            if near:
                second[active[0]] = active[1]
            eligible.append(root)
            sizes.append(len(active))
    follows = second[edges.tails]
    links = np.flatnonzero((follows != NOTHING) & (follows == follower[edges.heads]))
    lengths = np.array(sizes, np.int64)
    return Runs(
        np.array(eligible, np.int64),
        lengths > 0,
        lengths == 2,
        (links, target[edges.tails[links]]),
        target,
    )


def _sharing(paths: BasisPaths) -> Iterator[tuple[int, Integers]]:
    """The roots, each with the units that share it."""
    roots = paths.root_of[:-1]
    order = np.argsort(roots, kind="stable")
    order = order[roots[order] != NOTHING]
    found, starts = np.unique(roots[order], return_index=True)
    ends = pairwise([*starts, len(order)])
    for root, (start, stop) in zip(found.tolist(), ends, strict=True):
        yield root, order[start:stop]


def _unread(paths: BasisPaths, plan: Plan, coordinates: Mask) -> Mask:
    """The units that some edge leaves which the sweep does not read as a layer's."""
    edges = paths.edges
    bad = np.zeros(len(paths.root_of), bool)
    for name in edges.names:
        span = edges.span(name)
        site = plan.sites.get(name)
        if site is not None and site.role == "layer" and _in_front(plan, site.node):
            continue
        if name in plan.exact and site is None:
            continue  # The output does not depend on it.
        # A batch-norm passes on what reaches it, as long as its weights stay as they are.
        passes = site is not None and name in edges.folded
        wrong = coordinates[span] if passes else np.ones(span.stop - span.start, bool)
        bad[edges.tails[span][wrong]] = True
    bad[NOTHING] = False
    return bad[:-1]


def _into_norms(paths: BasisPaths, plan: Plan) -> Mask:
    """The units whose free edge is the weight of a batch-norm."""
    edges, found = paths.edges, np.zeros(paths.edges.weights.size, bool)
    for name in edges.names:
        if name in edges.folded and name in plan.sites:
            found[edges.span(name)] = True
    leaving = paths.chosen.leaving
    into: Mask = found[leaving] & (leaving != NOTHING)
    return into


def _read(paths: BasisPaths, plan: Plan) -> Mask:
    """For every coordinate, whether the sweep reads its weight where it enters its unit."""
    found = np.zeros(paths.edges.weights.size, bool)
    for name in paths.edges.names:
        site = plan.sites.get(name)
        found[paths.edges.span(name)] = (
            site is not None
            and (site.role != "norm" or name in paths.edges.folded)
            and _in_front(plan, site.node)
        )
    follows: Mask = paths.map.follows.numpy()
    return found[paths.places] & ~follows


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


def _in_order(paths: BasisPaths, follower: Integers, units: Integers) -> list[int]:
    """The units of a run, the one that leads to the other first, where there are two."""
    found: list[int] = units.tolist()
    if len(found) == 2:
        leads = follower[paths.edges.heads[paths.chosen.leaving[found[0]]]]
        return found if leads == found[1] else found[::-1]
    return found


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


def _products_of_activations(graph: ModelGraph) -> bool:
    """Whether anywhere two things are multiplied that both depend on the inputs."""
    fed = set(graph.inputs)
    for node in graph.nodes:
        if any(source in fed for source in node.all_input_nodes):
            fed.add(node)
        if sum(source in fed for source in multiplied(node)) > 1:
            return True
    return False
