r"""Second derivatives of the loss by the values of basis paths, as far as one sweep gives them.

In: a surface and its basis paths. Out: `SecondDerivatives`, the diagonal of the Hessian in path
space. A path value that no other weight is divided by moves one weight: its second derivative is
that weight's, in other units. The others are roots.

The root of a unit is the last edge on its route in that is not free, and units of one root form a
chain: the free edge of each leads to the next. For the root v_k of a chain, let D_k be v_k times
the tangent of the weights along it: the weight of k grows, all that leaves the units of the chain
shrinks, free weights aside. Then

    ∂²L/∂v_k² = v_k⁻² { E Σ_c λ_c (u_c · J D_k)² + 2 Σ_b Σ_e w_e (g_e(a) - g_e(ȧ)) }

over the units b of the chain and the weights e that leave them. The first sum comes from one
auxiliary number per sample and root (`_TangentRun`); ȧ is known one layer ahead, so that the
network is cut at its layers, and one short pass back through what lies between them gives g_e(ȧ)
for all weights at once (`_CutRun`). One sweep can handle a root (`find_chains`) if

1. the sweep reads the root's weight where it enters its unit, and all that leaves the chain;
2. nothing that leaves a unit comes back to it, as in a residual stream;
3. at most two units of the chain are active, and from the first to the second leads no route but
   the weights of a single layer.

A unit is active unless it is a relay: only the free weight of a folded batch-norm leaves it, which
passes the tangent on as it is. No root can be handled where activations are multiplied with each
other, or where a unit without a basis path still has influence on the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, fx

from flatgauge.curvature.block_diagonal import block_curvature
from flatgauge.curvature.sweep.backprop import MOST_FACTORS, Sweep, sweep_of
from flatgauge.curvature.sweep.plan import SweepPlan
from flatgauge.estimators.linalg import to_float64
from flatgauge.graph.export import ModelGraph
from flatgauge.graph.layers import Layer, input_dependent_uses
from flatgauge.graph.ops import arguments_of, multiplied_arguments, shape_of
from flatgauge.surface.surface import LossSurface
from flatgauge.symmetry.basis_paths import BasisPaths
from flatgauge.symmetry.incidence import NO_UNIT, Integers, Mask


@dataclass(frozen=True)
class SecondDerivatives:
    """The diagonal of the Hessian in path space, zero where not `known`; `notes` say why."""

    values: Tensor
    known: Tensor
    gradient: Tensor
    notes: tuple[str, ...]


def path_second_derivatives(
    surface: LossSurface,
    paths: BasisPaths,
    *,
    all_columns: bool = False,
    generator: Generator | None = None,
) -> SecondDerivatives:
    """Find the diagonal of the Hessian in path space; `generator` only shares earlier sweeps."""
    source = None if generator is None else generator.clone_state()
    return surface.cache.get(
        ("second derivatives", paths.skeleton, all_columns),
        lambda: _second_derivatives(surface, paths, source, all_columns=all_columns),
    )


def _second_derivatives(
    surface: LossSurface, paths: BasisPaths, generator: Generator | None, *, all_columns: bool
) -> SecondDerivatives:
    sweep, mapping = sweep_of(surface), paths.map
    slopes = mapping.to_row(surface.split(surface.gradient()))
    gradient = mapping.pull_back(slopes)
    values, known = torch.zeros_like(gradient), torch.zeros(len(paths), dtype=torch.bool)
    outputs = sweep.plan.outputs_per_sample()
    reason = "some outputs may have no loss" if sweep.loss.may_be_undefined else ""
    if outputs > MOST_FACTORS + 1 and not all_columns:
        reason = f"there are {outputs} outputs (`all_columns=True` sweeps them)"
    if reason:
        return SecondDerivatives(values, known, gradient, (f"not swept, as {reason}",))
    blocks = block_curvature(
        surface, ("diagonal",), all_columns=all_columns, estimate=False, generator=generator
    )
    diagonal, swept = torch.zeros_like(slopes), torch.zeros(len(slopes), dtype=torch.bool)
    for name, block in blocks.items():
        if name in paths.edges.starts:
            span = paths.edges.span(name)
            diagonal[span] = block.values["diagonal"].double().cpu().reshape(-1)
            swept[span] = block.exact
    is_root = torch.zeros(len(paths), dtype=torch.bool)
    is_root[paths.roots] = True
    known = swept[mapping.places] & ~is_root & ~mapping.moves_a_bias
    values[known] = (diagonal[mapping.places] * mapping.slopes.square())[known]
    chains = find_chains(paths, sweep.plan)
    if len(chains.roots):
        values[chains.roots] = _root_derivatives(sweep, paths, chains, slopes)
        known[chains.roots] = True
    notes = []
    missing = int((~known & is_root).sum())
    if missing:
        notes.append(
            f"{missing} of {int(is_root.sum())} roots belong to chains of several units or feed "
            "back into themselves: by products"
        )
    missing = int((~known & ~is_root).sum())
    if missing:
        reasons = sorted(set(blocks.missing.values()))
        why = reasons[0] if reasons else "a batch-norm's scale moves its bias along"
        notes.append(f"{missing} further paths by products: {why}")
    return SecondDerivatives(values, known, gradient, tuple(notes))


def _root_derivatives(sweep: Sweep, paths: BasisPaths, chains: Chains, slopes: Tensor) -> Tensor:
    """The second derivatives by the roots of chains, from the gradient by all weights."""
    count = len(chains.roots)
    squares, tangents = sums = torch.zeros(2, count, dtype=torch.float64)

    def sweep_batches() -> None:
        for plan, batch in sweep.batches():
            places = _places(paths, chains, plan, sweep.surface.device)
            whole = _TangentRun(places)
            with torch.enable_grad():
                logits = sweep.run(plan, batch, whole.handlers())
                curvature, _ = sweep.loss_hessian(plan, logits.detach(), batch)
                for values, factor in curvature.factors():
                    along = whole.along(logits, values.to(logits), count)
                    weighted = along if factor is None else along * factor.to(along)[:, None]
                    squares.add_((weighted * along).sum(0).cpu())
                backward = whole.output_gradients(logits, sweep.total_loss(plan, batch))
                del logits
                cut = _CutRun(places)
                sweep.run(plan, batch, cut.handlers())
                tangents.add_(cut.tangents(backward, chains).cpu())

    processes = sweep.surface.processes
    processes.run("the sweep of paths", sweep_batches)
    squares, tangents = processes.all_sum(sums)
    data = (squares - 2 * tangents) / sweep.surface.risk.count
    # What leaves the units of a chain, times its gradient, twice; and what weight decay adds.
    amounts, roots = paths.map.amounts, torch.from_numpy(chains.roots)
    number, decay = torch.full((len(paths) + 1,), count), sweep.surface.weight_decay
    number[roots] = torch.arange(count)
    shares = 2 * amounts * slopes[paths.map.places] + decay * amounts.square()
    own = torch.zeros(count + 1, dtype=torch.float64)
    own.index_add_(0, number[paths.map.roots], shares)
    data += own[:-1] + decay * amounts[roots].square()
    derivatives: Tensor = data / paths.values[roots].square()
    return derivatives


# -- the roots that one sweep can handle ----------------------------------------------------------


@dataclass(frozen=True)
class Chains:
    """The coordinates whose second derivative one sweep gives; chain i has the root `roots[i]`."""

    roots: Integers
    active_units: Integers  #: How many active units every chain has: none, one or two.
    inner_edges: Integers  #: The edges from the first active unit of a chain to the second.
    inner_chains: Integers  #: The chain of every inner edge.
    chain_of: Integers  #: Of every unit, or `NO_UNIT`; the last entry is for inputs and outputs.


def find_chains(paths: BasisPaths, plan: SweepPlan) -> Chains:
    """Find the roots that one sweep can handle; `plan` says what the sweep reads, and where."""
    edges, leaving = paths.edges, paths.skeleton_edges.leaving
    chain_of, successor = np.full((2, len(paths.root_of)), NO_UNIT)
    roots, active_units = list[int](), list[int]()
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
    numbers, counts = np.array([roots, active_units], np.int64)
    return Chains(numbers, counts, inner, chain_of[edges.tails[inner]], chain_of)


class _RoutesThroughOps:
    """Routes from unit to unit through ops; what writes to a relay also writes to the next unit."""

    def __init__(self, paths: BasisPaths, plan: SweepPlan, relays: Mask) -> None:
        edges, uses = paths.edges, input_dependent_uses(plan.graph)
        #: For every op, all that depend on it.
        self._descendants: dict[fx.Node, set[fx.Node]] = {}
        for node in reversed(plan.graph.nodes):
            later = (self._descendants[user] for user in node.users)
            self._descendants[node] = set(node.users).union(*later)
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
    return any(sum(f in dependent for f in multiplied_arguments(n)) > 1 for n in graph.nodes)


# -- where weights are read ----------------------------------------------------------------------


@dataclass(frozen=True)
class SingleEdges:
    """Weights (or biases) that one op reads, each with its own contribution to the output."""

    layer: Layer | None  #: The layer whose weights they are; None for biases.
    weights: Tensor  #: Their values (edges,).
    rows: Tensor  #: The output units that they enter.
    columns: Tensor  #: The input units that they leave; empty for biases.
    taps: Tensor  #: Their positions in the kernel; empty for biases.
    chains: Tensor  #: The chain that each belongs to.
    axis: int  #: The axis of the op's output along which units lie.

    def contributions(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """What every edge adds to its output unit, laid out like the output, one slice per edge."""
        weights = self.weights.to(outputs)
        if self.layer is None:
            shape, ends = list(outputs.shape), [1] * outputs.dim()
            shape[self.axis] = ends[self.axis] = len(weights)
            return weights.reshape(ends).expand(shape)
        if self.layer.kind == "linear":
            return inputs.index_select(-1, self.columns) * weights
        kernels = weights.new_zeros(len(weights), 1, *self.layer.shape[2:])
        kernels.flatten(1)[torch.arange(len(weights)), self.taps] = weights
        node = self.layer.node
        arguments = arguments_of(node) | {
            "input": inputs.index_select(1, self.columns),
            "weight": kernels,
            "bias": None,
            "groups": len(weights),
        }
        found: Tensor = node.target(*arguments.values())  # type: ignore[operator]
        return found

    def add_scaled(self, outputs: Tensor, contributions: Tensor, factors: Tensor) -> Tensor:
        """The outputs with every contribution added once more, times a factor (n, edges)."""
        shape = [1] * outputs.dim()
        shape[0], shape[self.axis] = factors.shape
        return outputs.index_add(self.axis, self.rows, contributions * factors.reshape(shape))

    def products(self, contributions: Tensor, gradients: Tensor) -> Tensor:
        """Every edge's contribution times the gradient at its output unit, summed: (edges,)."""
        each = contributions * gradients.index_select(self.axis, self.rows)
        return each.movedim(self.axis, 0).flatten(1).sum(1, dtype=torch.float64)


