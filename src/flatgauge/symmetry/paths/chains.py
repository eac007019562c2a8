"""Chains: the hidden units that share a root coordinate, and the roots that one sweep can handle.

In: the basis paths of a model and the plan of its exact sweep. Out: `Chains`, the roots whose
second derivative one sweep gives (`curvature`).

The root of a unit is the last edge on its route in that is not free, and units of one root form a
chain: the free edge of each leads to the next. Moving the root's coordinate scales the root's
weight and, inversely, all that leaves the chain, free edges aside. The sweep needs the tangent
along this move at the units of the chain without following it through the network. It is known if

1. the sweep reads the root's weight where it enters its unit, and all that leaves the chain;
2. nothing that leaves a unit comes back to it, as in a residual stream;
3. at most two units of the chain are active, and from the first to the second leads no route but
   the weights of a single layer.

A unit is active unless it is a relay: only the free weight of a folded batch-norm leaves it, which
passes the tangent on as it is. No root can be handled where activations are multiplied with each
other, or where a unit without a basis path still has influence on the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from flatgauge.curvature.sweep.plan import SweepPlan
from flatgauge.graph.export import ModelGraph
from flatgauge.graph.layers import input_dependent_uses
from flatgauge.graph.ops import multiplied_arguments, shape_of
from flatgauge.symmetry.incidence import NO_UNIT, Integers, Mask

if TYPE_CHECKING:
    from flatgauge.symmetry.paths.basis import BasisPaths


@dataclass(frozen=True)
class Chains:
    """The coordinates whose second derivative one sweep gives; chain i has the root `roots[i]`.

    Attributes:
        active_units: How many active units every chain has: none, one or two.
        inner_edges: The edges from the first active unit of a chain to the second.
        inner_chains: The chain of every inner edge.
        chain_of: The chain of every unit, or `NO_UNIT`; the last entry is for inputs and outputs.
    """

    roots: Integers
    active_units: Integers
    inner_edges: Integers
    inner_chains: Integers
    chain_of: Integers


def find_chains(paths: BasisPaths, plan: SweepPlan) -> Chains:
    """Find the roots that one sweep can handle; `plan` says what the sweep reads, and where."""
    edges, leaving = paths.edges, paths.skeleton_edges.leaving
    chain_of, successor = np.full((2, len(paths.root_of)), NO_UNIT)
    roots: list[int] = []
    active_units: list[int] = []
    next_active = np.arange(len(paths.root_of))
    if len(paths) and not _dropped_unit_matters(paths) and not _multiplies_activations(plan.graph):
        relays, blocked = _relays_and_blocked(paths, plan)
        next_active = _next_active_units(paths, relays)
        sweeps_root = _swept_coordinates(paths, plan)
        routes = _RoutesThroughOps(paths, plan, relays)
        for root, units in _units_by_root(paths):
            active = units[~relays[units]].tolist()
            if not sweeps_root[root] or blocked[units].any() or len(active) > 2:
                continue
            if any(routes.return_to(unit) for unit in units.tolist()):
                continue
            if len(active) == 2:
                if next_active[edges.heads[leaving[active[0]]]] != active[1]:
                    active.reverse()  # The first one is the one whose free edge leads to the other.
                if routes.bypass(*active):
                    continue
                successor[active[0]] = active[1]
            chain_of[units] = len(roots)
            roots.append(root)
            active_units.append(len(active))
    wanted = successor[edges.tails]
    inner = np.flatnonzero((wanted != NO_UNIT) & (wanted == next_active[edges.heads]))
    return Chains(
        np.array(roots, np.int64),
        np.array(active_units, np.int64),
        inner,
        chain_of[edges.tails[inner]],
        chain_of,
    )


class _RoutesThroughOps:
    """Routes from unit to unit through ops; what writes to a relay also writes to the next unit."""

    def __init__(self, paths: BasisPaths, plan: SweepPlan, relays: Mask) -> None:
        edges, uses = paths.edges, input_dependent_uses(plan.graph)
        self._descendants = _descendants(plan.graph)
        self._writers: list[set[fx.Node]] = [set() for _ in relays]
        self._readers: list[set[fx.Node]] = [set() for _ in relays]
        for name in edges.shapes:
            span, site = edges.span(name), plan.sites.get(name)
            ends = [(self._readers, edges.tails[span])]
            # No route enters a unit over what is only added to it.
            if site is None or site.role not in ("bias", "norm"):
                ends.append((self._writers, edges.heads[span]))
            for ops, units in ends:
                for unit in np.unique(units[units != NO_UNIT]).tolist():
                    ops[unit].update(uses[name])
        for unit in reversed(paths.skeleton_edges.outward.tolist()):  # From inputs to outputs.
            if relays[unit]:
                head = int(edges.heads[paths.skeleton_edges.leaving[unit]])
                self._writers[head] |= self._writers[unit]

    def return_to(self, unit: int) -> bool:
        """Whether what leaves a unit comes back to it, at once or further on."""
        return bool(self._readers[unit] & self._writers[unit]) or self.bypass(unit, unit)

    def bypass(self, first: int, second: int) -> bool:
        """Whether a route leads from one unit to another that is not a single layer."""
        writers = self._writers[second]
        return any(self._descendants[reader] & writers for reader in self._readers[first])


def _descendants(graph: ModelGraph) -> dict[fx.Node, set[fx.Node]]:
    """For every op, all that depend on it."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in reversed(graph.nodes):
        found[node] = set(node.users).union(*(found[user] for user in node.users))
    return found