@dataclass
class Place:
    """An op that reads weights."""

    node: fx.Node
    layer: Layer | None  #: None for a batch-norm.
    columns: Tensor  #: For every input unit, its chain; the number of chains where in none.
    position: int = 0  #: Which of the op's arguments is the activation.
    axis: int = 1  #: The axis of the op's input and output along which units lie.
    reads_chains: bool = False  #: Whether any of them is in one.
    is_cut: bool = False  #: Whether any weight enters or leaves a unit there.
    #: Those of its weights and biases that are roots of chains (`"root"`), free edges of their
    #: units (`"free"`), inner edges of chains (`"inner"`), and those of them that are not free.
    edges: dict[str, list[SingleEdges]] = field(default_factory=dict)


def _places(
    paths: BasisPaths, chains: Chains, plan: SweepPlan, device: torch.device
) -> list[Place]:
    """Every layer, and every batch-norm with a root: where the weights of chains are read."""
    units = np.flatnonzero(chains.chain_of[:-1] != NO_UNIT)
    lost = ~np.isin(chains.inner_edges, paths.skeleton_edges.leaving)
    kinds = {
        "root": (paths.places[chains.roots], np.arange(len(chains.roots))),
        "free": (paths.skeleton_edges.leaving[units], chains.chain_of[units]),
        "inner": (chains.inner_edges, chains.inner_chains),
        "lost": (chains.inner_edges[lost], chains.inner_chains[lost]),
    }
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    found: dict[fx.Node, Place] = {}
    for layer in plan.layers.values():
        axis = -1 if layer.kind == "linear" else 1
        place = found[layer.node] = Place(layer.node, layer, empty, layer.position, axis)
        if layer.name not in plan.sites or layer.name not in paths.edges.starts:
            continue
        tails = torch.from_numpy(paths.edges.part(paths.edges.tails, layer.name))
        input_units = layer.canonical(tails)[:, 0, :, 0].reshape(-1)
        chain = torch.from_numpy(chains.chain_of)[input_units]
        place.columns = torch.where(chain == NO_UNIT, len(chains.roots), chain).to(device)
        place.reads_chains = bool((chain != NO_UNIT).any())
        span = paths.edges.span(layer.name)
        both = paths.edges.heads[span], paths.edges.tails[span]
        place.is_cut = any(bool((end != NO_UNIT).any()) for end in both)
        for kind, ends in kinds.items():
            edges = _single_edges(paths, layer.name, place, layer, *ends)
            if len(edges.weights):
                place.edges.setdefault(kind, []).append(edges)
    for name, site in plan.sites.items():
        if site.role in ("bias", "norm") and name in paths.edges.starts:
            place = found.get(site.node, Place(site.node, None, empty))
            edges = _single_edges(paths, name, place, None, *kinds["root"])
            if len(edges.weights):
                found[site.node] = place
                place.edges.setdefault("root", []).append(edges)
    return list(found.values())