# -- units and coordinates -----------------------------------------------------------------------


def _relays_and_blocked(paths: BasisPaths, plan: SweepPlan) -> tuple[Mask, Mask]:
    """The relays, and the units whose outgoing edges the sweep does not read as it must."""
    edges, leaving = paths.edges, paths.skeleton_edges.leaving
    moving, norms = np.zeros((2, edges.weights.size), bool)
    moving[paths.places] = True
    leaves_moving, blocked = np.zeros((2, len(paths.root_of)), bool)
    leaves_moving[edges.tails[moving]] = True
    for name in edges.shapes:
        span, site = edges.span(name), plan.sites.get(name)
        is_norm = site is not None and name in edges.norm_parameters
        norms[span] = is_norm
        if site is None and name in plan.exact:
            continue  # The output does not depend on it.
        if site is not None and site.role == "layer" and _samples_first(plan, site.node):
            continue
        # A batch-norm passes tangents on, as long as its own weights do not move.
        blocked[edges.tails[span][moving[span]] if is_norm else edges.tails[span]] = True
    enters_norm: Mask = norms[leaving] & (leaving != NO_UNIT)
    relays: Mask = enters_norm & ~leaves_moving[:-1]
    # The unit after a batch-norm depends on the one in front of it: both must be in one chain.
    splits = paths.root_of[edges.heads[leaving]] != paths.root_of[:-1]
    return relays, blocked[:-1] | (enters_norm & ~relays & splits)


def _swept_coordinates(paths: BasisPaths, plan: SweepPlan) -> Mask:
    """The coordinates whose weight the sweep reads where it enters its unit."""
    edges, found = paths.edges, np.zeros(paths.edges.weights.size, bool)
    for name in edges.shapes:
        site = plan.sites.get(name)
        if site is not None and (site.role != "norm" or name in edges.norm_parameters):
            found[edges.span(name)] = _samples_first(plan, site.node)
    moves_a_bias: Mask = paths.map.moves_a_bias.numpy()
    return found[paths.places] & ~moves_a_bias


def _samples_first(plan: SweepPlan, node: fx.Node) -> bool:
    """Whether axis 0 of what an op reads and gives counts the samples, one by one."""
    graph = plan.graph
    axes = {one: graph.sample_axis(one) for one in node.all_input_nodes}
    activations = {one: axis for one, axis in axes.items() if axis is not None}
    return all(
        axis is not None and axis.axis == 0 and str(shape_of(one)[0]) == graph.symbol
        for one, axis in (activations | {node: graph.sample_axis(node)}).items()
    )


def _next_active_units(paths: BasisPaths, relays: Mask) -> Integers:
    """For every unit, the first one from it on that is active; the last entry is `NO_UNIT`."""
    found = np.append(np.arange(len(relays)), NO_UNIT)
    for unit in paths.skeleton_edges.outward.tolist():  # From outputs to inputs.
        if relays[unit]:
            found[unit] = found[paths.edges.heads[paths.skeleton_edges.leaving[unit]]]
    return found


def _units_by_root(paths: BasisPaths) -> Iterator[tuple[int, Integers]]:
    """Each root in ascending order, with the units that share it."""
    root_of = paths.root_of[:-1]
    order = np.argsort(root_of, kind="stable")
    for units in np.split(order, np.flatnonzero(np.diff(root_of[order])) + 1):
        if len(units) and root_of[units[0]] != NO_UNIT:
            yield int(root_of[units[0]]), units


# -- the whole network ---------------------------------------------------------------------------


def _dropped_unit_matters(paths: BasisPaths) -> bool:
    """Whether a unit that was left out lies on a path of non-zero weights off the skeleton."""
    if not paths.dropped:
        return False
    nonzero = paths.edges.weights != 0
    heads, tails = paths.edges.heads[nonzero], paths.edges.tails[nonzero]
    matters = paths.root_of == NO_UNIT
    matters[NO_UNIT] = False
    for ends, starts in ((heads, tails), (tails, heads)):
        reached = np.zeros(len(paths.root_of), bool)
        reached[NO_UNIT] = True
        size = 0
        while size != (size := int(reached.sum())):
            reached[ends[reached[starts]]] = True
        matters &= reached
    return bool(matters.any())


def _multiplies_activations(graph: ModelGraph) -> bool:
    """Whether an op multiplies two tensors that both depend on the inputs."""
    dependent = set(graph.inputs)
    for node in graph.nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        if sum(factor in dependent for factor in multiplied_arguments(node)) > 1:
            return True
    return False