def _single_edges(
    paths: BasisPaths,
    name: str,
    place: Place,
    layer: Layer | None,
    places: Integers,
    chains: Integers,
) -> SingleEdges:
    """Those of some edges that belong to a parameter: weights of a layer, or biases."""
    span = paths.edges.span(name)
    chosen = np.flatnonzero((places >= span.start) & (places < span.stop))
    index = torch.from_numpy(places[chosen] - span.start)
    weights = torch.from_numpy(paths.edges.weights[places[chosen]])
    rows, columns, taps = index, index[:0], index[:0]
    if layer is not None:
        size = span.stop - span.start
        order = layer.canonical(torch.arange(size).reshape(layer.shape))
        position = torch.empty(size, dtype=torch.int64)
        position[order.reshape(-1)] = torch.arange(size)
        group, row, column, taps = torch.unravel_index(position[index], order.shape)
        rows, columns = group * order.shape[1] + row, group * order.shape[2] + column
    found = (weights, rows, columns, taps, torch.from_numpy(chains[chosen]))
    weights, rows, columns, taps, targets = (one.to(place.columns.device) for one in found)
    return SingleEdges(layer, weights, rows, columns, taps, targets, place.axis)


class _Run:
    """Runs the model with other inputs and outputs at some ops."""

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        self._inputs: dict[fx.Node, Tensor] = {}
        self._outputs: dict[fx.Node, Tensor] = {}
        self._leaves: list[tuple[Tensor, Tensor]] = []  # With the chains that they belong to.

    def handlers(self) -> dict[fx.Node, Callable[..., Any]]:
        """What stands in for the ops."""
        return {place.node: partial(self._run, place) for place in self._places}

    def _run(self, place: Place, *arguments: Any, **keywords: Any) -> Any:
        given, inputs = list(arguments), arguments[place.position]
        given[place.position] = self._change_input(place, inputs)
        result = place.node.target(*given, **keywords)  # type: ignore[operator]
        output, *others = result if isinstance(result, tuple) else (result,)
        self._outputs[place.node] = output = self._change_output(place, inputs, output)
        return (output, *others) if others else output

    def _gradients(self, total: Tensor, slope: Tensor | None = None) -> dict[fx.Node, Tensor]:
        """The gradient by the outputs of all ops, zeros where it does not reach."""
        live = {n: out for n, out in self._outputs.items() if out.requires_grad}
        grads: dict[fx.Node, Tensor | None] = {}
        if live and total.requires_grad:
            ends, keep = list(live.values()), slope is None
            found = torch.autograd.grad(total, ends, slope, retain_graph=keep, allow_unused=True)
            grads = dict(zip(live, found, strict=True))
        known = ((node, out, grads.get(node)) for node, out in self._outputs.items())
        return {n: torch.zeros_like(out) if one is None else one for n, out, one in known}

    def _change_input(self, place: Place, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def _change_output(self, place: Place, inputs: Tensor, output: Tensor) -> Tensor:
        raise NotImplementedError


class _TangentRun(_Run):
    """Runs the model with one auxiliary number per sample and edge or unit of a chain.

    What a root contributes grows with it, what leaves the units of its chain shrinks, and what
    leaves them over free edges is given back.
    """

    def along(self, logits: Tensor, column: Tensor, count: int) -> Tensor:
        """A column at the logits times the tangent of each of `count` chains: (n, chains)."""
        found = torch.autograd.grad(
            logits, [leaf for leaf, _ in self._leaves], column, retain_graph=True, allow_unused=True
        )
        sums = logits.new_zeros((len(logits), count + 1), dtype=torch.float64)
        for (_, chains), one in zip(self._leaves, found, strict=True):
            if one is not None:
                sums.index_add_(1, chains, one.double())
        return sums[:, :-1]  # The last one is of no chain.

    def output_gradients(
        self, logits: Tensor, total: Callable[[Tensor], Tensor]
    ) -> dict[fx.Node, Tensor]:
        """The gradient of the sum of the losses by the outputs of the ops."""
        point = to_float64(logits.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(total(point), point)
        return self._gradients(logits, slope.to(logits))

    def _change_input(self, place: Place, inputs: Tensor) -> Tensor:
        if not place.reads_chains:
            return inputs
        shape = [1] * inputs.dim()
        shape[0], shape[place.axis] = len(inputs), inputs.shape[place.axis]
        return inputs - inputs * self._leaf(inputs, place.columns).reshape(shape)

    def _change_output(self, place: Place, inputs: Tensor, output: Tensor) -> Tensor:
        for edges in (*place.edges.get("root", ()), *place.edges.get("free", ())):
            found = edges.contributions(inputs.detach(), output)
            output = edges.add_scaled(output, found, self._leaf(inputs, edges.chains))
        return output

    def _leaf(self, like: Tensor, chains: Tensor) -> Tensor:
        """Zeros, one per sample and entry of `chains`."""
        leaf = like.new_zeros(len(like), len(chains)).requires_grad_()
        self._leaves.append((leaf, chains))
        return leaf


class _CutRun(_Run):
    """Runs the model cut where units are entered: each layer gives a leaf, and reads the last."""

    def tangents(self, gradients: dict[fx.Node, Tensor], chains: Chains) -> Tensor:
        """Σ weight · gradient over what leaves each chain, its inputs replaced by tangents."""
        active, count = torch.from_numpy(chains.active_units), len(chains.roots)
        # From the heads of free edges back to where what they read was written.
        back = self._pass_back(gradients, "free")
        others = {node: gradients[node] - back[node] for node in gradients}
        sums = self._sums(others, "root", count)
        sums *= active > 0
        if (active == 2).any():
            # The second unit's tangent is what the first one's tangent sends it, less what the
            # weights between them lose.
            again = self._pass_back(others, "inner")
            sums += self._sums(again, "root", count) * (active == 2)
            sums -= self._sums(others, "lost", count)
        return sums

    def _pass_back(self, gradients: Mapping[fx.Node, Tensor], kind: str) -> dict[fx.Node, Tensor]:
        """Pass gradients back over some edges, and on to the outputs of the last layers."""
        total = torch.zeros((), dtype=torch.float64)
        for _, products in self._products(gradients, kind):
            total = total + products.sum().cpu()
        return self._gradients(total)

    @torch.no_grad()
    def _sums(self, gradients: Mapping[fx.Node, Tensor], kind: str, count: int) -> Tensor:
        """The products of some edges, summed by chain."""
        sums = torch.zeros(count, dtype=torch.float64)
        for edges, products in self._products(gradients, kind):
            sums.index_add_(0, edges.chains.cpu(), products.cpu())
        return sums

    def _products(
        self, gradients: Mapping[fx.Node, Tensor], kind: str
    ) -> Iterator[tuple[SingleEdges, Tensor]]:
        """Some edges, and what each contributes times the gradient where it enters."""
        for place in self._places:
            inputs, gradient = self._inputs[place.node], gradients[place.node]
            for edges in place.edges.get(kind, ()):
                yield edges, edges.products(edges.contributions(inputs, gradient), gradient)

    def _change_input(self, place: Place, inputs: Tensor) -> Tensor:
        return inputs.detach() if place.is_cut else inputs

    def _change_output(self, place: Place, inputs: Tensor, output: Tensor) -> Tensor:
        self._inputs[place.node] = inputs
        if place.is_cut or not output.requires_grad:
            return output.detach().requires_grad_()
        return output
